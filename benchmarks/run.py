"""Measure all promised numbers, and print a table of figure, spread and bar.

    python benchmarks/run.py [callpath] [operators] [startup] [ranks] [engine] [shadow] [--save] …

Parts run in the order callpath, operators, startup, ranks, engine, shadow; all of them by default.
A missed bar does not change the exit status, because shared machines vary. A failed measurement
does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import callpath
import engine
import operators
import ranks
import shadow
import startup
from figures import Figure, MeasurementFailed, as_json, host, table

RESULTS = Path(__file__).resolve().parent / "results"

PARTS: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
    "callpath": callpath.measure,
    "operators": operators.measure,
    "startup": startup.measure,
    "ranks": ranks.measure,
    "engine": engine.measure,
    "shadow": shadow.measure,
}


def main() -> int:
    """Measure and print. Exit status 0: all parts were measured; 1: a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--save", action="store_true", help="write results/cpu-<date>.json")
    parser.add_argument("--rounds", type=int, help="rounds of every part (each has its default)")
    engine.add_arguments(parser)
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds takes a positive number")

    # On SIGTERM, exit through the context managers, which end the engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: list[Figure] = []
    failures: list[str] = []
    for part in [p for p in PARTS if p in options.parts or not options.parts]:
        start = time.monotonic()
        print(f"{part} …", file=sys.stderr, flush=True)
        try:
            measured = PARTS[part](options)
        except MeasurementFailed as failure:
            failures.append(f"{part}: {failure}")
            continue
        print(f"{part}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        figures += measured
        if options.save:
            _save(part, measured)
    print(table(figures))
    print("`met` and `missed` by the median; `open`: the bar lies between the quartiles.")
    for failed in failures:
        print(f"NOT MEASURED: {failed}")
    return 1 if failures else 0


def _save(part: str, measured: list[Figure]) -> None:
    """Write the part into the file of today, and keep parts of other runs."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"cpu-{time.strftime('%Y-%m-%d')}.json"
    saved = json.loads(file.read_text()) if file.exists() else {}
    saved[part] = {"host": host(), "figures": [as_json(f) for f in measured]}
    file.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n")
    print(f"saved to benchmarks/results/{file.name}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
