"""The hooks of the FlagGems backend. It brings no ops yet."""

from __future__ import annotations

from vllm_fl.dispatch.types import OpImpl
from vllm_fl.hookspecs import hookimpl

__all__ = ["register_ops"]


@hookimpl
def register_ops() -> tuple[OpImpl, ...]:
    """Return the implementations that this backend brings: none yet."""
    return ()
