"""What the ops refuse, and that they refuse nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor

from vllm_fl.contracts import contracts
from vllm_fl_flaggems import loading
from vllm_fl_flaggems.impl import gated_linear, linear, linear_fp8
from vllm_fl_flaggems.plugin import register_ops

REFUSED = {
    "concat_and_cache_mla": {"features apart", "odd sizes"},
    "fused_experts": {
        "gelu, gates near -3",
        "gelu_tanh, gates near -3",
        "beyond the limit of swigluoai",
        "weights on the input, biases",
    },
    "linear": {"weight transposed", "square weight, transposed"},
    "linear_gelu_tanh_and_mul": {"weight transposed", "square weight, transposed"},
    "linear_silu_and_mul": {"weight transposed", "square weight, transposed"},
    "linear_fp8": {"features apart", "transposed in memory"}
    | {
        f"{name}, scales {scales}"
        for name in (
            "1 token, odd sizes beyond one block",
            "17 tokens, odd sizes",
            "40 tokens, odd sizes",
            "65 tokens, odd sizes",
            "1 feature",
            "1 output feature",  # of 2063
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
        "sigmoid",
        "NaN and infinity, sigmoid",
        "sigmoid with bias, scaled",
        "sigmoid with bias, plain",
        "softmax with bias, scaled",
        "one expert, plain",
    },
    "grouped_topk": {
        "1 token",
        "16 tokens",
        "0 tokens",
        "odd sizes, plain",
        "one expert, plain",
        "ties",
        "every group, plain",
        "every other row of a slice",
        "groups of two",
        "many small groups",  # so far: without a bias
        "one group",  # 6 experts of a token
    },
}
"""What FlagGems has no kernel for."""

HALVES_ALONE = {"fused_experts", "linear", "linear_gelu_tanh_and_mul", "linear_silu_and_mul"}
"""Ops whose kernels multiply float32 in TF32."""


@pytest.mark.parametrize("impl", register_ops(), ids=lambda impl: impl.op_name)
def test_what_has_no_kernel_is_refused_and_nothing_else(
    impl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device="cpu")])
    spec = contracts()[impl.op_name]
    for dtype in spec.dtypes:
        samples = list(spec.samples(getattr(torch, dtype), torch.device("cpu")))
        refused = {s.name for s in samples if impl.supports(*s.args) is not True}
        if dtype == "float32" and impl.op_name in HALVES_ALONE:
            assert refused == {sample.name for sample in samples}
        else:
            assert refused == REFUSED.get(impl.op_name, set()), dtype


def test_blocks_of_rows_are_refused_for_other_ids_and_maps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (impl,) = (impl for impl in register_ops() if impl.op_name == "moe_align_block_size")
    monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device="cpu")])
    ids, here = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    for args, reason in (
        ((ids.short(), 16, 8), "torch.int16"),
        ((ids[0], 16, 8), "1 dimensions"),
        ((ids, 0, 8), "blocks of 0"),
        ((ids, 16, 8, here.long()), "torch.int64"),
        ((ids, 16, 9, here), "expert_map is (8,)"),
    ):
        assert reason in str(impl.supports(*args))


def test_products_are_refused_where_the_kernels_would_read_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (impl,) = (impl for impl in register_ops() if impl.op_name == "linear")

    def verdict(device: str = "cpu", **change: torch.Tensor) -> object:
        monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device=device)])
        good = {
            "x": torch.ones(2, 64, dtype=torch.bfloat16, device=device),
            "weight": torch.ones(32, 64, dtype=torch.bfloat16, device=device),
            "bias": torch.ones(32, dtype=torch.bfloat16, device=device),
        }
        return impl.supports(*(good | change).values())

    half = torch.bfloat16
    assert verdict() is True
    assert impl.supports(torch.ones(2, 64, dtype=half), torch.ones(32, 64, dtype=half)) is True
    assert "through CUDA" in str(verdict("meta"))
    assert "float32" in str(verdict(x=torch.ones(2, 64)))
    assert "weight is" in str(verdict(weight=torch.ones(64, 32, dtype=half).t()))
    assert "x is (2, 0)" in str(
        verdict(x=torch.ones(2, 0, dtype=half), weight=torch.ones(32, 0, dtype=half))
    )
    assert "bias is" in str(verdict(bias=torch.ones(33, dtype=half)))


def test_products_of_eight_bits_are_refused_where_the_kernels_would_read_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (impl,) = (impl for impl in register_ops() if impl.op_name == "linear_fp8")
    eight = torch.float8_e4m3fn

    def verdict(outputs: int = 32, features: int = 64, **change: object) -> object:
        good = {
            "x": torch.ones(2, features).to(eight),
            "weight": torch.ones(outputs, features).to(eight),
            "x_scale": torch.ones(2, 1),
            "weight_scale": torch.ones(outputs, 1),
            "out_dtype": "bfloat16",
            "bias": torch.ones(outputs, dtype=torch.bfloat16),
        }
        return impl.supports(*(good | change).values())

    assert verdict() is True is verdict(bias=None)
    assert "do not begin" in str(verdict(features=72))
    assert "float8_e5m2" in str(verdict(x=torch.ones(2, 64).to(torch.float8_e5m2)))
    assert "weight is" in str(verdict(weight=torch.ones(64, 32).to(eight).t()))
    assert "x is (2, 64) and weight (32, 128)" in str(verdict(weight=torch.ones(32, 128).to(eight)))
    assert "x is (2, 0)" in str(verdict(features=0))
    assert "out_dtype is 'float32'" in str(verdict(out_dtype="float32", bias=None))
    assert "x_scale is" in str(verdict(x_scale=torch.ones(1, 2)))
    assert "weight_scale is" in str(verdict(weight_scale=torch.ones(32, 1).double()))
    assert "bias is torch.float16" in str(verdict(bias=torch.ones(32, dtype=torch.float16)))
    monkeypatch.setattr(linear_fp8, "copies_blocks", lambda device: False)
    assert "for Hopper and later" in str(verdict())


@pytest.mark.parametrize("outputs", [4096, 4224, 8448, 8449, 12672, 12673])
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


def test_heads_are_refused_beyond_one_program_and_where_cuda_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (impl,) = (impl for impl in register_ops() if impl.op_name == "qk_norm_rope")

    def verdict(size: int, device: str = "cpu") -> object:
        monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device=device)])
        qkv, weight = torch.ones(2, 3 * size, device=device), torch.ones(size, device=device)
        table = torch.ones(4, 2, device=device)
        at = torch.arange(2, device=device)
        return impl.supports(qkv, weight, weight, table, at, 1, 1, 1e-6)

    assert verdict(1024) is True
    assert "not of 1025" in str(verdict(1025)) and "not of 1" in str(verdict(1))
    assert "through CUDA" in str(verdict(64, "meta"))


def test_caches_of_other_layouts_are_refused_where_cuda_launches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (impl,) = (impl for impl in register_ops() if impl.op_name == "reshape_and_cache")
    monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device="meta")])
    samples = contracts()["reshape_and_cache"].samples(torch.float16, torch.device("meta"))
    verdicts = {sample.name: impl.supports(*sample.args) for sample in samples}
    assert verdicts["16 tokens"] is True
    assert "slots before heads" in str(verdicts["two layouts"])


def test_groups_are_refused_beyond_32_bits_and_where_triton_has_no_fp8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (impl,) = (impl for impl in register_ops() if impl.op_name == "quant_fp8_group")
    monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device="meta")])
    assert impl.supports(torch.empty(2**23 - 1, 256, device="meta")) is True
    assert "more elements" in str(impl.supports(torch.empty(2**23, 256, device="meta")))

    monkeypatch.setattr(loading, "loaded", [SimpleNamespace(device="cuda")])
    on_gpu = SimpleNamespace(
        ndim=2,
        shape=(4, 256),
        numel=lambda: 1024,
        stride=lambda dimension: 256,
        is_cuda=True,
        device=torch.device("cuda", 0),
        dtype=torch.float16,
    )
    for capability, verdict in (
        ((8, 9), True),
        ((8, 0), "this GPU has no float8_e4m3fn in Triton"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert impl.supports(on_gpu) == verdict
