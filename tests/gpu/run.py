"""Tests that need a GPU, as a script: a line per case, and JSON under $OUT.

    python tests/gpu/run.py [PART …]        all parts: contracts operators engines attention experts
                                            fused_experts ranks graphs flagcx sleep warmup
    python tests/gpu/run.py real            a real model, if its folder exists: cases_real.py
    python tests/gpu/run.py ranks flagcx --ranks 4      engines of four ranks, on four GPUs
    python tests/gpu/run.py ranks flagcx --ranks 4 --cpu        the same rehearsed on the CPU

Exits with 1 if a case failed, and with 0 and the reason if there is no NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).parent)]

import cases_attention  # noqa: E402 (in this file's folder)
import cases_contracts  # noqa: E402
import cases_engines  # noqa: E402
import cases_experts  # noqa: E402
import cases_flagcx  # noqa: E402
import cases_fused_experts  # noqa: E402
import cases_graphs  # noqa: E402
import cases_operators  # noqa: E402
import cases_ranks  # noqa: E402
import cases_real  # noqa: E402
import cases_sleep  # noqa: E402
import cases_warmup  # noqa: E402
from engine_run import end_all  # noqa: E402
from hosts import Host  # noqa: E402

PARTS: dict[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    "contracts": cases_contracts.cases,
    "operators": cases_operators.cases,
    "engines": cases_engines.cases,
    "attention": cases_attention.cases,
    "experts": cases_experts.cases,
    "fused_experts": cases_fused_experts.cases,
    "graphs": cases_graphs.cases,
    "sleep": cases_sleep.cases,
    "warmup": cases_warmup.cases,
    "real": cases_real.cases,
}

OF_RANKS: dict[str, Callable[[Path, Host], Iterator[tuple[str, str]]]] = {
    "ranks": cases_ranks.cases,
    "flagcx": cases_flagcx.cases,
}
"""Parts with engines of several ranks; they can be rehearsed on the CPU."""

NAMED = {"real"}
"""Parts that run only on request."""


@dataclass(frozen=True)
class Outcome:
    """One case; `problem` is "" on success."""

    part: str
    case: str
    problem: str
    seconds: float


def no_gpu() -> str | None:
    """Why no part can run here, or None."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if torch.cuda.device_count() == 0:
        return "no NVIDIA GPU is visible"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = [*PARTS, *OF_RANKS]
    parser.add_argument("parts", nargs="*", help=", ".join(known))
    parser.add_argument("--ranks", type=int, default=2, help="of an engine, in ranks and flagcx")
    parser.add_argument("--cpu", action="store_true", help="rehearse ranks and flagcx on the CPU")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one such engine")
    parser.add_argument("--at-once", type=int, help="such engines side by side; default: 12, or 1")
    parser.add_argument("-k", dest="only", default="", help="of these: cases with this in the name")
    options = parser.parse_args()
    rehearsed = OF_RANKS if options.cpu else known
    chosen = options.parts or [part for part in rehearsed if part not in NAMED]
    if unknown := set(chosen) - set(rehearsed):
        on = " on the CPU" if options.cpu else ""
        parser.error(f"no such part{on}: {', '.join(sorted(unknown))}")
    if not 2 <= options.ranks <= 8:
        parser.error("--ranks takes 2 to 8")
    if not options.cpu and (reason := no_gpu()):
        print(f"skipped: {reason}")
        return 0
    at_once = options.at_once or (1 if options.cpu else 12)
    host = Host(options.ranks, options.cpu, options.limit, options.only, at_once)
    parts = {**PARTS, **{part: partial(cases, host=host) for part, cases in OF_RANKS.items()}}
    signal.signal(signal.SIGTERM, lambda *_: (end_all(), os._exit(1)))  # as at the end of a limit
    out = Path(os.environ.get("OUT", ".")) / "tests-gpu.json"
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            start = time.perf_counter()
            try:
                for case, problem in parts[part](Path(folder)):
                    seconds = time.perf_counter() - start
                    outcomes.append(Outcome(part, case, problem, seconds))
                    print(f"{seconds:7.1f} s  {problem or 'ok'}  [{part}] {case}", flush=True)
                    out.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
                    start = time.perf_counter()
            except Exception as error:  # one part must not hide the others
                problem = f"{type(error).__name__}: {error}"
                outcomes.append(Outcome(part, "(the part itself)", problem, 0.0))
                print(f"[{part}] {problem}", flush=True)
    out.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    failed = sum(1 for outcome in outcomes if outcome.problem)
    print(f"{len(outcomes)} cases, {failed} failed; {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
