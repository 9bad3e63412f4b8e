"""`vllm-fl coverage`: whose code takes a model's time, step by step: reached by a contract or not.

One engine runs some steps under PyTorch's profiler. Nothing of the engine that serves is changed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from ._counts import counts
from ._coverage import Whose, attribute, named, sums
from ._engines import Engine, check_model, planned, running, takes_model
from ._show import UsageError, answer, print_table, say

EXTENSION = "vllm_fl_tools.integration.profiling.Profiling"

CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variable -> the folder of a cache that this command gives the engine empty: code that an earlier
engine compiled does not tell what is fused in it. Layers of one model share what is compiled."""

TAKEN = "--worker-extension-cls"
"""The argument of vLLM's by which the worker is told to profile."""

SHOWN = 0.002
"""The share of a row that has a line of its own in the table for people."""

LEARNT = 2
"""Labelled steps, where the device runs them as they serve afterwards."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and which steps. What else is there goes to vLLM."""
    takes_model(parser)
    parser.add_argument(
        "--batch",
        metavar="N,N",
        default="1",
        help="how many sequences decode together; several sizes make several tables (default: 1)",
    )
    parser.add_argument(
        "--prompt-tokens",
        metavar="N",
        default="256",
        help="tokens of each prompt, and of the prefill that is profiled (default: 256)",
    )
    parser.add_argument(
        "--steps", metavar="N", default="16", help="steps that are profiled (default: 16)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when a kind of step shows nothing, or the engine fails."""
    model = arguments.model
    check_model(model)
    batches = counts("--batch", arguments.batch)
    (prompt,) = counts("--prompt-tokens", arguments.prompt_tokens, single=True)
    (steps,) = counts("--steps", arguments.steps, single=True)
    if any(given.partition("=")[0].replace("_", "-") == TAKEN for given in arguments.more):
        raise UsageError(f"{TAKEN}: this command gives the engine one of its own; leave it out")
    planned()
    with (
        tempfile.TemporaryDirectory() as caches,
        running(
            "that is profiled",
            model,
            {"worker_extension_cls": EXTENSION},
            {**os.environ, **{name: f"{caches}/{folder}" for name, folder in CACHES.items()}},
            arguments=arguments.more,
        ) as engine,
    ):
        needed = prompt + steps + 2
        if needed > engine.length:
            raise UsageError(
                f"--prompt-tokens {prompt} and --steps {steps} need sequences of {needed} tokens; "
                f"this engine takes {engine.length}: ask for fewer, or for a larger --max-model-len"
            )
        on_host = engine.ask("places")["device"] == "cpu"
        phases = [_phase(engine, True, n, prompt, steps, on_host) for n in batches]
        phases.append(_phase(engine, False, 1, prompt, steps, on_host))
        places = engine.ask("places")  # again: calls may have been refused meanwhile
        report = engine.report
    told = {
        "model": model,
        "mode": report["mode"],
        "arguments": arguments.more,
        "digest": report["digest"],
        "device": places["device"],
        "ranks": places["ranks"],
        "attention": places["attention"],
        "plan": report["ops"],
        "phases": [_judged(phase, places, report) for phase in phases],
    }
    answer({"coverage": told}, _show, as_json=arguments.json)
    return 1 if any(phase["problem"] for phase in told["phases"]) else 0


def _phase(
    engine: Engine, decode: bool, batch: int, prompt: int, steps: int, on_host: bool
) -> dict[str, Any]:
    """Let the engine take steps of one kind: timed, profiled, and timed again."""
    name = f"decode, batch {batch}" if decode else f"prefill, {prompt} tokens"

    def visit(what: str, count: int) -> dict[str, Any]:
        new, times = (count + 2, 1) if decode else (1, count)
        visit = {"batch": batch, "prompt_tokens": prompt, "new_tokens": new, "times": times}
        return {"seed": f"coverage {name} {what}", **visit}

    def timed(what: str) -> list[float]:
        took: list[float] = engine.ask("visit", **visit(what, steps))["steps"]
        return took[-steps:] if decode else took

    def profiled(what: str, count: int, labelled: bool) -> dict[str, Any]:
        return engine.ask(
            "profile", visit=visit(what, count), decode=decode, steps=count, labelled=labelled
        )

    timed("warm")
    seconds = timed("timed")
    learnt = profiled("labelled", steps if on_host else min(LEARNT, steps), True)
    measured = None if on_host else profiled("measured", steps, False)
    seconds += timed("timed again")
    return {
        "name": name,
        "kind": "decode" if decode else "prefill",
        "batch": batch,
        "prompt_tokens": prompt,
        "step_us": 1e6 * _usual(seconds),
        "learnt": learnt,
        "measured": measured,
    }


def _usual(seconds: Sequence[float]) -> float:
    """The mean of the middle half: a busy machine makes some steps much longer."""
    ordered, cut = sorted(seconds), len(seconds) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _judged(
    phase: dict[str, Any], places: Mapping[str, Any], report: Mapping[str, Any]
) -> dict[str, Any]:
    """The phase as it is told: its rows in the place of what the profiler saw."""
    told = dict(phase)
    learnt, measured = told.pop("learnt"), told.pop("measured")
    tokens = phase["batch"] if phase["kind"] == "decode" else phase["prompt_tokens"]
    found = attribute(Whose(places, report, tokens), learnt, measured)
    return {**told, **found, "remainder_us": phase["step_us"] - found["busy_us"]}


def _show(facts: Mapping[str, Any]) -> None:
    told = facts["coverage"]
    ranks = f", rank 0 of {told['ranks']}" if told["ranks"] > 1 else ""
    say(f"{told['model']}: {told['mode']}, {told['device']}{ranks}, digest {told['digest']}")
    for phase in told["phases"]:
        say(f"\n{phase['name']}")
        if phase["problem"]:
            say(f"Nothing is known of it: {phase['problem']}.")
        if phase["rows"]:
            headings = ("op", "implementation", "share", "µs/step", "calls", "reached", "why not")
            print_table(headings, _lines(phase["rows"]))
            for line in sums(phase):
                say(line)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    shown = [row for row in rows if row["share"] >= SHOWN]
    if rest := [row for row in rows if row["share"] < SHOWN]:
        more = {"op": f"{len(rest)} more", "name": "", "impl": "", "reached": "-"}
        summed = {key: sum(row[key] for row in rest) for key in ("share", "us", "calls")}
        shown.append({**more, "why": "see --json", **summed})
    return [
        (
            named(row),
            row["impl"] or "-",
            f"{row['share']:.1%}",
            f"{row['us']:.1f}",
            f"{row['calls']:.1f}",
            row["reached"],
            row["why"] or "-",
        )
        for row in shown
    ]
