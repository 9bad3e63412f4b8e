"""Measure the shadow check in vLLM's CPU engine on Qwen3-0.6B's shapes, eager and compiled.

Engines of one plan, with VLLM_FL_SHADOW unset, 0, 0.01 and 1, are loaded together and decode one at
a time, with the model of engine.py. A visit has 100 steps, of which a rate of 0.01 samples one; its
speed is that of all steps, while engine.py uses the fastest quarter. `a step` compares the fastest
quarters, which are unsampled steps at 0.01. The engine with rate 1 shows the cost of a sampled
step; the cost of 1 % follows from it if the machine's noise is larger.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine import MODEL, REFERENCE, Engine, Variant, Workload, dtype_of, running
from figures import Figure, figure, ratios

__all__ = ["measure"]

ROUNDS = 5
UNSET, EVERY_STEP = "unset", "1"
RATES = (UNSET, "0", "0.01", EVERY_STEP)
"""Values of VLLM_FL_SHADOW."""

PLAN = {**REFERENCE, "VLLM_FL_PREFLIGHT": "off"}

DECODE = Workload("decode, batch 8", 8, 1, 100)
FEW = 12
"""Steps of a visit of the engine that samples every step."""


def measure(options: argparse.Namespace) -> list[Figure]:
    """Measure the shadow check."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        for mode in options.modes:
            with contextlib.ExitStack() as stack:
                engines: dict[str, Engine] = {}
                for rate in RATES:
                    sampling = {} if rate == UNSET else {"VLLM_FL_SHADOW": rate}
                    variant = Variant({**PLAN, **sampling}, ours=True)
                    # The plan's digest is the same, so all engines reuse the first one's cache.
                    cache = Path(folder) / mode
                    start = running(
                        f"shadow {rate}", variant, mode, model, dtype_of(options), cache
                    )
                    engines[rate] = stack.enter_context(start)
                found += _figures(mode, _visited(mode, engines, options.rounds or ROUNDS))
    return found


def _visited(mode: str, engines: Mapping[str, Engine], rounds: int) -> dict[str, list[list[float]]]:
    """Rate -> seconds of each step, by visit."""
    visits: dict[str, list[list[float]]] = {rate: [] for rate in engines}
    names = list(engines)
    for engine in engines.values():
        engine.steps(DECODE.prompts(-1), FEW)
    for number in range(rounds):
        turn = number % len(names)
        for rate in (*names[turn:], *names[:turn]):
            engines[rate].steps(DECODE.prompts(number - 1000), 2)
            new = FEW if rate == EVERY_STEP else DECODE.new_tokens
            visits[rate].append(engines[rate].steps(DECODE.prompts(number), new))
        last = _figures(mode, {rate: found[-1:] for rate, found in visits.items()})
        said = ", ".join(f"{f.what.partition(': ')[2]}: {f.median:.3f}" for f in last)
        # Print the figures of every round, in case the run is interrupted.
        print(f"  round {number + 1} of {rounds}: {said}", file=sys.stderr, flush=True)
    return visits


def _figures(mode: str, visits: Mapping[str, list[list[float]]]) -> list[Figure]:
    whole = {rate: [1 / statistics.fmean(v) for v in found] for rate, found in visits.items()}
    step = {rate: [1 / _quarter(v) for v in found] for rate, found in visits.items()}
    title = f"shadow, {mode}, {DECODE.name}:"
    speeds = [DECODE.counted * speed for speed in whole[UNSET]]
    slower = ratios(step[UNSET], step[EVERY_STEP])
    one_percent = [1 / (1 + 0.01 * (times - 1)) for times in slower]
    return [
        figure(f"{title} unset", "tokens/s", speeds),
        *(
            figure(f"{title} {rate} / unset, {what}", "", ratios(speed[rate], speed[UNSET]))
            for rate in ("0", "0.01")
            for what, speed in (("whole visits", whole), ("a step", step))
        ),
        figure(f"{title} a sampled step takes, over one that is not", "", slower),
        figure(f"{title} 0.01 / unset, from that", "", one_percent, at_least=0.95),
    ]


def _quarter(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]
