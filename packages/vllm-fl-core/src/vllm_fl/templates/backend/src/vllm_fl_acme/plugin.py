"""What this distribution brings: the plugin that the entry point `acme` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from .impl import activation, normalization, rotary

POLICY = Path(__file__).with_name("acme.yaml")


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `vendor.acme`."""
    return [*activation.OPS, *normalization.OPS, *rotary.OPS]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The order per op on Acme's hardware; nothing for another platform."""
    return PolicyDefaults(POLICY) if platform == "acme" else None
