"""Sizes of real models that few samples have: an incorrect kernel is detected there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracle_mutants import oracle_impl

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl_tools.testing.families import families_of
from vllm_fl_verify.preflight import Findings, find_faults
from vllm_fl_verify.trials import Request, Role, Trials, dtypes_of

CPU = torch.device("cpu")
MORE = {
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
}
SIZES = ModelSizes(192, 320, 4, 2, 32, 32, tokens=(1, 600), more=MORE)

Change = Callable[[dict[str, Any], tuple[torch.Tensor, ...]], object]


def wrong(op: str, change: Change) -> OpImpl:
    """The oracle; `change` modifies its results depending on the arguments."""
    spec = known_contracts().contracts[op]

    def changed(results: tuple[torch.Tensor, ...], args: Any) -> tuple[torch.Tensor, ...]:
        change(dict(zip(spec.parameters, args, strict=True)), results)
        return results

    return oracle_impl(spec, changed)


def found_in(impl: OpImpl, sizes: ModelSizes = SIZES, **more: Any) -> Findings:
    return find_faults(Request([Role(impl)], torch.bfloat16, CPU, sizes, seed=1, calls=0, **more))


def zero(part: torch.Tensor, rows: Any) -> None:
    part[rows] = 0.0


def late_sequences(name: str) -> Change:
    """Zeros from the 17th sequence on."""

    def change(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
        for begin, end in [*pairwise(args[name].tolist())][16:]:
            got[0][begin:end] = 0.0

    return change


def late_chunks(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    for begin, end in pairwise(args["cu_seqlens"].tolist()):
        got[0][begin + 128 : end] = 0.0


def blocks(cache: str, least: int) -> Change:
    return lambda args, got: zero(got[0], slice(0, None if args[cache].shape[1] >= least else 0))


def far_slots(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    if (args["slot_mapping"] >= 65536).any():
        got[0].zero_()


def wide(name: str, beyond: int) -> Change:
    """Incorrect scale in larger batches if an argument is float32, wider than the activations."""

    def change(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
        of = args[name]
        if of is not None and of.dtype == torch.float32 and len(got[0]) > beyond:
            got[0].mul_(1.5)

    return change


def of_width(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
    if args["x"].shape[-1] == 320:
        got[0].zero_()


WRONG: dict[str, tuple[str, Change]] = {
    "expert 9 left out": (
        "fused_experts",
        lambda args, got: zero(got[0], (args["topk_ids"] == 9).any(1) & (len(args["w13"]) > 9)),
    ),
    "from feature 512 on": ("causal_conv1d", lambda args, got: zero(got[0].T, slice(512, None))),
    "from token 128 on": ("causal_conv1d", lambda args, got: zero(got[0], slice(128, None))),
    "from sequence 17 on": ("causal_conv1d", late_sequences("query_start_loc")),
    "updates from feature 512 on": (
        "causal_conv1d_update",
        lambda args, got: zero(got[0].T, slice(512, None)),
    ),
    "from token 17 on": ("causal_conv1d_update", lambda args, got: zero(got[0], slice(16, None))),
    "from the third chunk on": ("chunk_gated_delta_rule", late_chunks),
    "sequences from 17 on": ("chunk_gated_delta_rule", late_sequences("cu_seqlens")),
    "from head 5 on": (
        "chunk_gated_delta_rule",
        lambda args, got: zero(got[0].transpose(0, 1), slice(5, None)),
    ),
    "steps from head 5 on": (
        "recurrent_gated_delta_rule",
        lambda args, got: zero(got[0].transpose(0, 1), slice(5, None)),
    ),
    "steps from token 128 on": (
        "recurrent_gated_delta_rule",
        lambda args, got: zero(got[0], slice(128, None)),
    ),
    "blocks of 64": ("reshape_and_cache", blocks("key_cache", 64)),
    "blocks of 128": ("reshape_and_cache", blocks("key_cache", 128)),
    "slots beyond 16 bits": ("reshape_and_cache", far_slots),
    "latents in blocks of 64": ("concat_and_cache_mla", blocks("kv_cache", 64)),
    "latents beyond 16 bits": ("concat_and_cache_mla", far_slots),
    "blocks of experts of 128": (
        "moe_align_block_size",
        lambda args, got: got[1].fill_(-1) if args["block_size"] > 64 else got,
    ),
    "a bias beyond 65 rows": (
        "linear",
        lambda args, got: (
            got[0].sub_(args["bias"]) if args["bias"] is not None and len(got[0]) > 65 else got
        ),
    ),
    "an fp32 weight beyond 4 rows": ("rms_norm", wide("weight", 4)),
    "logits of a router in fp32": ("moe_topk", wide("gating_output", 16)),
    "scales of what goes into the second product": ("quant_int8", of_width),
    "scales of what goes into it, per token": ("quant_fp8", of_width),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_is_wrong_at_a_served_size_is_taken_out_at_start(name: str) -> None:
    op, change = WRONG[name]
    assert [op for op, _ in found_in(wrong(op, change)).objections] == [op]


def test_of_experts_all_are_tried_and_all_features() -> None:
    spec = known_contracts().contracts["fused_experts"]
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
    impl = oracle_impl(known_contracts().contracts["fused_experts"])
    found = found_in(impl, model, compares=False)
    assert found.smaller["fused_experts"][-1] == "4 of 100 experts"
    assert "verified at smaller sizes than served: fused_experts" in found.remarks


def test_a_start_names_an_op_without_a_call_of_the_model() -> None:
    impl = oracle_impl(known_contracts().contracts["causal_conv1d"])
    found = found_in(impl, ModelSizes(hidden=64))
    assert "not verified at the model's sizes: causal_conv1d" in found.remarks
    assert not found.objections


@pytest.mark.parametrize("spec", known_contracts().contracts.values(), ids=lambda spec: spec.name)
def test_what_stands_is_tried_as_it_stands(spec: Any) -> None:
    kind = dtypes_of(spec, torch.bfloat16)[0]
    trials = Trials(spec, kind, CPU, SIZES, seed=0)
    assert not (trials.forms and trials.fixed_samples)
    assert spec.fixed_batch or not trials.fixed_samples


@pytest.mark.slow
@pytest.mark.parametrize("spec", known_contracts().contracts.values(), ids=lambda spec: spec.name)
def test_the_kit_has_public_models_for_each_op(spec: Any) -> None:
    """Six families; all existing ones for ops of linear attention, latent attention and groups."""
    few = {
        "chunk_gated_delta_rule": 3,
        "concat_and_cache_mla": 4,
        "gdn_gating": 3,
        "grouped_topk": 3,
        "recurrent_gated_delta_rule": 3,
        "rms_norm_gated": 2,
    }
    assert len(families_of(spec)) >= few.get(spec.name, 6)


@pytest.mark.parametrize(
    "op", ["linear", "linear_fp8", "linear_gelu_tanh_and_mul", "linear_silu_and_mul"]
)
@pytest.mark.parametrize("large", [False, True], ids=["ordinary", "large"])
def test_a_smaller_call_tells_what_weights_give_that_repeat_their_rows(
    op: str, large: bool
) -> None:
    sizes = replace(SIZES, tokens=(3,), more={**SIZES.more, "dense_intermediate": 320})
    spec, repeated = known_contracts().contracts[op], 0
    for sample in spec.served(sizes, torch.bfloat16, CPU, large):
        assert sample.repeats is not None
        args, columns = sample.repeats
        few, all_of_it = spec.oracle(*args), spec.oracle(*sample.args)
        torch.testing.assert_close(few[:, columns], all_of_it, rtol=1e-12, atol=0)
        repeated += len(columns) > few.shape[1]
    assert repeated


@pytest.mark.parametrize("sizes", [SIZES, None], ids=["sizes", "no sizes"])
@pytest.mark.parametrize("op", sorted(known_contracts().contracts))
def test_a_kept_verdict_leaves_a_call_that_is_compared(op: str, sizes: ModelSizes | None) -> None:
    """With sizes that are drawn. The first call of a warm-up is not compared."""

    def spoils(args: dict[str, Any], got: tuple[torch.Tensor, ...]) -> None:
        for part in got:
            if part is not None and part.numel():
                part.add_(1) if not part.is_floating_point() else part.fill_(float("nan"))

    for impl, is_wrong in (
        (oracle_impl(known_contracts().contracts[op]), False),
        (wrong(op, spoils), True),
    ):
        role = Role(impl, warm=(1, 16), kept=True)
        found = find_faults(Request([role], torch.bfloat16, CPU, sizes))
        reasons = [each.reason for each in found.objections.values()]
        assert bool(reasons) is is_wrong, reasons
