"""A plan's counters as a file for Prometheus, by node_exporter's textfile collector."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import Draft
from ..logs import get_logger
from ..text import quote
from .plan import Plan

if TYPE_CHECKING:
    from .shadow import Shadow

__all__ = ["MetricsFile", "exposition", "of_worker"]

EVERY = 20.0
"""Seconds from one writing to the next: collectors read every 15 to 60."""

PATIENCE = 1.0
"""Seconds that `close` waits for a file system that does not answer."""

FAMILIES = {
    "vllm_fl_plan_info": "What each op runs with.",
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

log = get_logger("engine")


def exposition(
    plan: Plan, digest: str, whose: Mapping[str, str], shadow: Shadow | None = None
) -> str:
    """A plan and its counters in Prometheus' text format, version 0.0.4.

    Counters of calls are there where calls are counted.

    Args:
        plan: what serves.
        digest: the plan's.
        whose: labels of every sample, by which those of one worker differ from another's.
        shadow: what compares calls while the plan serves, where steps are sampled.
    """
    record = plan.record
    # A counter that is there from the start lets Prometheus see its first step.
    zero = {(op, i.impl_id): 0 for op, entry in plan.entries.items() for i in entry.impls}
    about = {"mode": plan.mode, "digest": digest}
    samples: dict[str, list[tuple[dict[str, str], float]]] = {
        "plan_info": [({"op": op, "impl": e.label, **about}, 1) for op, e in plan.entries.items()],
        "demoted": _labelled(dict.fromkeys(record.demotions, 1)),
        "fallbacks_total": _labelled({**zero, **record.fallbacks}),
        "refusals_total": _labelled({**zero, **record.refusals}),
    }
    if plan.counts_calls:
        samples["calls_total"] = _labelled({**zero, **record.calls})
    if shadow is not None:
        seen = dict(shadow.seen)
        for name in ("seen_total", "calls_total", "wrong_total", "worst_share"):
            field = name.removesuffix("_total").removeprefix("worst_")
            figures = {key: getattr(tally, field) for key, tally in seen.items()}
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


def of_worker(named: str, rank: int, replica: int) -> Path:
    """A worker's own file beside the one that the user names.

    Args:
        named: `vllm.prom` becomes `vllm.rank0.prom`, and `vllm.dp1.rank0.prom` for the second
            replica of data parallelism.
        rank: the worker's, within its replica.
        replica: which one, from 0.
    """
    path = Path(named)
    of_replica = f".dp{replica}" if replica else ""
    return path.parent / f"{path.stem}{of_replica}.rank{rank}{path.suffix}"


class MetricsFile:
    """Writes a plan's counters to a file until it is closed, from a thread of its own.

    The file is written beside its place and then put there, so that who reads it finds it whole. It
    goes when it is closed: what is not served is not reported. One that cannot be written is said
    once and tried again.

    Args:
        named: the file that the user names; each worker has one of its own beside it (`of_worker`).
            Without the ending it is the label `engine`.
        plan: what serves.
        digest: the plan's.
        rank: the worker's, within its replica.
        replica: which one of data parallelism, from 0.
        shadow: gives what compares calls, as soon as something does.
        every: seconds from one writing to the next.
    """

    def __init__(
        self,
        named: str,
        plan: Plan,
        digest: str,
        *,
        rank: int,
        replica: int = 0,
        shadow: Callable[[], Shadow | None] = lambda: None,
        every: float = EVERY,
    ) -> None:
        self._named = Path(named)
        self.path = of_worker(named, rank, replica)
        self._plan, self._digest, self._shadow, self._every = plan, digest, shadow, every
        self._whose = {"engine": self._named.stem, "dp": str(replica), "rank": str(rank)}
        self._is_said = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-fl-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and take the file away; again does nothing."""
        self._closed.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while True:
            if not self._plan.record.is_aside:  # counters never go back
                self._write()
            if self._closed.wait(self._every):
                break
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        try:
            if self._named.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self._named))
            text = exposition(self._plan, self._digest, self._whose, self._shadow())
            with Draft(self.path) as draft:
                draft.put(text.encode(errors="replace"))
        except Exception as error:  # whatever it is, the engine serves on
            if not self._is_said:
                self._is_said = True
                log.warning(
                    "VLLM_FL_METRICS: %s cannot be written (%s). It is tried again every %.0f s, "
                    "without a word",
                    self.path,
                    quote(error),
                    self._every,
                )
