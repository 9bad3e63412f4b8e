"""How kernels are launched, on FlagGems or its stand-in. The conformance kit only tests kernels
that are launched directly, and no huge tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from anywhere import registered

from vllm_fl import OpImpl
from vllm_fl.contracts.spec import Sample
from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_flaggems import kernels, loading
from vllm_fl_flaggems.impl import (
    activation,
    cache_writes,
    gated_linear,
    linear,
    linear_fp8,
    normalization,
    rotary,
)
from vllm_fl_flaggems.loading import flag_gems, problem
from vllm_fl_flaggems.plugin import register_ops
from vllm_fl_verify.verification import compare

GATED = ("linear_gelu_tanh_and_mul", "linear_silu_and_mul")


@pytest.fixture
def device() -> torch.device:
    """FlagGems's device; skips if FlagGems cannot run."""
    get_default_manager().ensure_initialized()  # a stand-in for the GPU is a plugin
    reason = problem()
    if reason:
        pytest.skip(reason)
    return torch.device(flag_gems().device)


@pytest.mark.skipif(
    not os.environ.get("TRITON_INTERPRET"),
    reason="another release or vendor may have other kernels",
)
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_every_kernel_can_be_launched_directly(name: str, device: torch.device) -> None:
    assert kernels.launchable(name) is not None


@pytest.mark.parametrize("op", sorted(impl.op_name for impl in register_ops()))
def test_public_functions_keep_the_contract_too(
    op: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Used on other vendors' GPUs, and on every GPU if a release has other kernels."""
    for module in (activation, normalization, rotary):
        monkeypatch.setattr(module, "launchable", lambda name: None)
    spec = known_contracts().contracts[op]
    dtype = torch.bfloat16 if "bfloat16" in spec.dtypes else getattr(torch, spec.dtypes[0])
    found = [
        compare(implementation(op), spec, sample, dtype) for sample in spec.samples(dtype, device)
    ]
    wrong = [one for one in found if one.status not in ("ok", "refused")]
    assert not wrong, wrong
    assert any(one.status == "ok" for one in found)


def test_a_norm_of_more_elements_than_the_kernel_counts_goes_in_parts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 5, 64, device=device).to(torch.bfloat16)
    weight = torch.randn(64, device=device).to(torch.bfloat16)
    whole = normalization.rms_norm(x, None, weight, 1e-6)
    monkeypatch.setattr(normalization, "MOST_ELEMENTS", 4 * 64)
    assert torch.equal(normalization.rms_norm(x, None, weight, 1e-6), whole)


@pytest.mark.parametrize("hidden", [1, 129, 4096, 4097, 9000])
@pytest.mark.parametrize("given", [(), ("weight",), ("weight", "bias")], ids=len)
def test_layer_norms_of_every_length(
    hidden: int, given: tuple[str, ...], device: torch.device
) -> None:
    source = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(n, hidden, generator=source).to(device) for n in (2, 1, 1))
    names = {"weight": weight[0], "bias": bias[0]}
    args = [names[n] if n in given else None for n in ("weight", "bias")]
    exact = known_contracts().contracts["layer_norm"].oracle(x + 3, *args, 1e-5)
    assert torch.allclose(normalization.layer_norm(x + 3, *args, 1e-5).double(), exact, 1e-5, 2e-5)


def test_caches_in_rows_are_written_by_flag_gems(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_writes, "CUDA", ())  # if no kernel of this package is launched
    monkeypatch.setattr(cache_writes, "_scatter", lambda *args: pytest.fail("the other kernel"))
    spec = known_contracts().contracts["reshape_and_cache"]
    sample = next(iter(spec.samples(torch.float16, device)))
    key, value, key_cache, value_cache, slots = sample.args
    implementation("reshape_and_cache").fn(*sample.args)
    for row, cache in ((key, key_cache), (value, value_cache)):
        assert torch.equal(cache.flatten(0, 1)[slots], row)


@pytest.mark.parametrize(
    "op", ["linear", "linear_fp8", *GATED, "qk_norm_rope", "reshape_and_cache"]
)
def test_this_packages_own_kernels_serve_without_flag_gems(
    op: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing FlagGems is slow, and these kernels are the default on some devices."""
    monkeypatch.setattr(loading, "loaded", [])
    monkeypatch.setattr(loading, "_load", lambda: pytest.fail("FlagGems is imported"))
    impl = implementation(op)
    sample = next(iter(known_contracts().contracts[op].samples(torch.float16, device)))
    assert impl.supports is not None and impl.supports(*sample.args) is True
    impl.fn(*sample.args)


@pytest.mark.parametrize("size", [(0,), (2, 3, 0), (0, 8)])
def test_of_nothing_comes_nothing(size: tuple[int, ...], device: torch.device) -> None:
    empty = torch.empty(size, device=device)
    for op in ("silu_and_mul", "mul_and_silu", "gelu_and_mul"):
        assert implementation(op).fn(empty).shape == (*size[:-1], size[-1] // 2)
    weight = torch.empty(size[-1], device=device)
    assert normalization.rms_norm(empty, None, weight, 1e-6).shape == size
    none = torch.empty(4, 0, 8, device=device)
    tables = torch.ones(4, 4, device=device), torch.zeros(4, 4, device=device)
    q, k = rotary.rotary_embedding(none, none, *tables, torch.arange(4, device=device))
    assert q.shape == none.shape and k is not None and k.shape == none.shape


@pytest.mark.parametrize("processors", [1, 2, 4, 6])
@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
def test_products_are_right_on_tiles_of_every_size(
    tokens: int, processors: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a whole GPU only large weights use all tile sizes."""
    for module in (linear, gated_linear):
        monkeypatch.setattr(module, "PROCESSORS", processors)
    monkeypatch.setattr(linear, "NARROW", {2: 64 * processors})
    monkeypatch.setattr(linear, "_is_faster", lambda *shape: True)  # not true at this size
    rows, features, dtype = 280, 264, torch.bfloat16
    torch.manual_seed(tokens)
    x = torch.randn(tokens, features, dtype=dtype, device=device)
    weight = torch.randn(rows, features, dtype=dtype, device=device) * features**-0.5
    bias = torch.randn(rows, dtype=dtype, device=device)
    for op, more in (("linear", (None,)), ("linear", (bias,)), *((op, ()) for op in GATED)):
        sample = Sample("tiles", (x, weight, *more))
        found = compare(implementation(op), known_contracts().contracts[op], sample, dtype)
        assert found.status == "ok", (op, found)


def test_products_of_eight_bits_are_right_in_blocks_of_either_length(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    run = linear.of_rows

    def of_rows(*args: Any) -> None:
        asked.append(args[4].features)
        run(*args)

    monkeypatch.setattr(linear_fp8, "of_rows", of_rows)
    spec, dtype = known_contracts().contracts["linear_fp8"], torch.bfloat16
    (sample,) = (
        each for each in spec.samples(dtype, device) if each.name == "16 tokens, scales one and one"
    )
    for most in (linear_fp8.MANY_OUTPUTS, 1):
        monkeypatch.setattr(linear_fp8, "MANY_OUTPUTS", most)
        found = compare(implementation("linear_fp8"), spec, sample, dtype)
        assert found.status == "ok", found
    assert asked == [512, 256]


def test_what_the_kernels_of_eight_bits_do_not_take_is_vllms_product(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    name = "cutlass_scaled_mm"

    def by_vllm(out: torch.Tensor, x: torch.Tensor, turned: torch.Tensor, *_: Any) -> None:
        assert x.is_contiguous() and turned.t().is_contiguous() and turned.data_ptr() % 16 == 0
        asked.append((*x.shape, turned.shape[1]))
        out.zero_()

    def run(tokens: int, features: int, outputs: int, offset: int = 0) -> torch.Tensor:
        weight = torch.zeros(outputs * 96 + offset, device=device).to(torch.float8_e4m3fn)
        weight = weight[offset:].view(outputs, 96)[:, :features]
        one = torch.ones(1, device=device)
        x = torch.zeros(tokens, 96, device=device).to(torch.float8_e4m3fn)[:, :features]
        return linear_fp8.linear_fp8(x, weight, one, one, "bfloat16")

    assert device.type != "cpu" or linear_fp8._by_vllm(device) is None
    monkeypatch.setattr(linear_fp8, "_by_vllm", lambda device: None)
    for tokens, offset in ((33, 0), (2, 8)):
        with pytest.raises(NotImplementedError, match="at most 32 tokens, and weights that begin"):
            run(tokens, 64, 32, offset)
    monkeypatch.undo()
    library = torch.library.Library("_C", "FRAGMENT")
    if not hasattr(torch.ops._C, name):
        tensors = ", ".join(f"Tensor {each}" for each in ("a", "b", "a_scales", "b_scales"))
        library.define(f"{name}(Tensor! out, {tensors}, Tensor? bias) -> ()")
    library.impl(name, by_vllm, torch._C._dispatch_key_for_device(device.type))
    assert run(33, 64, 32).shape == (33, 32)
    run(2, 64, 32, offset=8)
    assert asked == [(33, 64, 32), (2, 64, 32)]
    monkeypatch.setattr(linear_fp8, "MANY_FEATURES", 63)  # as for a narrow layer
    for tokens in (1, 2):
        run(tokens, 64, 32)
    assert asked[2:] == [(2, 64, 32)]
    run(2, 64, 24)  # vLLM's kernel needs multiples of 16 outputs
    assert len(asked) == 3
    library._destroy()


def test_products_of_rows_that_begin_anywhere_are_pytorchs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper's block copies do not support such weights; such an x is copied first."""
    asked: list[str] = []
    monkeypatch.setattr(linear, "by_torch", lambda *args: asked.append("PyTorch"))
    apart = torch.zeros(5, 65, dtype=torch.float16, device=device)[:, :64]
    plain = torch.zeros(5, 64, dtype=torch.float16, device=device)
    linear.linear(apart, plain)
    linear.linear(apart[:1], apart)
    assert not asked
    linear.linear(plain, apart)
    assert asked == ["PyTorch"]
    monkeypatch.setattr(gated_linear, "by_torch", lambda x, weight: asked.append("too") or x)
    for op in GATED:
        asked.clear()
        implementation(op).fn(apart, plain[:4])
        assert not asked
        implementation(op).fn(plain, apart[:4])
        assert asked == ["too"]


def implementation(op: str) -> OpImpl:
    impl: OpImpl = registered(register_ops())[op]
    return impl


class Compiled:
    """A Triton launch returns this compiled kernel, which is launched directly afterwards."""

    def __init__(self, launched: list[tuple[object, ...]], how: str, backend: str = "cuda") -> None:
        self.launched, self.how, self.backend = launched, how, backend
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend=backend))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*args: object, **options: object) -> Compiled:
            self.launched.append((self.how, grid, args, options))
            return Compiled(self.launched, "compiled", self.backend)

        return launch


def test_a_kernel_that_was_compiled_for_such_a_call_is_launched_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    launched: list[tuple[object, ...]] = []
    launch = kernels.Launcher(Compiled(launched, "by Triton"), 4)
    memory = torch.zeros(64, dtype=torch.bfloat16)
    x, y = memory[:16], memory[16:32]
    for grid in ((1, 2, 1), (3, 2, 1)):
        launch(grid, (x, y), (7, 1e-6), (True,))
    first, second = launched
    assert first == ("by Triton", (1, 2, 1), (x, y, 7, 1e-6, True), {"num_warps": 4})
    given = (x.data_ptr(), y.data_ptr(), 7, 1e-6, True)
    assert second == ("compiled", (3, 2, 1), given, {})
    others: list[tuple[Any, ...]] = [
        ((x, memory[1:17]), (7, 1e-6), (True,)),
        ((x, y.float()), (7, 1e-6), (True,)),
        ((x, y), (1, 1e-6), (True,)),
        ((x, y), (7, 1e-5), (True,)),
        ((x, y), (7, 1e-6), (False,)),
    ]
    for how in ("by Triton", "compiled"):
        launched.clear()
        for other in others:
            launch((1, 1, 1), *other)
        assert [entry[0] for entry in launched] == [how] * len(others)


def test_on_amds_gpus_every_launch_is_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    launched: list[tuple[object, ...]] = []
    launch = kernels.Launcher(Compiled(launched, "by Triton", "hip"), 4)
    for _ in range(3):
        launch((1, 1, 1), (torch.zeros(1),), (7,), ())
    assert [how for how, *_ in launched] == ["by Triton"] * 3


def test_calls_that_are_ever_new_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    launch = kernels.Launcher(Compiled([], "by Triton"), 4)
    for number in range(2 * kernels.MOST_COMPILED):
        launch((1, 1, 1), (torch.zeros(1),), (number,), ())
    assert len(launch.compiled) == kernels.MOST_COMPILED
