"""An NPU as torch and Python's metadata show it."""

from __future__ import annotations

import functools
import importlib
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

from . import operators
from .wheel import VERSION

__all__ = ["activate"]


class Npu(ModuleType):
    """`torch.npu` of a host with one NPU."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "Ascend910B1"


@functools.cache
def activate() -> None:
    """Let this process find torch_npu, one NPU and its operators; doing so twice is no error.

    Raises:
        WheelMissing: TORCH_NPU_WHEEL does not name torch_npu's wheel.
    """
    operators.define()
    npu = Npu("torch_npu.npu")
    module = ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)
    module.__version__ = VERSION
    module.npu = npu
    # As in the real one, its operators are functions of the module; transformers imports some.
    module.__getattr__ = lambda name: getattr(torch.ops.npu, name)
    sys.modules["torch_npu"] = module
    sys.modules["torch_npu.npu"] = npu
    torch.npu = npu
    _metadata()
    for module in ("ops", "attention"):
        importlib.import_module(f"{__package__}.{module}")  # their numerics register themselves


def _metadata() -> None:
    """Let `importlib.metadata` find the distribution, without the entry point that loads it."""
    _metadata.folder = tempfile.TemporaryDirectory()
    info = Path(_metadata.folder.name) / f"torch_npu-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {VERSION}\n")
    sys.path.append(_metadata.folder.name)
