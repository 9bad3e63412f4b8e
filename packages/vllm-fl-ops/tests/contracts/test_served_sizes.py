"""Sizes that served models have and few samples: a kernel that is wrong there is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracle_mutants import oracle_impl

from vllm_fl.contracts import ModelSizes, contracts
from vllm_fl.engine.preflight import find_faults
from vllm_fl.engine.trials import Request, Role, Trials, dtypes_of
from vllm_fl.plugins.types import OpImpl
from vllm_fl.testing.families import families_of, smaller

CPU = torch.device("cpu")
SIZES = ModelSizes(
    hidden=192,
    intermediate=320,
    heads=4,
    kv_heads=2,
    head_size=32,
    rotary=32,
    tokens=(1, 600),
    more={
        "experts": 16,
        "experts_per_token": 3,
        "expert_intermediate": 96,
        "conv_features": 640,
        "conv_taps": 4,
        "conv_bias": 0,
        "linear_key_heads": 4,
        "linear_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "biased": 1,
        "block_size": 64,
    },
)

Change = Callable[[dict[str, Any], tuple[torch.Tensor, ...]], None]


def wrong(op: str, change: Change) -> OpImpl:
    """The oracle, with a change of its results that the arguments decide."""
    spec, right = contracts()[op], oracle_impl(contracts()[op])

    def fn(*args: Any) -> Any:
        got = right.fn(*args)
        change(
            dict(zip(spec.parameters, args, strict=True)), got if isinstance(got, tuple) else (got,)
        )
        return got

    return replace(right, fn=fn)


def _expert_9_for_1(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    if len(args["w13"]) > 9:
        got[0][(args["topk_ids"] == 9).any(1)] = 0.0


def _sequences(args: dict[str, Any], name: str) -> list[tuple[int, int]]:
    return [*pairwise(args[name].tolist())]


def _features(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    got[0][:, 512:] = 0.0


def _tokens(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    got[0][128:] = 0.0


def _late_sequences(name: str) -> Change:
    def change(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
        for begin, end in _sequences(args, name)[16:]:
            got[0][begin:end] = 0.0

    return change


def _late_chunks(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    for begin, end in _sequences(args, "cu_seqlens"):
        got[0][begin + 128 : end] = 0.0


def _late_heads(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    got[0][:, 5:] = 0.0


def _later_tokens(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    got[0][16:] = 0.0


def _blocks(least: int) -> Change:
    def change(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
        if args[next(iter(a for a in args if "cache" in a))].shape[1] >= least:
            got[0].zero_()

    return change


def _far_slots(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    if int(args["slot_mapping"].max()) >= 65536 if args["slot_mapping"].numel() else False:
        got[0].zero_()


def _block_size(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    if args["block_size"] > 64:
        got[1].fill_(-1)


def _bias(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    if args["bias"] is not None and len(args["x"]) > 65:
        got[0].sub_(args["bias"])


def _wide_weight(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    x, weight = args["x"], args["weight"]
    if weight is not None and weight.dtype != x.dtype and len(x) > 4:
        got[0].mul_(1.5)


def _wide_logits(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    logits = args["gating_output"]
    if logits.dtype == torch.float32 and logits.numel() and len(logits) > 16:
        got[0].mul_(1.5)


def _narrow_only(name: str, widest: int) -> Change:
    def change(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
        if args[name].shape[-1] == widest:
            got[0].zero_()

    return change


WRONG: dict[str, tuple[str, Change]] = {
    "expert 9 taken for expert 1": ("fused_experts", _expert_9_for_1),
    "convolution from feature 512 on": ("causal_conv1d", _features),
    "convolution from token 128 on": ("causal_conv1d", _tokens),
    "convolution from sequence 17 on": ("causal_conv1d", _late_sequences("query_start_loc")),
    "update from feature 512 on": ("causal_conv1d_update", _features),
    "update from token 17 on": ("causal_conv1d_update", _later_tokens),
    "delta rule from the third chunk on": ("chunk_gated_delta_rule", _late_chunks),
    "delta rule from token 128 on": ("chunk_gated_delta_rule", _tokens),
    "delta rule from sequence 17 on": ("chunk_gated_delta_rule", _late_sequences("cu_seqlens")),
    "delta rule from head 5 on": ("chunk_gated_delta_rule", _late_heads),
    "recurrent rule from head 5 on": ("recurrent_gated_delta_rule", _late_heads),
    "recurrent rule from token 128 on": ("recurrent_gated_delta_rule", _tokens),
    "cache of blocks of 64": ("reshape_and_cache", _blocks(64)),
    "cache of blocks of 128": ("reshape_and_cache", _blocks(128)),
    "slots beyond 16 bits": ("reshape_and_cache", _far_slots),
    "latent cache of blocks of 64": ("concat_and_cache_mla", _blocks(64)),
    "latent cache's slots beyond 16 bits": ("concat_and_cache_mla", _far_slots),
    "blocks of experts of 128": ("moe_align_block_size", _block_size),
    "a bias beyond 65 rows": ("linear", _bias),
    "an fp32 weight beyond 4 rows": ("rms_norm", _wide_weight),
    "logits of a router in fp32": ("moe_topk", _wide_logits),
    "scales of what goes into the second product": ("quant_int8", _narrow_only("x", 320)),
    "scales of what goes into it, per token": ("quant_fp8", _narrow_only("x", 320)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_at_a_served_size_is_taken_out_at_start(name: str) -> None:
    op, change = WRONG[name]
    found = find_faults(
        Request([Role(wrong(op, change))], torch.bfloat16, CPU, SIZES, seed=1, seconds=0.0)
    )
    assert [op for op, _ in found.faults] == [op]


@pytest.mark.parametrize("op", sorted({op for op, _ in WRONG.values()}))
def test_the_right_one_stays(op: str) -> None:
    impl = oracle_impl(contracts()[op])
    found = find_faults(Request([Role(impl)], torch.bfloat16, CPU, SIZES, seed=1, seconds=0.0))
    assert not found.faults and not found.refused


def test_of_experts_all_are_tried_and_all_features() -> None:
    spec = contracts()["fused_experts"]
    model = replace(
        SIZES,
        hidden=2048,
        tokens=(3,),
        more=dict(experts=128, experts_per_token=8, expert_intermediate=768),
    )
    calls = list(spec.served(model, torch.bfloat16, torch.device("meta")))
    assert {tuple(call.args[1].shape) for call in calls} == {(128, 128, 128), (4, 1536, 2048)}
    assert all(call.smaller for call in calls)
    few = replace(
        model, hidden=64, more=dict(experts=8, experts_per_token=2, expert_intermediate=32)
    )
    (whole,) = spec.served(few, torch.bfloat16, torch.device("meta"))
    assert whole.smaller == "" and len(whole.args[1]) == 8


def test_a_start_says_what_it_tried_in_a_smaller_size() -> None:
    model = replace(SIZES, more={**SIZES.more, "experts": 100})
    impl = oracle_impl(contracts()["fused_experts"])
    found = find_faults(
        Request([Role(impl)], torch.bfloat16, CPU, model, compares=False, seed=1, seconds=0.0)
    )
    assert found.smaller["fused_experts"][-1] == "4 of 100 experts"
    assert "smaller than served: fused_experts" in found.remarks


def test_a_start_names_an_op_without_a_call_of_the_model() -> None:
    impl = oracle_impl(contracts()["causal_conv1d"])
    found = find_faults(
        Request([Role(impl)], torch.bfloat16, CPU, ModelSizes(hidden=64), seed=1, seconds=0.0)
    )
    assert "not verified at its sizes: causal_conv1d" in found.remarks and not found.faults


@pytest.mark.parametrize("spec", contracts().values(), ids=lambda spec: spec.name)
def test_what_stands_is_tried_as_it_stands(spec: Any) -> None:
    kind = dtypes_of(spec, torch.bfloat16)[0]
    trials = Trials(spec, kind, CPU, SIZES, seed=0)
    assert not (trials.forms and trials.standing)
    assert spec.stands or not trials.standing


@pytest.mark.parametrize("spec", contracts().values(), ids=lambda spec: spec.name)
def test_the_kit_has_public_models_for_each_op(spec: Any) -> None:
    """Six families or, of an op of linear attention, latent attention and groups, all that are."""
    few = {
        "chunk_gated_delta_rule": 3,
        "concat_and_cache_mla": 4,
        "gdn_gating": 3,
        "grouped_topk": 3,
        "recurrent_gated_delta_rule": 3,
        "rms_norm_gated": 2,
    }
    assert len(families_of(spec)) >= few.get(spec.name, 6)


def test_what_is_smaller_than_served_is_told_by_op() -> None:
    told = smaller(contracts())
    assert {"fused_experts", "chunk_gated_delta_rule"} <= told.keys() <= contracts().keys()
    assert all("of" in phrase for phrase in told.values())


@pytest.mark.parametrize(
    "op", ["linear", "linear_fp8", "linear_gelu_tanh_and_mul", "linear_silu_and_mul"]
)
@pytest.mark.parametrize("large", [False, True], ids=["ordinary", "large"])
def test_a_smaller_call_tells_what_weights_give_that_repeat_their_rows(
    op: str, large: bool
) -> None:
    sizes = replace(SIZES, tokens=(3,), more={**SIZES.more, "dense_intermediate": 320})
    spec, repeated = contracts()[op], 0
    for sample in spec.served(sizes, torch.bfloat16, CPU, large):
        assert sample.repeats is not None
        args, columns = sample.repeats
        few, all_of_it = spec.oracle(*args), spec.oracle(*sample.args)
        torch.testing.assert_close(few[:, columns], all_of_it, rtol=1e-12, atol=0)
        repeated += len(columns) > few.shape[1]
    assert repeated
