"""Linear layers' products of 8-bit numbers for few tokens, by the kernels of `linear` with scales.

For more tokens, and for several tokens if it is faster, vLLM's operator is used, if available.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_fl import Availability

from . import implementation
from .linear import (
    COPY_ALIGN,
    WEIGHT_ROWS,
    Scales,
    Tile,
    copies_blocks,
    is_aligned,
    of_one_row,
    of_rows,
)

MOST_TOKENS = 32
"""Maximum number of tokens. For more tokens, vLLM's product is as fast or faster."""

MANY_OUTPUTS = 10_240
"""Minimum number of outputs for several concurrent programs per multiprocessor. Their blocks are
shorter.
"""

FEW_OUTPUTS, MANY_FEATURES = 3072, 4096
"""With fewer outputs and more features, vLLM's product of several tokens is faster, because it
splits the features.
"""


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x * x_scale) @ (weight * weight_scale).T + bias, rounded once.

    One token is summed in fp32. For several tokens, the tensor cores sum with about 14 bits, like
    vLLM's operator. The block sizes were the fastest on an H100 by the mean of 16 shapes of eight
    models (2026-11-27).

    Raises:
        NotImplementedError: there are more than `MOST_TOKENS` tokens or the weight is not aligned,
            and vLLM's operator cannot be used.
    """
    (tokens, features), outputs = x.shape, weight.shape[0]
    out = x.new_empty((tokens, outputs), dtype=getattr(torch, out_dtype))
    if not out.numel():
        return out
    plain = x.stride(1) == 1 and is_aligned(x)
    x = x if plain else x.clone(memory_format=torch.contiguous_format)
    bias = None if bias is None else bias.contiguous()
    scales = Scales(x_scale.contiguous(), weight_scale.contiguous())
    lacks = tokens > MOST_TOKENS or not is_aligned(weight)
    is_slow = tokens > 1 and outputs < FEW_OUTPUTS and features > MANY_FEATURES
    by_vllm = _by_vllm(x.device) if (lacks or is_slow) and outputs % COPY_ALIGN == 0 else None
    if by_vllm is not None:  # CUTLASS assumes the strides of contiguous matrices
        weight = weight if is_aligned(weight) else weight.clone()
        by_vllm(out, x.contiguous(), weight.contiguous().t(), *scales, bias)
    elif lacks:
        raise NotImplementedError(
            f"the kernels support at most {MOST_TOKENS} tokens, and weights that begin at a "
            f"multiple of {COPY_ALIGN} bytes; vLLM's operator, which supports other calls, is not "
            "available"
        )
    elif tokens == 1:
        of_one_row(x, weight, bias, out, scales, warps=2)
    else:
        block = 256 if outputs >= MANY_OUTPUTS else 512
        of_rows(x, weight, bias, out, Tile(WEIGHT_ROWS, block, 4), scales)
    return out


def _by_vllm(device: torch.device) -> Callable[..., None] | None:
    """Return vLLM's operator, which writes into its first argument; None if it has no kernel.

    Without vLLM's extension, FlagGems may define an operator of the same name.
    """
    found: Callable[..., None] | None = getattr(torch.ops._C, "cutlass_scaled_mm", None)
    key = torch._C._dispatch_key_for_device(device.type)
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    return found if found and has_kernel("_C::cutlass_scaled_mm", key) else None


def _is_hopper(x: torch.Tensor) -> Availability:
    is_it = copies_blocks(x.device)
    return is_it or f"the kernels need Hopper or a later GPU, but x is on {x.device}"


OPS = (
    implementation(
        linear_fp8,
        _is_hopper,
        "weight.stride(1) == 1",
        f"in_features % {COPY_ALIGN} == 0 and weight.stride(0) % {COPY_ALIGN} == 0",
        own=True,
    ),
)
