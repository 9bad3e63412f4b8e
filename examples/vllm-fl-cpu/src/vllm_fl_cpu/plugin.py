"""What this distribution brings: the plugin that the entry point `cpu` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from .impl import activation, experts, gated_delta, normalization, quantisation, rotary

POLICY = Path(__file__).with_name("cpu.yaml")


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `vendor.cpu`; they run where vLLM's CPU build is installed."""
    return [
        *activation.OPS,
        *experts.OPS,
        *gated_delta.OPS,
        *normalization.OPS,
        *quantisation.OPS,
        *rotary.OPS,
    ]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The measured order per op for the CPU; nothing for another platform."""
    return PolicyDefaults(POLICY) if platform == "cpu" else None
