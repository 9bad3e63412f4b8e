"""An NPU, as torch and Python's metadata present it."""

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

    def set_device(self, device: object) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass  # torch's generator is the only one

    def get_device_name(self, device: object = None) -> str:
        return "Ascend910B1"


@functools.cache
def activate() -> None:
    """Make this process find torch_npu, one NPU and its operators; may be called repeatedly. Raises
    WheelMissing if TORCH_NPU_WHEEL is not the path of torch_npu's wheel."""
    operators.define()
    npu = Npu("torch_npu.npu")
    module = ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)
    module.__version__ = VERSION
    module.npu = npu
    module.__getattr__ = _operator
    sys.modules["torch_npu"] = module
    sys.modules["torch_npu.npu"] = npu
    torch.npu = npu
    _metadata()
    for name in ("ops", "attention"):
        importlib.import_module(f"{__package__}.{name}")  # registers their numerics


def _operator(name: str) -> object:
    """The module's operators as functions, like the real module; transformers imports some."""
    if not name.startswith("npu_"):
        raise AttributeError(f"module 'torch_npu' has no attribute {name!r}")
    return getattr(torch.ops.npu, name)


def _metadata() -> None:
    """Make `importlib.metadata` find the distribution, without the entry point that loads it."""
    _metadata.folder = tempfile.TemporaryDirectory()
    info = Path(_metadata.folder.name) / f"torch_npu-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {VERSION}\n")
    sys.path.append(_metadata.folder.name)
