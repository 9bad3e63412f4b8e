"""Activations to eight bits, on vLLM's CUDA kernels."""

from __future__ import annotations

import math
from functools import cache

import torch

from vllm_fl import Availability, OpImpl

from . import VENDOR, kernel, packed, provides, unsuitable

__all__ = [
    "OPS",
    "quant_fp8",
    "quant_fp8_group",
    "quant_int8",
    "supports_quant_fp8",
    "supports_quant_fp8_group",
    "supports_quant_int8",
]

MOST = 448.0
"""The largest number of float8_e4m3fn."""

SHARED_MEMORY = 48 * 1024
"""Bytes that a kernel has without asking for more."""

GROUPS_A_BLOCK = 16
"""At most; each lies in shared memory."""


def quant_fp8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    per_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest float8_e4m3fn to x / scale, saturating, computed in fp32.

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16, of any layout.
        scale: one float32 number; None for max |x| / 448.
        scale_ub: what |x| is taken for at most, one float32 number; with `per_token` alone.
        per_token: a scale for each token; not with `scale`.

    Returns:
        (value, scale).
    """
    x = packed(x)
    value = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    if scale is not None:
        if x.numel():  # an empty grid is a launch error
            kernel("static_scaled_fp8_quant")(value, x, scale)
        return value, scale.clone()
    if per_token:
        steps = x.new_empty((x.shape[0], 1), dtype=torch.float32)
        if x.numel():
            kernel("dynamic_per_token_scaled_fp8_quant")(value, x, steps, scale_ub)
        return value, steps
    if not x.numel():
        return value, x.new_full((1,), 1 / (MOST * 512), dtype=torch.float32)
    steps = x.new_empty(1, dtype=torch.float32)
    kernel("dynamic_scaled_fp8_quant")(value, x, steps)
    return value, steps


def supports_quant_fp8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    per_token: bool = False,
) -> Availability:
    """True, or why the kernel would fail, or quantise otherwise: it reads scales as float32."""
    if x.ndim != 2 or not x.shape[1]:
        return f"x is {tuple(x.shape)}, not (tokens, hidden) with a feature"
    if (scale is not None and per_token) or (scale_ub is not None and not per_token):
        return "per_token goes without scale, and scale_ub with per_token alone"
    reason = _not_one("scale", scale, x) or _not_one("scale_ub", scale_ub, x)
    return reason or unsuitable("x", x) or True


def quant_fp8_group(
    x: torch.Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest float8_e4m3fn to x / scale of its group, computed in fp32.

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16, of any layout.
        group_size: features of a group; divides hidden.
        eps: the least of what counts as a group's largest |x|; above 0.
        ue8m0: scales are powers of two, 2^-33 at least.

    Returns:
        (value, scale).
    """
    x = packed(x)
    value = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    steps = x.new_empty((x.shape[0], x.shape[1] // group_size), dtype=torch.float32)
    if x.numel():
        run = kernel("per_token_group_fp8_quant")
        flags = (False,) * _layout_flags()  # the kernel reads the layout off the scales' strides
        run(x, value, steps, group_size, eps, -MOST, MOST, ue8m0, *flags)
    return value, steps


@cache
def _layout_flags() -> int:
    """How many flags of the layout this release's operator has: two, or none in older ones."""
    return len(kernel("per_token_group_fp8_quant")._schema.arguments) - 8  # type: ignore[attr-defined]


def supports_quant_fp8_group(
    x: torch.Tensor, group_size: int = 128, eps: float = 1e-10, ue8m0: bool = False
) -> Availability:
    """True, or why the kernel would fail, or read beyond x."""
    if x.ndim != 2 or not x.shape[1] or group_size < 1 or x.shape[1] % group_size:
        return f"x, {tuple(x.shape)}, is not (tokens, hidden) of whole groups of {group_size}"
    if not 0 < eps < math.inf or not isinstance(ue8m0, bool):
        return f"eps={eps} is not finite and above 0, or ue8m0={ue8m0} no bool"
    if GROUPS_A_BLOCK * group_size * x.element_size() > SHARED_MEMORY:
        return f"groups of {group_size} do not fit the kernel's shared memory"
    return unsuitable("x", x) or True


def quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """The nearest int8 to x / scale + azp, saturating, computed in fp32; halves go to even.

    Args:
        x: (tokens, hidden), float32, float16 or bfloat16, of any layout.
        scale: one float32 number; None for a scale for each token.
        azp: one int32 number with `scale`; None for 0.
        asymmetric: True for a zero point for each token; not with `scale`.

    Returns:
        (value, scale), or (value, scale, azp) with `asymmetric`.
    """
    x = packed(x)
    value = torch.empty_like(x, dtype=torch.int8)
    if scale is not None:
        if x.numel():  # an empty grid is a launch error
            kernel("static_scaled_int8_quant")(value, x, scale, azp)
        return value, scale.clone()
    steps = x.new_empty((x.shape[0], 1), dtype=torch.float32)
    zero = torch.empty_like(steps, dtype=torch.int32) if asymmetric else None
    if x.numel():
        kernel("dynamic_scaled_int8_quant")(value, x, steps, zero)
    return (value, steps) if zero is None else (value, steps, zero)


def supports_quant_int8(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    azp: torch.Tensor | None = None,
    asymmetric: bool | None = None,
) -> Availability:
    """True, or why the kernel would fail, or quantise otherwise: it reads scale and azp as float32
    and int32 on its device, whatever they are."""
    if x.ndim != 2 or not x.shape[1]:
        return f"x is {tuple(x.shape)}, not (tokens, hidden) with a feature"
    if scale is None and azp is not None:
        return "azp without a scale, which the kernel would overwrite"
    if asymmetric is not None and (scale is not None or asymmetric is not True):
        return f"asymmetric={asymmetric} with a scale, or neither True nor None"
    reason = _not_one("scale", scale, x) or _not_one("azp", azp, x, torch.int32)
    return reason or unsuitable("x", x) or True


def _not_one(
    name: str, one: torch.Tensor | None, x: torch.Tensor, dtype: torch.dtype = torch.float32
) -> str | None:
    """Why a kernel must not read `one` as a number of `dtype` beside x; None if it may."""
    if one is None or (one.dtype == dtype and one.numel() == 1 and one.device == x.device):
        return None
    return f"{name} is {one.dtype} of {tuple(one.shape)} on {one.device}, not one {dtype}"


OPS = (
    OpImpl(
        "quant_fp8",
        *VENDOR,
        quant_fp8,
        "cuda",
        available=provides(
            "static_scaled_fp8_quant",
            "dynamic_scaled_fp8_quant",
            "dynamic_per_token_scaled_fp8_quant",
        ),
        supports=supports_quant_fp8,
    ),
    OpImpl(
        "quant_fp8_group",
        *VENDOR,
        quant_fp8_group,
        "cuda",
        available=provides("per_token_group_fp8_quant"),
        supports=supports_quant_fp8_group,
    ),
    OpImpl(
        "quant_int8",
        *VENDOR,
        quant_int8,
        "cuda",
        available=provides("static_scaled_int8_quant", "dynamic_scaled_int8_quant"),
        supports=supports_quant_int8,
    ),
)
