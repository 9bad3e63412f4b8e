"""The calls that the ops do not support, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from anywhere import registered
from torch._inductor import config as inductor

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_flaggems import loading
from vllm_fl_flaggems.impl import gated_linear, linear, linear_fp8
from vllm_fl_flaggems.plugin import register_ops

IMPLS = registered(register_ops())

REFUSED = {
    "concat_and_cache_mla": {"features apart", "odd sizes"},
    "fused_experts": {
        *("gelu, gates near -3", "gelu_tanh, gates near -3"),
        *("beyond the limit of swigluoai", "weights on the input, biases"),
    },
    "linear": {"weight transposed", "square weight, transposed"},
    "linear_gelu_tanh_and_mul": {"weight transposed", "square weight, transposed"},
    "linear_silu_and_mul": {"weight transposed", "square weight, transposed"},
    "linear_fp8": {"features apart", "transposed in memory"}
    | {
        f"{name}, scales {scales}"
        for name in (
            *("1 token, odd sizes beyond one block", "1 feature", "1 output feature"),  # of 2063
            *(f"{tokens} tokens, odd sizes" for tokens in (17, 40, 65)),
        )
        for scales in ("each token and each channel, bias", "each token and one", "one and one")
    },
    "recurrent_gated_delta_rule": {"large epsilon"},
    "reshape_and_cache": {"features apart"},
    "rms_norm": {
        "weight=None",
        "weight=None, residual",
        "variance_size",
        "variance_size, residual",
    },
    "moe_sum": {"places without an expert", "experts elsewhere", "strided ids"},
    "moe_topk": {
        *("sigmoid", "NaN and infinity, sigmoid", "sigmoid with bias, scaled"),
        *("sigmoid with bias, plain", "softmax with bias, scaled", "bias below 0"),
        "one expert, plain",
    },
    "grouped_topk": {
        *("1 token", "16 tokens", "0 tokens", "odd sizes, plain", "one expert, plain", "ties"),
        *("every group, plain", "every other row of a slice", "groups of two"),
        "many small groups",  # all above: without a bias
        "one group",  # 6 experts of a token
    },
}
"""Samples without a FlagGems kernel."""

HALVES_ALONE = {"fused_experts", "linear", "linear_gelu_tanh_and_mul", "linear_silu_and_mul"}
"""Ops without float32 support, because their kernels multiply float32 in TF32."""


@pytest.mark.parametrize("op", IMPLS)
def test_what_has_no_kernel_is_refused_and_nothing_else(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl = IMPLS[op]
    monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device="cpu")])
    spec = known_contracts().contracts[impl.op_name]
    for dtype in spec.dtypes:
        samples = list(spec.samples(getattr(torch, dtype), torch.device("cpu")))
        refused = {s.name for s in samples if impl.supports(*s.args) is not True}
        if dtype == "float32" and impl.op_name in HALVES_ALONE:
            assert refused == {sample.name for sample in samples}
        else:
            assert refused == REFUSED.get(impl.op_name, set()), dtype


@pytest.mark.parametrize("outputs", [4224, 4225, 8448, 8449, 16896, 16897])
@pytest.mark.parametrize("tokens", [16, 17, 32, 33, 64])
def test_a_programs_tile_fits_into_the_memory_of_its_multiprocessor(
    outputs: int, tokens: int
) -> None:
    for parts, module in ((1, linear), (2, gated_linear)):
        rows, features, stages = module._tile(outputs, tokens)
        size = 2 * features * (parts * rows + linear._held(tokens))
        assert stages <= linear._most_stages(torch.device("cpu"), size)


def test_fewer_blocks_are_in_flight_where_there_is_less_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = SimpleNamespace(shared_memory_per_block_optin=99 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: held)
    stages = linear._most_stages.__wrapped__
    assert stages(torch.device("cuda", 0), 2 * 128 * (64 + 64)) == 3
    assert stages(torch.device("cuda", 0), 2 * 128 * 4096) == 1
    assert stages(torch.device("cpu"), 2 * 128 * (64 + 64)) == 7


@pytest.mark.parametrize(
    ("capability", "wanted", "early"), [(9, True, True), (9, False, False), (8, True, False)]
)
def test_products_begin_early_where_inductors_kernels_do(
    capability: int, wanted: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    with inductor.patch("triton.enable_pdl", wanted):
        assert linear.begins_early(torch.device("cuda", capability)) is early
        assert not linear.begins_early(torch.device("cpu"))


def test_caches_of_other_layouts_are_refused_where_cuda_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impl = IMPLS["reshape_and_cache"]
    monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device="meta")])
    spec = known_contracts().contracts["reshape_and_cache"]
    samples = spec.samples(torch.float16, torch.device("meta"))
    verdicts = {sample.name: impl.supports(*sample.args) for sample in samples}
    assert verdicts["16 tokens"] is True
    assert "slots before heads" in str(verdicts["two layouts"])


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device="cuda")])
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    assert IMPLS["silu_and_mul"].supports(x) == "x is on cpu, but FlagGems runs on cuda"
    assert IMPLS["linear"].supports(x, x) is True
    assert "x.device.type" in IMPLS["linear"].supports(x.to("meta"), x.to("meta"))
    products = IMPLS["linear_fp8"].supports
    eight = x.to(torch.float8_e4m3fn)
    monkeypatch.setattr(linear_fp8, "copies_blocks", lambda device: False)
    assert "need Hopper or a later GPU" in products(
        eight, eight, x[0, :1].float(), x[0, :1].float(), "bfloat16"
    )
