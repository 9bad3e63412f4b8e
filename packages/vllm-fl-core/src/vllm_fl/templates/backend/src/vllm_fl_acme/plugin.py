"""What this distribution brings: the plugin that the entry point `acme` names."""

from __future__ import annotations

from pathlib import Path

from vllm_fl import BackendImplKind, OpImpl, PolicyDefaults, hookimpl

from .impl import activation, available, normalization, rotary

POLICY = Path(__file__).with_name("acme.yaml")
VENDOR = ("vendor.acme", BackendImplKind.VENDOR)


@hookimpl
def register_ops() -> list[OpImpl]:
    """The ops as `vendor.acme`."""
    return [
        # [[ silu_and_mul ]]
        OpImpl(
            "silu_and_mul",
            *VENDOR,
            activation.silu_and_mul,
            "acme",
            available=available,
            supports=activation.supports_silu_and_mul,
        ),
        # [[ end ]]
        # [[ gelu_and_mul ]]
        OpImpl(
            "gelu_and_mul",
            *VENDOR,
            activation.gelu_and_mul,
            "acme",
            available=available,
            supports=activation.supports_gelu_and_mul,
        ),
        # [[ end ]]
        # [[ rms_norm ]]
        OpImpl(
            "rms_norm",
            *VENDOR,
            normalization.rms_norm,
            "acme",
            available=available,
            supports=normalization.supports_rms_norm,
        ),
        # [[ end ]]
        # [[ rotary_embedding ]]
        OpImpl(
            "rotary_embedding",
            *VENDOR,
            rotary.rotary_embedding,
            "acme",
            available=available,
            supports=rotary.supports_rotary_embedding,
        ),
        # [[ end ]]
    ]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The order per op on Acme's hardware; nothing for another platform."""
    return PolicyDefaults(POLICY) if platform == "acme" else None
