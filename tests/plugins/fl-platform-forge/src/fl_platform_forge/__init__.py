"""A vendor's platform plugin for vLLM, in the form of vLLM-metax; it knows nothing of vllm-fl.

Its platform passes for one of vLLM's own, whose enum and names it inherits. Its layers stand in
vLLM's table before an engine is made, and run vLLM's kernels for that device. The worker is vLLM's.
"""

from __future__ import annotations


def register() -> str:
    return "fl_platform_forge.platform.ForgePlatform"


def register_out_of_tree() -> None:
    """Importing them registers them."""
    from . import layers  # noqa: F401
