"""`vllm-fl tune --accept`: compares a model's speed with a table or settings file and without it.

Two engines run in separate processes, and only one works at a time. Every round runs each phase on
both, in short alternating turns. The engine that begins also alternates. Ratios are taken within a
round, because other load on the machine then affects both engines. In timed steps, both engines
decode the same tokens, and thus compute the same steps. The memory layout of a process makes it
faster or slower for its whole life. Therefore half of the rounds use a second pair of engines. The
second pair also shows whether the table reproduces its plan and its tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm_fl.errors import VllmFLError
from vllm_fl.settings.files import read_table
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.schema import CONFIG, Settings
from vllm_fl.settings.values import read_text

from ..engine.timing import quartiles
from ..integration.workload import Visit
from ._engines import EngineProcess, check_model, running_engine
from ._show import UsageError, print_answer, print_table, say
from ._watch import ended_by_signal

ROUNDS = 10
STARTS = 2

LEAST = 0.98
"""Minimum speed of an accepted table, relative to the default. Identical engines differ by one or
two percent between startups.
"""

ROUND = 1.0
"""Target seconds of an engine's work in a round of a phase; the number of steps is limited."""

TURNS = 4
"""Number of timed turns of each engine in a round of a phase. They alternate between the engines,
since the speed of a machine may change within a second.
"""

LENGTH = 2048
"""Maximum tokens of a sequence: the longest prompt and one new token; a model may limit it."""

PHASES = {
    # A prompt of one token: every step has the shape of a decoding step.
    "decode, batch 1": Visit("", 1, 1, 16, repeated=True),
    "decode, batch 8": Visit("", 8, 1, 16, repeated=True),
    "prefill, 32 tokens": Visit("", 1, 32, 1),
    "prefill, 256 tokens": Visit("", 1, 256, 1),
}
"""The phases to time, if the model's maximum length permits; `_beyond_graphs` adds one."""

TABLED, DEFAULT = "with the file", "without it"


class AcceptError(VllmFLError):
    """A table cannot be judged, because the engines do not use it as expected."""

    code = "FL602"


@dataclass(frozen=True)
class Acceptance:
    """The decision whether to serve with a table.

    Args:
        accepted: the decision.
        reason: one sentence.
        figures: measurements by name: `rounds`, and the ratio of each phase, with quartiles.
    """

    accepted: bool
    reason: str
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Served:
    """The results of the engines.

    Args:
        seconds: (engine, phase) -> seconds of a step, for each round.
        tokens: for each startup with the table, the greedy answers of each round.
        digests: for each startup with the table, the digest of the plan.
        phases: name -> visit.
    """

    seconds: Mapping[tuple[str, str], Sequence[float]]
    tokens: Sequence[object]
    digests: Sequence[str]
    phases: Mapping[str, Visit] = field(default_factory=lambda: PHASES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accept",
        metavar="FILE",
        help="instead, serve the model with this table or settings file and without it, and "
        "compare the speeds; accepts only --model, --rounds, --json and vLLM's arguments",
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        help=f"for --accept: how often each engine runs each phase; default: {ROUNDS}",
    )


def accept_table(arguments: argparse.Namespace) -> int:
    """Serve the workload and print the verdict.

    Returns:
        The exit status: 0 if the table is accepted, 1 if it is not.

    Raises:
        SettingsError: the file has an error.
        UsageError: the model does not exist.
        EngineError: an engine failed.
        AcceptError: the file has no effect.
    """
    path, model = arguments.accept, check_model("--accept", arguments.model)
    rounds = ROUNDS if arguments.rounds is None else arguments.rounds
    if rounds < STARTS:
        raise UsageError(f"--rounds {rounds}: expected at least {STARTS}")
    if re.search("^holds:", read_text(path, "table", "--accept"), re.MULTILINE):
        read_table(path, "--accept")
        variable = Settings.table.variable
    else:
        load_settings({CONFIG: path})
        variable = CONFIG
    more = arguments.more
    started = time.monotonic()
    with ended_by_signal():
        served = compare_engines(variable, os.path.abspath(path), model, more, -(-rounds // STARTS))
    verdict, took = judged(served), time.monotonic() - started
    facts = {"table": path, "seconds": took, **dataclasses.asdict(verdict)}
    print_answer(facts, partial(_show, served), as_json=arguments.json)
    return 0 if verdict.accepted else 1


def judged(served: Served) -> Acceptance:
    of_phase = {phase: quartiles(_ratios(served, phase)) for phase in served.phases}
    figures: dict[str, float] = {"rounds": len(next(iter(served.seconds.values())))}
    for phase, (low, median, high) in of_phase.items():
        figures |= {f"{phase}: ratio": median, f"{phase}: low": low, f"{phase}: high": high}
    fault = _fault(served, of_phase)
    if fault is None:
        least = min(median for _, median, _ in of_phase.values())
        reason = f"reproducible, and in every phase at least {least:.3f} of the default's speed"
    return Acceptance(fault is None, fault or reason, figures)


def _fault(served: Served, of_phase: Mapping[str, tuple[float, float, float]]) -> str | None:
    """Return why the table is not accepted, or None."""
    if len({*served.digests}) > 1:
        return f"two startups made different plans ({', '.join(served.digests)})"
    if any(tokens != served.tokens[0] for tokens in served.tokens):
        return "two startups answered the same prompts with different tokens"
    below = {phase: of for phase, of in of_phase.items() if of[1] < LEAST}
    slower = [
        f"{phase} at {median:.3f} of the default's speed (quartiles {low:.3f} to {high:.3f})"
        for phase, (low, median, high) in below.items()
    ]
    reason = f"slower: {', '.join(slower)}"
    if unsure := [phase for phase, (*_, high) in below.items() if high >= 1.0]:
        reason += (
            f"; the rounds differ too much to be certain in {', '.join(unsure)}: use an idle "
            "machine, or more --rounds"
        )
    return reason if below else None


def _ratios(served: Served, phase: str) -> list[float]:
    pairs = zip(served.seconds[DEFAULT, phase], served.seconds[TABLED, phase], strict=True)
    return [default / tabled for default, tabled in pairs]


def _show(served: Served, facts: Mapping[str, Any]) -> None:
    rows, figures = [], facts["figures"]
    for phase, visit in served.phases.items():
        tokens = visit.batch * (visit.prompt_tokens if visit.new_tokens == 1 else 1)
        medians = [statistics.median(served.seconds[each, phase]) for each in (DEFAULT, TABLED)]
        speeds = [f"{tokens / median:.1f}" for median in medians]
        ratio, low, high = (figures[f"{phase}: {name}"] for name in ("ratio", "low", "high"))
        rows.append([phase, *speeds, f"{ratio:.3f}", f"{low:.3f}-{high:.3f}"])
    print_table(["phase", f"tokens/s {DEFAULT}", TABLED, "ratio", "quartiles"], rows)
    state = "accepted" if facts["accepted"] else "not accepted"
    say(f"\nThe file {facts['table']} is {state}: {facts['reason']}. {facts['seconds']:.0f} s.")


def compare_engines(
    variable: str, path: str, model: str, more: Sequence[str], rounds: int
) -> Served:
    """Serve a model with a table or settings file and without it, alternately.

    `variable` sets the file. `more` are arguments for vLLM. Each pair of engines runs this number
    of `rounds`.

    Raises:
        EngineError: an engine failed.
        AcceptError: the file has no effect.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    tokens, digests = [], []
    phases: Mapping[str, Visit] = {}
    for start in range(STARTS):
        with contextlib.ExitStack() as stack:
            # A table without effect is reported after the startup of one engine, not of two.
            order = (TABLED, DEFAULT) if start % 2 == 0 else (DEFAULT, TABLED)
            engines: dict[str, EngineProcess] = {}
            for name in order:
                engines[name] = stack.enter_context(_running(name, variable, path, model, more))
                if variable == Settings.table.variable:
                    _check(engines[name], path if name == TABLED else None)
            digest, other = (str(engines[name].report["digest"]) for name in (TABLED, DEFAULT))
            if digest == other:
                raise AcceptError(
                    f"The plan is the same with {path} and without it: the file has no effect in "
                    "this engine. `vllm-fl explain OP` shows the orders of an op"
                )
            digests.append(digest)
            if start == 0:
                length = min(engine.length for engine in engines.values())
                # A phase's prompt and one new token must fit.
                every = {**PHASES, **_beyond_graphs(engines)}
                phases = {n: v for n, v in every.items() if v.prompt_tokens < length}
                warm = {name: _warmed_up(engine, phases) for name, engine in engines.items()}
                phases = _fitted(phases, warm)
            for engine in engines.values():
                _warmed_up(engine, phases)
            answered = []
            for number in range(rounds):
                for phase, visit in phases.items():
                    # The memory of an idle process may have been reclaimed, which slows its first
                    # tokens. These tokens are greedy, and not timed.
                    again = f"again {number}"
                    free = dataclasses.replace(visit, seed=again, repeated=False, times=1)
                    for name in order:
                        done = _visit(engines[name], free)
                        if name == TABLED:
                            answered.append(done["tokens"])
                    steps: dict[str, list[float]] = {name: [] for name in order}
                    for turn in range(TURNS):
                        timed = dataclasses.replace(_part(visit), seed=f"{phase} {number} {turn}")
                        for name in order if (number + turn) % 2 == 0 else reversed(order):
                            steps[name] += _visit(engines[name], timed)["steps"]
                    for name, of_engine in steps.items():  # other load only makes steps longer
                        seconds.setdefault((name, phase), []).append(quartiles(of_engine)[0])
                say(f"startup {start + 1} of {STARTS}: round {number + 1} of {rounds}", error=True)
            tokens.append(answered)
    return Served(seconds, tokens, digests, phases)


def _part(visit: Visit) -> Visit:
    """Return the part of a visit that belongs to one turn of a round."""
    new, times = -(-visit.new_tokens // TURNS), -(-visit.times // TURNS)
    return dataclasses.replace(visit, new_tokens=new, times=times)


def _beyond_graphs(engines: Mapping[str, EngineProcess]) -> dict[str, Visit]:
    """Return a prefill that is larger than every captured graph; empty without graphs.

    The host launches each kernel of such a step, and an implementation that is faster on the device
    may be slower to launch.
    """
    largest = max(engine.graph_tokens for engine in engines.values())
    tokens = min(2 * largest, *(engine.length - 1 for engine in engines.values()))
    return {f"prefill, {tokens} tokens": Visit("", 1, tokens, 1)} if largest else {}


def _check(engine: EngineProcess, path: str | None) -> None:
    """Raise AcceptError if an engine does not use this table."""
    table = engine.report["table"]
    if (table and table["file"]) != path:
        raise AcceptError(
            f"The table is ignored: {CONFIG} overrides VLLM_FL_TABLE. Unset it, "
            "or remove the table from its file"
        )
    if table and not table["acts"]:
        raise AcceptError(table["reason"])


def _warmed_up(engine: EngineProcess, phases: Mapping[str, Visit]) -> dict[str, float]:
    """Run each phase twice on an engine; return the seconds of a step by phase."""
    found = {}
    for phase, visit in phases.items():
        for number in range(2):
            done = _visit(engine, dataclasses.replace(visit, seed=f"warm {phase} {number}"))
        found[phase] = quartiles(done["steps"])[0]
    return found


def _fitted(
    phases: Mapping[str, Visit], warm: Mapping[str, Mapping[str, float]]
) -> dict[str, Visit]:
    """Return the phases with the number of steps (new tokens, or prompts) that fits in a round."""
    fitted = {}
    for phase, visit in phases.items():
        step = min(of_engine[phase] for of_engine in warm.values())
        is_decode = visit.new_tokens > 1
        steps = min(max(round(ROUND / step), TURNS * (4 if is_decode else 1)), 64)
        if is_decode:
            fitted[phase] = dataclasses.replace(visit, new_tokens=steps)
        else:
            fitted[phase] = dataclasses.replace(visit, times=steps)
    return fitted


def _running(
    name: str, variable: str, path: str, model: str, more: Sequence[str]
) -> contextlib.AbstractContextManager[EngineProcess]:
    options = {"gpu_memory_utilization": 0.45}  # two engines on one device
    environment = {key: value for key, value in os.environ.items() if key != variable}
    if name == TABLED:
        environment[variable] = path
    return running_engine(name, model, options, environment, longest=LENGTH, arguments=more)


def _visit(engine: EngineProcess, visit: Visit) -> dict[str, Any]:
    """Run a visit; return `tokens` by prompt, and the seconds of its `steps`."""
    return engine.ask("visit", **vars(visit))
