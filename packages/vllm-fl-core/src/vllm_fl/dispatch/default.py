"""The default manager: the one behind `call_op`, and behind an engine in this process."""

from __future__ import annotations

from .manager import OpManager

manager = OpManager()


def get_default_manager() -> OpManager:
    """The manager behind `call_op`."""
    return manager
