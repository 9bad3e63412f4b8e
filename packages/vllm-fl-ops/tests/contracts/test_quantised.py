"""Quantising ops: samples detect incorrect kernels and accept correct ones; routes from vLLM."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from of_acme import acme
from telling import by_dtype
from torch import Tensor

from vllm_fl.contracts import Sample
from vllm_fl.contracts.binding import FunctionTarget, OperatorTarget
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_verify.verification import compare

CPU = torch.device("cpu")
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def int8(
    x: Tensor,
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    asymmetric: bool | None = None,
    *,
    rounding: Callable[[Tensor], Tensor] = torch.round,
    sign: int = 1,
    whole: bool = False,
    equal: bool = True,
) -> tuple[Tensor, ...]:
    """Correct by default; each option is a mistake."""
    wide = x.float()
    zero: Tensor | float = 0.0
    if scale is not None:
        steps = scale.clone()
        zero = 0.0 if azp is None else sign * azp.reshape(())
    elif asymmetric:
        low, high = wide.aminmax(dim=-1, keepdim=True)
        if equal:
            flat = low == high
            low, high = low.clamp(max=0).where(flat, low), high.clamp(min=0).where(flat, high)
        steps = (high - low) / 255
        zero = rounding(-128 - (low / steps).nan_to_num())
    else:
        steps = wide.abs().amax(-1, keepdim=True) / 127
        if whole and x.numel():
            steps = steps.amax().expand_as(steps).contiguous()
    one = steps.reshape(()) if scale is not None else steps.clamp(min=1e-30)
    value = (rounding(wide / one) + zero).clamp(-128, 127)
    results = (value.to(torch.int8), steps)
    return (*results, zero.to(torch.int32)) if asymmetric and scale is None else results  # type: ignore[union-attr]


def to_fp8(value: Tensor) -> Tensor:
    return value.to(torch.float8_e4m3fn)


def fp8(
    x: Tensor,
    scale: Tensor | None = None,
    scale_ub: Tensor | None = None,
    per_token: bool = False,
    *,
    least: float = 1 / (448 * 512),
    bounded: bool = True,
    rows: str = "per_token",
    skips: int = 0,
) -> tuple[Tensor, Tensor]:
    """Correct by default; each option is a mistake."""
    wide = x.float()
    size = wide[:, : wide.shape[1] - skips].abs()
    if scale is not None:
        steps = scale.clone()
    elif not size.numel():
        steps = size.new_full((0, 1) if per_token else (1,), least)
    else:
        steps = size.amax(-1, keepdim=True) if per_token else size.amax().reshape(1)
        if rows == "first" and not per_token:
            steps = size[:1].amax().reshape(1)
        if scale_ub is not None and bounded:
            steps = steps.clamp(max=scale_ub)
        steps = (steps / 448).clamp(min=least)
    value = wide / (steps if per_token else steps.reshape(()))
    return to_fp8(value.clamp(-448, 448)), steps


def towards_0(value: Tensor) -> Tensor:
    nearest = to_fp8(value)
    back = torch.where(nearest.float().abs() > value.abs(), value * (1 - 2.0**-4), value)
    return to_fp8(back)


def fp8_group(
    x: Tensor,
    group_size: int = 128,
    eps: float = 1e-10,
    ue8m0: bool = False,
    *,
    rounding: Callable[[Tensor], Tensor] = to_fp8,
    least: float = 0.0,
    power: Callable[[Tensor], Tensor] = torch.ceil,
    skips: int = 0,
) -> tuple[Tensor, Tensor]:
    """Correct by default; each option is a mistake."""
    groups = x.float().unflatten(-1, (x.shape[1] // group_size, group_size))
    seen = groups[..., : group_size - skips]
    steps = (seen.abs().amax(-1).clamp(min=eps) / 448).clamp(min=least)
    if ue8m0:
        steps = power(steps.log2()).exp2()
    value = rounding((groups / steps.unsqueeze(-1)).clamp(-448, 448)).flatten(-2)
    return value, steps


WRONG: dict[str, dict[str, dict[str, Any]]] = {
    "quant_int8": {
        "right": {},
        "rounds towards 0": {"rounding": torch.trunc},
        "the zero point's sign": {"sign": -1},
        "one scale for all tokens": {"whole": True},
        "no scale for equal numbers": {"equal": False},
    },
    "quant_fp8": {
        "right": {},
        "no least scale": {"least": 1e-12},
        "no bound": {"bounded": False},
        "the first token's scale for all": {"rows": "first"},
        "the last feature not looked at": {"skips": 1},
    },
    "quant_fp8_group": {
        "right": {},
        "rounds towards 0": {"rounding": towards_0},
        "a least scale": {"least": 1 / (448 * 512)},
        "the power of two below": {"power": torch.floor},
        "the next power of two": {"power": lambda exponent: exponent.floor() + 1},
        "the last feature not looked at": {"skips": 1},
    },
}
"""The mistakes that the fewest samples detect; samples that detect these detect coarser ones."""

FORMS: dict[str, Callable[..., Any]] = {
    "quant_fp8": fp8,
    "quant_fp8_group": fp8_group,
    "quant_int8": int8,
}


@by_dtype((op, what) for op, table in WRONG.items() for what in table)
def test_samples_tell_a_wrong_kernel(op: str, what: str, dtype: torch.dtype) -> None:
    spec = known_contracts().contracts[op]

    impl = acme(op, lambda *args: FORMS[op](*args, **WRONG[op][what]))
    found = {s.name: compare(impl, spec, s, dtype) for s in spec.samples(dtype, CPU)}
    wrong = {name: result.reason for name, result in found.items() if result.status != "ok"}
    assert bool(wrong) == (what != "right"), wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_power_of_two_may_have_a_minimum(dtype: torch.dtype) -> None:
    """vLLM's CUDA kernel and FlagGems's have the minimum 1e-10, vLLM's Triton kernel has none."""
    spec = known_contracts().contracts["quant_fp8_group"]
    sample = Sample("zeros", (torch.zeros(3, 256, dtype=dtype), 128, 1e-10, True))
    for least in (0.0, 1e-10):
        impl = acme(spec.name, lambda *args, at=least: fp8_group(*args, least=at))
        assert compare(impl, spec, sample, dtype).status == "ok"


TARGETS = {
    (target.name, len(target.parameters)): target
    for op in ("quant_fp8", "quant_fp8_group", "quant_int8")
    for target in known_contracts().bindings[op].targets
    if isinstance(target, OperatorTarget | FunctionTarget)
}


def of_target(name: str, count: int, op: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of an operator with `count` parameters, or of a function."""
    (target,) = (p for (n, c), p in TARGETS.items() if n.endswith(name) and c == count)
    return target.route(op)


X = torch.linspace(-3.0, 5.0, 6 * 256, dtype=torch.bfloat16).view(6, 256)


def test_an_operator_of_int8_leaves_values_scales_and_zero_points() -> None:
    out, scale = torch.empty(6, 256, dtype=torch.int8), torch.empty(6, 1)
    zero = torch.empty(6, 1, dtype=torch.int32)
    dynamic = of_target("dynamic_scaled_int8_quant", 4, int8)
    for azp in (None, zero):
        dynamic(out, X, scale, azp)
        wanted = int8(X, asymmetric=True if azp is not None else None)
        for left, one in zip((out, scale, zero), wanted, strict=False):
            assert torch.equal(left, one)
    given = torch.tensor([0.02]), torch.tensor([3], dtype=torch.int32)
    of_target("static_scaled_int8_quant", 4, int8)(out.view(2, 3, 256), X.view(2, 3, 256), *given)
    assert torch.equal(out, int8(X, *given)[0])


def test_operators_of_fp8_are_the_op_for_one_scale_or_each_tokens() -> None:
    out, one, each = torch.empty(6, 256, dtype=torch.float8_e4m3fn), torch.empty(1), torch.empty(6)
    of_target("dynamic_scaled_fp8_quant", 3, fp8)(out, X, one)
    assert torch.equal(one, fp8(X)[1]) and same_bytes(out, fp8(X)[0])
    bound = torch.tensor(1.5)
    of_target("per_token_scaled_fp8_quant", 4, fp8)(out, X, each, bound)
    value, scale = fp8(X, None, bound, True)
    assert torch.equal(each, scale[:, 0]) and same_bytes(out, value)
    static = of_target("static_scaled_fp8_quant", 4, fp8)
    static(out, X, one, [-1, -1])
    assert same_bytes(out, fp8(X, one)[0])
    assert static(out, X, each, [1, -1]) is NotImplemented
    assert static(out.new_empty(8, 256), X, one, None) is NotImplemented


@pytest.mark.parametrize("count", [8, 10])
@pytest.mark.parametrize("strides", [(2, 1), (1, 6), (1, 8)], ids=["rows", "columns", "TMA"])
def test_the_operator_of_groups_leaves_scales_in_any_layout(
    count: int, strides: tuple[int, int]
) -> None:
    out, scale = X.to(torch.float8_e4m3fn), torch.empty_strided((6, 2), strides)
    kernel = of_target("per_token_group_fp8_quant", count, fp8_group)
    flags = (False,) * (count - 8)
    assert kernel(X, out, scale, 128, 1e-10, -224.0, 224.0, False, *flags) is NotImplemented
    kernel(X, out, scale, 128, 1e-10, -448.0, 448.0, True, *flags)
    assert torch.equal(scale, fp8_group(X, ue8m0=True)[1])
    assert same_bytes(out, fp8_group(X, ue8m0=True)[0])


@needs_vllm
def test_the_function_of_groups_returns_what_vllms_does() -> None:
    target = of_target("utils.fp8_utils.per_token_group_quant_fp8", 8, fp8_group)
    flags = {"column_major_scales": False, "tma_aligned_scales": False}

    def function(x: Tensor, size: int, **more: Any) -> Any:
        rest = {"eps": 1e-10, "dtype": None, "out_q": None, "use_ue8m0": None}
        return target(x, size, **{**rest, **flags, **more})

    wanted = fp8_group(X)
    value, scale = function(X.view(2, 3, 256), 128)
    assert same_bytes(value.view(6, 256), wanted[0]) and torch.equal(scale.view(6, 2), wanted[1])
    assert function(X, 128, column_major_scales=True)[1].stride() == (1, 6)
    assert function(X, 128, tma_aligned_scales=True) is NotImplemented
    assert function(X, 128, out_q=value) is NotImplemented


def test_the_function_of_int8_returns_what_vllms_does() -> None:
    value, scale = of_target("per_token_quant_int8", 1, int8)(X.view(2, 3, 256))
    assert torch.equal(value.view(6, 256), int8(X)[0]) and scale.shape == (2, 3, 1)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
