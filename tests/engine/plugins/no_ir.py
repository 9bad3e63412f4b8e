"""Makes vllm-fl find no `vllm.ir` in this process, as in the releases that have none."""

from __future__ import annotations

from vllm_fl import OpImpl, hookimpl
from vllm_fl.integration.patchers import ir


def _has_none() -> bool:
    return False


ir.has_ir = _has_none


@hookimpl
def register_ops() -> list[OpImpl]:
    """Nothing."""
    return []
