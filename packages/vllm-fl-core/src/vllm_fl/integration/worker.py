"""The worker: vLLM's own, with the plan made and bound before the model is built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..dispatch.logs import get_logger
from ..dispatch.plan import Plan, building

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["PlannedWorker", "wrap_worker"]

PREFIX = "Planned__"

log = get_logger("engine")


class PlannedWorker:
    """What we change of a worker. Mixed in before the class that vLLM chose."""

    vllm_config: VllmConfig
    rank: int
    vllm_fl_plan: Plan

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Make the plan, say it once, and build the model's layers on it."""
        from .ir import bind_providers
        from .planning import plan_for

        plan = self.vllm_fl_plan = plan_for(self.vllm_config)
        bind_providers(plan)
        if self.rank == 0:
            log.info("%s", plan.line())
        with building(plan):
            return super().load_model(*args, **kwargs)  # type: ignore[misc]

    def vllm_fl_report(self) -> dict[str, Any]:
        """What this worker runs with, and what it counted: for `collective_rpc`.

        Returns:
            JSON-able: `mode`, `ops` {op: {impl, reason}}, `calls` and `fallbacks`
            {op: {impl id: count}}. Calls are counted under VLLM_FL_DISPATCH_DEBUG=1.
        """
        plan = self.vllm_fl_plan
        return {
            "rank": self.rank,
            "mode": plan.mode,
            "ops": {
                op: {"impl": entry.label, "reason": entry.reason}
                for op, entry in plan.entries.items()
            },
            "calls": _nested(plan.calls),
            "fallbacks": _nested(plan.fallbacks),
        }


def _nested(counter: dict[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for (op, impl_id), count in sorted(counter.items()):
        table.setdefault(op, {})[impl_id] = count
    return table


def wrap_worker(vllm_config: VllmConfig) -> None:
    """Put our worker in front of the one that vLLM chose, once."""
    parallel = vllm_config.parallel_config
    path = parallel.worker_cls
    if isinstance(path, str) and path != "auto" and not path.startswith(f"{__name__}.{PREFIX}"):
        parallel.worker_cls = f"{__name__}.{PREFIX}{path.replace('.', '__')}"


def __getattr__(name: str) -> type:
    """Only a path travels to the workers: the class is made from it on demand."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, cls = name.removeprefix(PREFIX).replace("__", ".").rpartition(".")
    base = getattr(import_module(module), cls)
    worker = type(f"{cls}FL", (PlannedWorker, base), {"__module__": __name__, "__qualname__": name})
    globals()[name] = worker
    return worker
