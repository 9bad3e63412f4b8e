"""FlagGems's real kernels without a GPU, on Triton's interpreter. `install()` must run before
FlagGems is imported, in a process with GEMS_VENDOR=nvidia. It adds what only FlagGems 5.0.2 needs
to `vllm_fl_tools.testing.triton`, which is for any Triton backend. An access outside a tensor ends
the process: run each case in a separate process."""

from __future__ import annotations

import sys
import types
from functools import cache
from typing import Any

import torch

from vllm_fl_tools.testing.triton import interpreted

__all__ = ["install"]


@cache
def install() -> Any:
    """Prepare Triton, import FlagGems for tensors on the CPU, and return the module."""
    interpreted(cuda=True)
    _no_launch_cache()
    _strided_buffers()
    # vLLM's CPU build has the first for AVX-512; importing it elsewhere ends the process.
    for name in ("_C", "_moe_C", "_C_cache_ops", "vllm_flash_attn._vllm_fa3_C"):
        sys.modules[f"vllm.{name}"] = None  # type: ignore[assignment]
    import flag_gems

    # FlagGems compares tensors' devices with this.
    flag_gems.device = "cpu"
    return flag_gems


def _no_launch_cache() -> None:
    """Replace FlagGems's cache of compiled kernels, which the interpreter does not have."""
    import triton

    module: Any = types.ModuleType("flag_gems.utils.libentry")
    module.libentry = lambda: lambda kernel: kernel
    module.libtuner = triton.autotune
    module.LibTuner = type("LibTuner", (), {})
    module.LibEntry = type("LibEntry", (), {})
    module.libcache = {}
    sys.modules[module.__name__] = module


def _strided_buffers() -> None:
    """Unwrap FlagGems's StridedBuffer to its view: the interpreter copies tensors."""
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run

    def unwrap(value: Any) -> Any:
        if type(value).__name__ != "StridedBuffer":
            return value
        base, offset = value.unwrap(), getattr(value, "_offset", 0)
        if not offset:
            return base
        start = base.storage_offset() + offset
        return torch.as_strided(base, tuple(value.size()), tuple(value.stride()), start)

    def run(self: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
        named = {name: unwrap(value) for name, value in kwargs.items()}
        return original(self, *map(unwrap, args), grid=grid, warmup=warmup, **named)

    InterpretedFunction.run = run
