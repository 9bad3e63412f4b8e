"""A plan's counters as a file for Prometheus, by node_exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_fl.engine.plan import Plan
from vllm_fl.settings.schema import Settings
from vllm_fl_verify.files import of_worker

from .state_file import EVERY, StateFile

FAMILIES = {
    "vllm_fl_plan_info": "What each op runs with.",
    "vllm_fl_lock_differs": "1 where the engine differs from the lock that its settings name.",
    "vllm_fl_demoted": "Implementations that were taken out at start.",
    "vllm_fl_fallbacks_total": "Calls that a later candidate took over.",
    "vllm_fl_refusals_total": "Calls that an implementation refused.",
    "vllm_fl_calls_total": "Calls, or tracings where a compiler traces.",
    "vllm_fl_shadow_seen_total": "Calls of steps that were sampled.",
    "vllm_fl_shadow_calls_total": "Calls that were compared while serving.",
    "vllm_fl_shadow_wrong_total": "Those beyond the tolerance.",
    "vllm_fl_shadow_worst_share": "The worst error, over the tolerance.",
}
"""Metric -> what it is. A total is a counter, what else there is a gauge."""


def exposition(
    plan: Plan,
    digest: str,
    whose: Mapping[str, str],
    shadow: Mapping[str, Any] | None = None,
    *,
    lock_differs: bool = False,
) -> str:
    """A plan and its counters in Prometheus' text format, version 0.0.4.

    Counters of calls are there where calls are counted.

    Args:
        plan: what serves.
        digest: the plan's.
        whose: labels of every sample, by which those of one worker differ from another's.
        shadow: what sampled steps have shown, as `Shadow.report` returns it; None without them.
        lock_differs: whether the engine differs from its lock.
    """
    record = plan.record
    # A counter that is there from the start lets Prometheus see its first step.
    zero = {(op, i.impl_id): 0 for op, entry in plan.entries.items() for i in entry.impls}
    about = {"mode": plan.mode, "digest": digest}
    samples: dict[str, list[tuple[dict[str, str], float]]] = {
        "plan_info": [({"op": op, "impl": e.label, **about}, 1) for op, e in plan.entries.items()],
        "lock_differs": [({}, int(lock_differs))],
        "demoted": _labelled(dict.fromkeys(record.demotions, 1)),
        "fallbacks_total": _labelled({**zero, **record.fallbacks}),
        "refusals_total": _labelled({**zero, **record.refusals}),
    }
    if plan.counts_calls:
        samples["calls_total"] = _labelled({**zero, **record.calls})
    if shadow is not None:
        seen = {
            (op, impl_id, tokens): tally
            for op, by_impl in shadow["compared"].items()
            for impl_id, by_tokens in by_impl.items()
            for tokens, tally in by_tokens.items()
        }
        for name in ("seen_total", "calls_total", "wrong_total", "worst_share"):
            field = name.removesuffix("_total").removeprefix("worst_")
            figures = {key: tally[field] for key, tally in seen.items()}
            samples[f"shadow_{name}"] = _labelled(figures)
    lines = []
    for what, some in samples.items():
        name = f"vllm_fl_{what}"
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {FAMILIES[name]}", f"# TYPE {name} {kind}"]
        for labels, value in some:
            both = {**whose, **labels}.items()
            written = ",".join(f'{key}="{_escaped(label)}"' for key, label in both)
            lines.append(f"{name}{{{written}}} {value}")
    return "".join(f"{line}\n" for line in lines)


def _labelled(figures: Mapping[Any, float]) -> list[tuple[dict[str, str], float]]:
    """The figures, by (op, impl id) or (op, impl id, tokens), as samples of one metric."""
    names = ("op", "impl", "tokens")
    return [(dict(zip(names, map(str, key), strict=False)), n) for key, n in figures.items()]


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class MetricsFile(StateFile):
    """A plan's counters in a file, until it is closed.

    It goes when it is closed: what is not served is not reported.

    Args:
        named: the file that the user names; each worker has one of its own beside it (`of_worker`).
            Without the ending it is the label `engine`.
        serving: returns the plan that serves, and its digest.
        rank: the worker's, within its replica.
        replica: which one of data parallelism, from 0.
        shadow: returns what sampled steps have shown; None without them.
        lock_differs: returns whether the engine differs from its lock.
        every: seconds from one writing to the next.
    """

    def __init__(
        self,
        named: str,
        serving: Callable[[], tuple[Plan, str]],
        *,
        rank: int,
        replica: int = 0,
        shadow: Callable[[], Mapping[str, Any] | None] = lambda: None,
        lock_differs: Callable[[], bool] = lambda: False,
        every: float = EVERY,
    ) -> None:
        path = Path(named)
        whose = {"engine": path.stem, "dp": str(replica), "rank": str(rank)}

        def text() -> str | None:
            plan, digest = serving()
            if plan.record.is_aside:  # counters never go back
                return None
            return exposition(plan, digest, whose, shadow(), lock_differs=lock_differs())

        own = of_worker(path, rank, replica)
        super().__init__(Settings.metrics.variable, path, own, text, every=every)
