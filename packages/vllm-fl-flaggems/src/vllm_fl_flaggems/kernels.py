"""Direct launches of Triton kernels in FlagGems, on NVIDIA GPUs.

A call through FlagGems 5.0.2 costs the host 26 to 118 µs on an H200 and does not let the caller
choose the number of warps. A direct launch costs 20 to 60 µs, including the plan's checks for
unsupported calls. Only kernels with known parameters are launched directly. For other releases and
vendors, the public functions of FlagGems are called.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch

from vllm_fl import get_logger

from .loading import flag_gems

_POINTWISE: Final = (
    "in0_ptr in1_ptr out0_ptr in0_stride0 in0_stride1 in1_stride0 in1_stride1 out0_stride0 "
    "out0_stride1 s0 s1 num_tasks tiles_per_cta tile_size0 tile_size1 one_tile_per_cta"
)

_LAYER_NORM: Final = "in_ptr out_ptr weight_ptr bias_ptr out_mean_ptr out_rstd_ptr M N eps TILE_N"

KERNELS: Final = {
    "rms_norm_kernel": (
        "flag_gems.ops.rms_norm",
        "out_ptr INV_RMS in_ptr w_ptr y_stride_r y_stride_c x_stride_r x_stride_c N eps BLOCK_SIZE",
    ),
    "fused_add_rms_norm_kernel": (
        "flag_gems.fused.fused_add_rms_norm",
        "input_ptr residual_ptr w_ptr in_stride_r in_stride_c r_stride_r r_stride_c N eps "
        "BLOCK_SIZE",
    ),
    "layer_norm_persistent_kernel": ("flag_gems.ops.layernorm", _LAYER_NORM),
    "layer_norm_loop_kernel": ("flag_gems.ops.layernorm", _LAYER_NORM),
    "apply_rotary_pos_emb_kernel": (
        "flag_gems.fused.rotary_embedding",
        "oq_ptr ok_ptr q_ptr k_ptr cos_ptr sin_ptr pos_ptr q_stride_s q_stride_h q_stride_d "
        "k_stride_s k_stride_h k_stride_d oq_stride_s oq_stride_h oq_stride_d ok_stride_s "
        "ok_stride_h ok_stride_d p_stride_s cos_stride_s sin_stride_s seq_len NUM_Q_HEADS "
        "NUM_K_HEADS HEAD_DIM PADDED_HEAD_DIM ROTARY_INTERLEAVED MAX_POSITION_EMBEDDINGS",
    ),
    "silu_and_mul_kernel": ("flag_gems.fused.silu_and_mul", _POINTWISE),
    "gelu_none_and_mul_kernel": ("flag_gems.fused.gelu_and_mul", _POINTWISE),
    "gelu_tanh_and_mul_kernel": ("flag_gems.fused.gelu_and_mul", _POINTWISE),
}
"""Kernel -> (module, parameters in FlagGems 5.0.2)."""

CUDA: Final = ("cuda", "cpu")
"""Device types on which this package launches kernels; the CPU only with Triton's interpreter."""

ELEMENTS: Final = 1024
WARPS: Final = 4
"""Elements and warps of one program (a group of heads): 8 elements per thread. For 16-bit types,
the widest load instruction loads these at once. For `qk_norm_rope` on an H200, this size is the
fastest from 8 tokens on. Compared with twice as many elements, it takes 5 % less time at 16384
tokens, and 20 % less at one token.
"""

ELEMENTS_A_WARP: Final = 512
"""Elements of a row per warp. More warps would wait for each other; fewer would wait for memory."""

ALIGNED: Final = 16
"""Alignment in bytes: Triton compiles another kernel for pointers that are multiples of it."""

MOST_COMPILED: Final = 64
"""Size of a `Launcher`'s cache; a model has a few kinds of calls."""


@cache
def launchable(name: str) -> Any | None:
    """Return a kernel of `KERNELS`, to be called as `kernel[grid](..., num_warps=...)`.

    None if its parameters differ from `KERNELS`; call FlagGems's public function then.
    """
    if getattr(flag_gems(), "vendor_name", None) != "nvidia":
        return None  # grids and numbers of warps differ between vendors
    module, parameters = KERNELS[name]
    try:
        # A function may hide a module of the same name; sys.modules has the module.
        kernel = getattr(sys.modules[module], name)
        if parameters is _POINTWISE:
            kernel = _for_matrices(kernel)
        kernel = getattr(kernel, "jit_function", kernel)
        while hasattr(getattr(kernel, "fn", None), "arg_names"):
            kernel = kernel.fn  # unwrap autotuners, which would choose arguments
        found = " ".join(kernel.arg_names)
    except (AttributeError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    if found == parameters:
        return kernel
    get_logger("flaggems").info(
        "FlagGems %s has changed %s (%s): calling its public function instead, which takes more "
        "host time",
        getattr(flag_gems(), "__version__", "?"),
        name,
        found,
    )
    return None


def _for_matrices(function: Any) -> Any:
    """Return FlagGems's generated two-dimensional kernel for a pointwise function.

    It uses plain pointers, which every Triton supports and which work beyond 2**31 elements.
    FlagGems annotates the strides as int, which keeps Triton from specialising on a stride of 1.
    Such a kernel loads element by element, and takes 371 instead of 276 µs for 16384 rows of 12288
    columns on an H200. The returned kernel has no such annotations.
    """
    config = dataclasses.replace(function.config, prefer_block_pointer=False)
    own = type(function)(function.fx, function._scalar_fn, config)
    written = own.instantiate(2).__globals__[own.get_kernel_info(2).kernel_name]
    fn = getattr(written, "jit_function", written).fn
    bare = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__)
    bare.__annotations__ = {k: v for k, v in fn.__annotations__.items() if v not in (int, "int")}
    return sys.modules["triton"].jit(bare)


class Launcher:
    """Launch one of this package's kernels with less host time for repeated calls.

    At each launch, Triton determines whether it has compiled the kernel for these dtypes,
    alignments and numbers. A `Launcher` looks the compiled kernel up by these values and calls it,
    as in the softmax tutorial of Triton. Only for NVIDIA GPUs, because on AMD a compiled kernel
    also depends on tensor sizes, and other backends may have further conditions.

    Args:
        kernel: a Triton function; its parameters are tensors, then numbers, then constants.
        num_warps: warps of a program.
    """

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self.kernel, self.num_warps = kernel, num_warps
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Launch on the current stream of the first tensor's device.

        Args:
            grid: number of programs.
            tensors, numbers, constants: the kernel's arguments. A number must have the same type
                in every call.
        """
        pointers = [x.data_ptr() for x in tensors]
        device = tensors[0].device
        key = (
            device.index,
            *[x.dtype for x in tensors],
            *[pointer % ALIGNED == 0 for pointer in pointers],
            *numbers,
            *constants,
        )
        compiled = self.compiled.get(key)
        with torch.cuda.device(device):
            if compiled is not None:
                compiled[grid](*pointers, *numbers, *constants)
                return
            given = (*tensors, *numbers, *constants)
            compiled = self.kernel[grid](*given, num_warps=self.num_warps)
        # Triton's interpreter returns no compiled kernel. Once the cache is full, Triton looks up.
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if getattr(target, "backend", "") == "cuda" and len(self.compiled) < MOST_COMPILED:
            self.compiled[key] = compiled


def warps(elements: int) -> int:
    """Return the number of warps, 1 to 16, for a row of `elements`, a power of two."""
    return min(max(elements // ELEMENTS_A_WARP, 1), 16)


def heads_of_a_program(size: int, heads: int) -> int:
    """Return how many heads of `size` features one program computes: a power of two."""
    return min(max(ELEMENTS // power_of_two(size), 1), power_of_two(heads))


def power_of_two(number: int) -> int:
    """Round `number` up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return `x` itself if it is contiguous, otherwise a contiguous copy.

    Copies eight bytes at a time if the rows allow it. On an H200 the query heads of 16384 tokens
    take 71 µs, against 155 µs with PyTorch's copy of two-byte elements.
    """
    if x.is_contiguous():
        return x
    each = 8 // x.itemsize
    *steps, last = x.stride()
    if last == 1 and not any(size % each for size in (x.shape[-1], x.storage_offset(), *steps)):
        return x.view(torch.int64).contiguous().view(x.dtype)
    return x.contiguous()
