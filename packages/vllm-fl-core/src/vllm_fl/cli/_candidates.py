"""An op's candidates as rows: one rendering for `ops` and `explain`."""

from __future__ import annotations

from typing import Any

from ..dispatch.manager import OpManager
from ..dispatch.resolver import Stock, Trace
from ..plugins.registry import Owner

__all__ = ["as_rows"]


def as_rows(manager: OpManager, trace: Trace) -> list[dict[str, Any]]:
    """Every candidate of a trace, with who brought it."""
    owners = manager.registry.snapshot().owners
    rows = []
    for candidate in trace.candidates:
        impl = candidate.impl
        owner = owners.get((trace.op, impl.impl_id), Owner("vllm"))
        rows.append(
            {
                "impl_id": impl.impl_id,
                "kind": "stock" if isinstance(impl, Stock) else impl.kind.value,
                "vendor": impl.vendor,
                "priority": impl.priority,
                "distribution": owner.distribution,
                "version": owner.version,
                "status": candidate.status,
                "reason": candidate.reason,
            }
        )
    return rows
