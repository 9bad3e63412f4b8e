"""`vllm-fl tune --profile`: the time of a model's steps by op and implementation.

One engine runs some steps with PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from ._coverage import OwnerFinder, answers, attribute, row_label, sums
from ._engines import EngineProcess, check_model, engine_startup, running_engine
from ._options import counts
from ._show import UsageError, print_answer, print_table, say

EXTENSION = "vllm_fl_tools.integration.profiling.Profiling"

CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variable -> folder of a cache. The engine's caches are empty, because the kernels that an earlier
engine fused are unknown. Layers of one model share compiled code.
"""

SHOWN = 0.002
"""Minimum share of a row for a separate line in the printed table."""

PROMPT_TOKENS, STEPS = 256, 16
"""Tokens of each prompt, and number of profiled steps of each kind."""


def profile_model(arguments: argparse.Namespace) -> int:
    """Profile a model; return the exit status, 1 if a kind of step could not be profiled."""
    more = arguments.more
    model = check_model("--profile", arguments.model, more)
    batches = counts("--batch", arguments.batch or "1")
    engine_startup()
    with (
        tempfile.TemporaryDirectory() as caches,
        running_engine(
            "for the profile",
            model,
            {"worker_extension_cls": EXTENSION},
            {**os.environ, **{name: f"{caches}/{folder}" for name, folder in CACHES.items()}},
            arguments=more,
        ) as engine,
    ):
        prompt = min(PROMPT_TOKENS, engine.length - STEPS - 2)
        if prompt < 1:
            raise UsageError(
                f"--profile needs sequences of {STEPS + 3} tokens, but this engine is limited to "
                f"{engine.length}: set a larger --max-model-len"
            )
        phases = [_phase(engine, True, n, prompt) for n in batches]
        phases.append(_phase(engine, False, 1, prompt))
        places = engine.ask("places")
        report = engine.report
    found = {
        "model": model,
        "mode": report["mode"],
        "arguments": more,
        "digest": report["digest"],
        "device": places["device"],
        "ranks": places["ranks"],
        "attention": places["attention"],
        "plan": report["ops"],
        "phases": [_judged(phase, places, report) for phase in phases],
    }
    print_answer({"coverage": found}, show, as_json=arguments.json)
    return 1 if any(phase["problem"] for phase in found["phases"]) else 0


def _phase(engine: EngineProcess, decode: bool, batch: int, prompt: int) -> dict[str, Any]:
    """Run steps of one kind: timed, profiled, and timed again."""
    name = f"decode, batch {batch}" if decode else f"prefill, {prompt} tokens"

    def visit(what: str, count: int) -> dict[str, Any]:
        new, times = (count + 2, 1) if decode else (1, count)
        visit = {"batch": batch, "prompt_tokens": prompt, "new_tokens": new, "times": times}
        return {"seed": f"coverage {name} {what}", **visit}

    def timed(what: str) -> list[float]:
        took: list[float] = engine.ask("visit", **visit(what, STEPS))["steps"]
        return took[-STEPS:] if decode else took

    timed("warm")
    seconds = timed("timed")
    seen = engine.ask("profile", visit=visit("profiled", STEPS), decode=decode, steps=STEPS)
    seconds += timed("timed again")
    return {
        "name": name,
        "kind": "decode" if decode else "prefill",
        "batch": batch,
        "prompt_tokens": prompt,
        "step_us": 1e6 * _usual(seconds),
        "seen": seen,
    }


def _usual(seconds: Sequence[float]) -> float:
    """Return the mean of the middle half, because a busy machine makes some steps much longer."""
    ordered, cut = sorted(seconds), len(seconds) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _judged(
    phase: dict[str, Any], places: Mapping[str, Any], report: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the phase with the rows of `attribute` instead of its profile."""
    facts = dict(phase)
    seen = facts.pop("seen")
    tokens = phase["batch"] if phase["kind"] == "decode" else phase["prompt_tokens"]
    found = attribute(OwnerFinder(places, report, tokens), seen, on_host=places["device"] == "cpu")
    return {**facts, **found, "remainder_us": phase["step_us"] - found["busy_us"]}


def show(facts: Mapping[str, Any]) -> None:
    coverage = facts["coverage"]
    ranks = f", rank 0 of {coverage['ranks']}" if coverage["ranks"] > 1 else ""
    on = f"{coverage['mode']}, {coverage['device']}{ranks}"
    say(f"{coverage['model']}: {on}, digest {coverage['digest']}")
    for phase in coverage["phases"]:
        say(f"\n{phase['name']}")
        if phase["problem"]:
            say(f"Not profiled: {phase['problem']}.")
        for line in answers(phase):
            say(line)
        if phase["rows"]:
            headings = ("op", "implementation", "share", "µs/step", "calls", "run by plan")
            print_table(headings, _lines(phase["rows"]))
            for line in sums(phase):
                say(line)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    shown = [row for row in rows if row["share"] >= SHOWN]
    if rest := [row for row in rows if row["share"] < SHOWN]:
        more = {"op": f"{len(rest)} more", "name": "see --json", "impl": "", "reached": "-"}
        shown.append(
            more | {key: sum(row[key] for row in rest) for key in ("share", "us", "calls")}
        )
    return [
        (
            row_label(row),
            row["impl"] or "-",
            f"{row['share']:.1%}",
            f"{row['us']:.1f}",
            f"{row['calls']:.1f}",
            row["reached"],
        )
        for row in shown
    ]
