"""Vendor platform plugin for vLLM, in the form of vllm-ascend, unaware of vllm-fl. Its platform is
out of vLLM's tree, with a worker that registers layers, attention, a communicator, a compiler and a
pass manager. All compute like vLLM and count their calls."""

from __future__ import annotations


def register() -> str:
    return "fl_platform_acme.platform.AcmePlatform"


def patch() -> None:
    """Change vLLM before an engine starts, like vendors: here one harmless default."""
    import torch

    # This device has no caches, which vLLM empties at shutdown on all platforms except its own CPU.
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.empty_host_cache = lambda: None
