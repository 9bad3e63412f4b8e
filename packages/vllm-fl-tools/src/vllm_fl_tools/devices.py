"""Names of devices in torch."""

from __future__ import annotations

from vllm_fl.dispatch.platforms import foreign_platform


def torch_device(platform: str) -> str:
    """Return torch's device type of a platform; for a third-party platform, torch's accelerator."""
    foreign = foreign_platform()
    if foreign is None or foreign.name != platform:
        return {"ascend": "npu", "rocm": "cuda"}.get(platform, platform)
    import torch

    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and torch.accelerator.is_available() else "cpu"
