"""The samples of the quantising ops tell wrong kernels from right ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fl.contracts import contracts
from vllm_fl.engine.verification import compare
from vllm_fl.plugins.types import BackendImplKind, OpImpl

CPU = torch.device("cpu")
NEAREST: Callable[[Tensor], Tensor] = torch.round


def int8(
    x: Tensor,
    scale: Tensor | None = None,
    azp: Tensor | None = None,
    asymmetric: bool | None = None,
    *,
    rounding: Callable[[Tensor], Tensor] = NEAREST,
    most: float = 127.0,
    range_: float = 255.0,
    sign: int = 1,
    lowest: float = -128.0,
    saturates: bool = True,
    whole: bool = False,
    skips: int = 0,
) -> tuple[Tensor, ...]:
    """Right by default; each option is a mistake."""
    wide = x.float()
    seen = wide[:, : wide.shape[1] - skips]
    zero: Tensor | float = 0.0
    if scale is not None:
        steps = scale.clone()
        zero = 0.0 if azp is None else sign * azp.reshape(())
    elif asymmetric:
        low, high = seen.aminmax(dim=-1, keepdim=True)
        steps = (high - low) / range_
        zero = rounding(lowest - low / steps)
    else:
        steps = seen.abs().amax(-1, keepdim=True) / most
        if whole and x.numel():
            steps = steps.amax().expand_as(steps).contiguous()
    one = steps.reshape(()) if scale is not None else steps.clamp(min=1e-30)
    value = rounding(wide / one) + zero
    value = value.clamp(lowest, 127) if saturates else (value + 128) % 256 - 128
    results = (value.to(torch.int8), steps)
    return (*results, zero.to(torch.int32)) if asymmetric and scale is None else results  # type: ignore[union-attr]


WRONG: dict[str, dict[str, dict[str, Any]]] = {
    "quant_int8": {
        "right": {},
        "rounds towards 0": {"rounding": torch.trunc},
        "rounds down": {"rounding": torch.floor},
        "scales to 128": {"most": 128.0},
        "256 steps": {"range_": 256.0},
        "the zero point's sign": {"sign": -1},
        "no zero point": {"sign": 0},
        "-127 is the lowest": {"lowest": -127.0},
        "wraps": {"saturates": False},
        "one scale for all tokens": {"whole": True},
        "the last feature not looked at": {"skips": 1},
    },
}
FORMS = {"quant_int8": int8}
MUTANTS = [(op, what, options) for op, table in WRONG.items() for what, options in table.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "what", "options"), MUTANTS)
def test_samples_tell_a_wrong_kernel(
    op: str, what: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    spec = contracts()[op]

    def fn(*args: Any) -> Any:
        return FORMS[op](*args, **options)

    fn.__signature__ = spec.signature  # type: ignore[attr-defined]
    impl = OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")
    found = {s.name: compare(impl, spec, s, dtype) for s in spec.samples(dtype, CPU)}
    wrong = {name: result.reason for name, result in found.items() if result.status != "ok"}
    assert bool(wrong) == (what != "right"), wrong
