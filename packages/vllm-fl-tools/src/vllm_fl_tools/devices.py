"""What torch calls the device of a platform."""

from __future__ import annotations

from vllm_fl.dispatch.platforms import foreign_platform


def torch_device(platform: str) -> str:
    """torch's name of a platform's device: where another plugin brings it, what torch finds."""
    foreign = foreign_platform()
    if foreign is None or foreign.name != platform:
        return {"ascend": "npu", "rocm": "cuda"}.get(platform, platform)
    import torch

    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and torch.accelerator.is_available() else "cpu"
