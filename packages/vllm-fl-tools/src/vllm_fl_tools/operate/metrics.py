"""A plan's counters as a file for Prometheus (node_exporter's textfile collector)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.resolver import STOCK
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.patchers.linear_kernels import kernel_rows

from .state_file import StateFile, of_worker

if TYPE_CHECKING:
    from vllm_fl.integration.engines import Engine

FAMILIES = {
    "vllm_fl_plan_info": "Implementation of each op of the plan.",
    "vllm_fl_linear_layers": "Quantised linear layers and experts of the model, by their class.",
    "vllm_fl_lock_differs": "1 if the engine differs from the lock file in its settings.",
    "vllm_fl_demoted": "Implementations that were disabled at startup.",
    "vllm_fl_fallbacks_total": "Calls that a later candidate computed.",
    "vllm_fl_refusals_total": "Calls that an implementation does not support.",
    "vllm_fl_calls_total": "Calls, or tracings if a compiler traces.",
    "vllm_fl_shadow_seen_total": "Calls of steps that were sampled.",
    "vllm_fl_shadow_calls_total": "Calls that were compared while serving.",
    "vllm_fl_shadow_wrong_total": "Compared calls beyond the tolerance.",
    "vllm_fl_shadow_worst_share": "The worst error, over the tolerance.",
}
"""Metric -> its help. Names that end in `_total` are counters, the others gauges."""


def exposition(
    plan: Plan,
    digest: str,
    worker: Mapping[str, str],
    shadow: Mapping[str, Any] | None = None,
    *,
    lock_differs: bool = False,
    kernels: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a plan and its counters in Prometheus' text format.

    prometheus_client's Counter and Gauge are not used, because they map files into memory under
    PROMETHEUS_MULTIPROC_DIR, and a full disk then kills the worker.

    Args:
        plan, digest: the current plan.
        worker: labels that identify the worker, for every sample.
        shadow: the shadow check's part of the worker report; None without it.
        lock_differs: whether the engine differs from its lock file.
        kernels: `kernels` of the worker report.
    """
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    record = plan.record
    # Prometheus sees the first increase only of counters that exist from startup on. Counters of
    # calls do not start at 0, because calls in graphs are not counted.
    zero = {(op, i.impl_id): 0 for op, entry in plan.entries.items() for i in entry.impls}
    plan_info: dict[Any, float] = {
        (op, e.label, plan.mode, digest): 1 for op, e in plan.entries.items()
    }
    layers: dict[Any, float] = {
        (row["op"] or "", row["impl"] or STOCK.impl_id, row["class"]): row["layers"]
        for row in kernels
    }
    samples: dict[str, Mapping[Any, float]] = {
        "lock_differs": {(): int(lock_differs)},
        "demoted": dict.fromkeys(record.demotions, 1),
        "fallbacks_total": {**zero, **record.fallbacks},
        "refusals_total": {**zero, **record.refusals},
    }
    if plan.counts_calls:
        samples["calls_total"] = dict(record.calls)
    if shadow is not None:
        seen = {
            (op, impl_id, tokens): tally
            for op, by_impl in shadow["compared"].items()
            for impl_id, by_tokens in by_impl.items()
            for tokens, tally in by_tokens.items()
        }
        for name in ("seen_total", "calls_total", "wrong_total", "worst_share"):
            field = name.removesuffix("_total").removeprefix("worst_")
            samples[f"shadow_{name}"] = {key: tally[field] for key, tally in seen.items()}
    families = []
    for labels, what, values in [
        (("op", "impl", "mode", "digest"), "plan_info", plan_info),
        (("op", "impl", "class"), "linear_layers", layers),
        *((("op", "impl", "tokens"), what, values) for what, values in samples.items()),
    ]:
        name = f"vllm_fl_{what}"
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, FAMILIES[name])
        for key, value in values.items():
            own = dict(zip(labels, map(str, key), strict=False))
            family.add_sample(name, {**worker, **own}, value)
        families.append(family)
    only_these: Any = SimpleNamespace(collect=lambda: families)
    text: str = generate_latest(only_these).decode()
    return text


def metrics_file(engine: Engine, named: str, lock: Callable[[], Sequence[str]]) -> StateFile:
    """Write an engine's counters to a file until it is closed, and then delete the file.

    Args:
        engine: the engine.
        named: the user's path. Its name without suffix is the label `engine`, and its directory
            gets the file of each worker (`of_worker`).
        lock: returns the differences from the lock file.
    """
    path = Path(named)
    worker = {"engine": path.stem, "dp": str(engine.replica), "rank": str(engine.rank)}

    def text() -> str | None:
        plan, settings = engine.plan, engine.facts.settings
        if plan.record.is_aside:  # counters never decrease
            return None
        shadow = engine.worker.vllm_fl_report().get("shadow") if settings.shadow else None
        return exposition(
            plan,
            engine.digest,
            worker,
            shadow,
            lock_differs=bool(lock()),
            kernels=kernel_rows(engine),
        )

    own = of_worker(path, engine.rank, engine.replica)
    return StateFile(path, own, text, has_counted=partial(has_counts, engine))


def has_counts(engine: Engine) -> bool:
    """Whether a counter of the engine is not 0."""
    plan = engine.plan
    is_called = plan.counts_calls and bool(plan.record.calls)
    return is_called or bool(plan.record.refusals or plan.record.fallbacks)
