"""Availability of torch_npu and an NPU, determined without loading CANN if it is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_fl import Availability

__all__ = ["available"]


def available() -> Availability:
    """Return True, or why no NPU can be used and how to fix it.

    Metadata is read first, to import nothing on a machine without torch_npu. If it is installed,
    `import torch` loads it through its entry point, or fails.
    """
    try:
        found = version("torch-npu")
    except PackageNotFoundError:
        return (
            "torch-npu is not installed; on a host with an Ascend NPU and CANN: "
            'pip install "vllm-fl-ascend[torch-npu]"'
        )
    try:
        import torch
        import torch_npu  # noqa: F401 (it registers the operators and torch.npu)
    except (ImportError, RuntimeError, OSError) as error:
        return (
            f"torch_npu {found} does not load: {error}. Source CANN's set_env.sh, and install the "
            "torch-npu release for this torch and this CANN"
        )
    if not torch.npu.is_available():  # type: ignore[attr-defined]
        return f"torch_npu {found} finds no NPU: check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES"
    return True
