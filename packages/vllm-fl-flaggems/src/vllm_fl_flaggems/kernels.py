"""FlagGems's Triton kernels, launched as Triton launches them, on NVIDIA's GPUs.

FlagGems 5.0.2's own way to them takes 26 to 118 µs of an H200's host a call, and leaves no say in
the number of warps; this one takes 20 to 60 with the plan's refusals. Only kernels whose parameters
are known are launched: of another release, or on another vendor's device, FlagGems's public
functions are called.
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

__all__ = [
    "CUDA",
    "KERNELS",
    "WARPS",
    "Launcher",
    "contiguous",
    "heads_of_a_program",
    "launchable",
    "power_of_two",
    "warps",
]

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
"""Kernel -> the module that holds it, and its parameters as 5.0.2 has them."""

CUDA: Final = ("cuda", "cpu")
"""Devices on which kernels of this package's own are launched: through CUDA, and on the CPU by
Triton's interpreter alone."""

ELEMENTS: Final = 1024
WARPS: Final = 4
"""What one program of such a kernel takes, of all its heads together: 8 elements a thread, which of
two bytes are one of the widest loads. For norms of heads with rope on an H200 it is fastest from
8 tokens on, and against twice as many takes 5 % less at 16384 tokens, 20 % less at 1."""

ELEMENTS_A_WARP: Final = 512
"""Of a row: more warps than that wait for each other, fewer wait for memory."""


ALIGNED: Final = 16
"""Bytes: a pointer that is a multiple of that is another case to Triton."""

MOST_COMPILED: Final = 64
"""Kinds of calls that a `Launcher` knows: a model has a few."""


@cache
def launchable(name: str) -> Any | None:
    """A kernel of `KERNELS`, to be called as `kernel[grid](..., num_warps=...)`.

    Returns:
        Triton's function, or None where it is not the known one: call FlagGems's public function.
    """
    if getattr(flag_gems(), "vendor_name", None) != "nvidia":
        return None  # grids and warps are another vendor's own
    module, parameters = KERNELS[name]
    try:
        # Where the module's name is also a function's, only sys.modules has the module.
        kernel = getattr(sys.modules[module], name)
        if parameters is _POINTWISE:
            kernel = _for_matrices(kernel)
        kernel = getattr(kernel, "jit_function", kernel)
        while hasattr(getattr(kernel, "fn", None), "arg_names"):
            kernel = kernel.fn  # behind what would choose arguments for it
        found = " ".join(kernel.arg_names)
    except (AttributeError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    if found == parameters:
        return kernel
    get_logger("flaggems").info(
        "FlagGems %s has another %s (%s): its public function is called, which takes the host "
        "longer",
        getattr(flag_gems(), "__version__", "?"),
        name,
        found,
    )
    return None


def _for_matrices(function: Any) -> Any:
    """The kernel that FlagGems writes for two dimensions around a function of single elements.

    With plain pointers, which each Triton has and which reach beyond 2**31 elements. Its strides
    are annotated as int; Triton then takes a stride of 1 for any number and loads element by
    element: 371 instead of 276 µs for 16384 rows of 12288 columns on an H200. Here they are not.
    """
    config = dataclasses.replace(function.config, prefer_block_pointer=False)
    own = type(function)(function.fx, function._scalar_fn, config)
    written = own.instantiate(2).__globals__[own.get_kernel_info(2).kernel_name]
    fn = getattr(written, "jit_function", written).fn
    bare = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__)
    bare.__annotations__ = {k: v for k, v in fn.__annotations__.items() if v not in (int, "int")}
    return sys.modules["triton"].jit(bare)


class Launcher:
    """Launches a kernel of this package's own for calls that are alike, again and again.

    At each launch Triton works out anew for which dtypes, alignments and numbers it has compiled
    the kernel. Here what it has compiled is found by these themselves, and called as Triton's
    tutorial on softmax calls a kernel that was compiled beforehand. That is so for NVIDIA's GPUs
    alone: for AMD's a kernel also depends on how large a tensor is, and others may have more.

    Args:
        kernel: a function of Triton's; its tensors come first, then numbers, then constants.
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
        """Launch it on the current stream of the device where the first tensor lies.

        Args:
            grid: programs.
            tensors, numbers, constants: the kernel's arguments. An argument is a number of one type
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
        # Triton's interpreter compiles nothing. Numbers that are ever new are Triton's to sort.
        target = getattr(getattr(compiled, "metadata", None), "target", None)
        if getattr(target, "backend", "") == "cuda" and len(self.compiled) < MOST_COMPILED:
            self.compiled[key] = compiled


def warps(elements: int) -> int:
    """How many warps a row of `elements`, a power of two, is given: 1 to 16."""
    return min(max(elements // ELEMENTS_A_WARP, 1), 16)


def heads_of_a_program(size: int, heads: int) -> int:
    """How many heads of so many features one program takes: a power of two."""
    return min(max(ELEMENTS // power_of_two(size), 1), power_of_two(heads))


def power_of_two(number: int) -> int:
    """The least that is not below `number`; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x` itself where it is contiguous, else a copy that is.

    Eight bytes at a time where its rows allow it: on an H200 the query heads of 16384 tokens take
    71 µs then, and 155 in elements of two bytes, as PyTorch copies them.
    """
    if x.is_contiguous():
        return x
    each = 8 // x.itemsize
    *steps, last = x.stride()
    if last == 1 and not any(size % each for size in (x.shape[-1], x.storage_offset(), *steps)):
        return x.view(torch.int64).contiguous().view(x.dtype)
    return x.contiguous()
