"""Judge the wrong kernels by start and by the whole kit, and print what was said of each.

Exits with 1 where a verdict is not what the corpus says.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from . import judging
from .corpus import Wrong, corpus
from .page import PAGE, written


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="wrong_kernels", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these kernels only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="only write docs/trust.md's tables")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(written(PAGE.read_text()))
        return 0
    rows = []
    for name in options.names or corpus():
        rows.append(row := _judged(corpus()[name]))
        if not options.json:
            kit = row["kit"]["check"] or row["kit"]["outcome"]
            mark = "" if row["as_expected"] else "  NOT AS EXPECTED"
            reason = row["start"]["reason"] or row["kit"]["reason"]
            print(f"{name:36}{row['start']['outcome']:8}{kit:13}{reason[:80]}{mark}", flush=True)
    summary = _summary(rows)
    if options.json:
        print(json.dumps({"summary": summary, "kernels": rows}, indent=1))
    else:
        print(", ".join(f"{what}: {count}" for what, count in summary.items()))
    return 0 if all(row["as_expected"] for row in rows) else 1


def _judged(wrong: Wrong) -> dict[str, Any]:
    start, kit = judging.at_start(wrong.name), judging.by_kit(wrong.name)
    as_expected = (start.outcome == "named", kit.outcome == "named") == (
        wrong.start,
        wrong.kit != "",
    )
    return {
        "name": wrong.name,
        "kind": wrong.kind,
        "op": wrong.op,
        "fault": wrong.fault,
        "sees": wrong.sees,
        "why": wrong.why,
        "start": start._asdict(),
        "kit": kit._asdict(),
        "as_expected": as_expected,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    start = [row["start"]["outcome"] == "named" for row in rows]
    kit = [row["kit"]["outcome"] == "named" for row in rows]
    pairs = list(zip(start, kit, strict=True))
    return {
        "kernels": len(rows),
        "start names": sum(start),
        "kit names": sum(kit),
        "neither names": pairs.count((False, False)),
        "not as expected": sum(not row["as_expected"] for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
