"""Vendor platform plugin for vLLM, in the form of vllm-ascend, unaware of vllm-fl.

Its platform is out of vLLM's tree, with a worker that registers layers, attention, a communicator,
a compiler and a pass manager. All compute as vLLM does and count their calls.
"""

from __future__ import annotations


def register() -> str:
    return "fl_platform_acme.platform.AcmePlatform"


def patch() -> None:
    """Change vLLM before an engine starts, as vendors do: here one harmless default."""
    import torch

    # vLLM empties the accelerator's caches at shutdown on every platform but its own CPU's.
    torch.accelerator.empty_cache = lambda: None
    torch.accelerator.empty_host_cache = lambda: None
