"""Write docs/support-matrix.md from the runs of `vllm-fl verify --json` in docs/support.

    python tools/support_matrix.py

tests/test_docs.py compares the page with the runs. Each file in docs/support becomes a section of
the page. `nox -s support` creates the files of all runs that do not need a device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RUNS", "page"]

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 10
"""Maximum sample names in a cell; the run's file lists all."""

RUNS = ROOT / "docs" / "support"
PAGE = ROOT / "docs" / "support-matrix.md"

LAYOUT = re.compile(r", \w+ (numbers apart|transposed in memory)$")
"""Suffix of a sample's name for another memory layout of one of its arguments."""

INTRODUCTION = """\
# Support matrix

This page says which implementation of which operator was right, on which device, in which dtype.
`python tools/support_matrix.py` makes it from the runs in [support](support). How a vendor adds one
stands in [kit.md](kit.md#tell-users-what-is-supported).

A cell says

- how many samples of the contract were taken;
- the worst error as a share of the contract's tolerance, of which 1 is the limit;
- whether a row gives the same bits in any batch, in the runs that have measured it (an engine can
  require it: `VLLM_FL_REQUIRE=batch_invariant`);
- where it was measured, the median time of one call of Qwen3-0.6B's sizes, from Python until the
  device is done.

A sample that is not taken is refused with a reason, and another implementation takes the call.
Times of different runs do not compare.

Each section is one run, on the day and with the versions that it names. An operator or an
implementation that came later is missing there until the run is made again.
"""


def page(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Render the page.

    Args:
        runs: file name -> output of `vllm-fl verify --json`.

    Raises:
        ValueError: a file has another schema, lacks results, or contains only a part of a run.
    """
    lines = [INTRODUCTION]
    lines += [_row("run", "made on", "dtypes", "same bits in any batch"), _row(*["---"] * 4)]
    sections = []
    for name, run in sorted(runs.items()):
        if run.get("schema") != 1 or not run.get("results"):
            raise ValueError(f"{name} is no output of `vllm-fl verify --json` with a result")
        if not run.get("complete", True):
            raise ValueError(f"{name} is of a run that was cut short")
        lines.append(_summary(name, run))
        sections += ["", *_section(name, run)]
    return "\n".join([*lines, *sections]) + "\n"


def _summary(name: str, run: Mapping[str, Any]) -> str:
    """A table row: number of implementations with batch-independent bits in all dtypes."""
    same: dict[tuple[str, str], list[bool]] = {}
    for result in run["results"]:
        found = result.get("determinism") or {}  # missing in older runs
        if found.get("batches") is not None:
            same.setdefault((result["op"], result["impl_id"]), []).append(found["batches"])
    said = f"{sum(map(all, same.values()))} of {len(same)}" if same else "not measured"
    dtypes = ", ".join(dict.fromkeys(r["dtype"] for r in run["results"]))
    return _row(f"[{name}](support/{name})", run["date"][:10], dtypes, said)


def _section(name: str, run: Mapping[str, Any]) -> Iterator[str]:
    environment = run["environment"]
    device = environment["device"]
    where = f"{device['name']} ({device['type']})"
    if environment["emulated"]:
        yield f"## Emulated: {_text(environment['emulated'])}"
        yield ""
        yield (
            f"**No such hardware was used.** Its stand-in ran on {_text(where)}. "
            "Where bits are the same is said of that alone."
        )
    else:
        yield f"## {_text(where)}"
    versions = ", ".join(f"{k} {v}" for k, v in environment["distributions"].items())
    yield ""
    python = environment["python"]
    yield f"[{name}](support/{name}), {run['date'][:10]}: Python {python}, {versions}."
    yield ""
    dtypes = list(dict.fromkeys(r["dtype"] for r in run["results"]))
    yield _row("operator", "implementation", *dtypes)
    yield _row(*["---"] * (2 + len(dtypes)))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for result in sorted(run["results"], key=lambda r: (r["op"], r["impl_id"])):
        of_one = rows.setdefault((result["op"], result["impl_id"]), {})
        of_one[result["dtype"]] = _cell(result)
    for (op, impl_id), cells in rows.items():
        yield _row(f"`{op}`", f"`{impl_id}`", *(cells.get(dtype, "–") for dtype in dtypes))
    if refusals := list(_refusals(run["results"])):
        yield ""
        yield "Not taken in some dtype, in other layouts neither:"
        yield ""
        yield _row("operator", "implementation", "samples")
        yield _row(*["---"] * 3)
        yield from refusals


def _cell(result: Mapping[str, Any]) -> str:
    samples = result["samples"]
    total = sum(samples.values())
    bad = samples["wrong"] + samples["raised"]
    if bad:
        return f"**{bad} of {total} wrong**"
    if not samples["ok"]:
        return "refused"
    parts = [f"{samples['ok']} of {total}", f"{result['worst']:.2f}"]
    same = result.get("determinism") or {}  # missing in older runs
    if same.get("runs") is False:
        parts.append("other bits in each run")
    elif same.get("batches") is not None:
        parts.append("any batch" if same["batches"] else "bits differ by batch")
    if result.get("call") is not None:  # older runs have times
        parts.append(f"{result['call']['microseconds']:.0f} µs")
    return ", ".join(parts)


def _refusals(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Table rows of refused samples; other layouts of a refused sample are omitted."""
    samples: dict[tuple[str, str], dict[str, None]] = {}
    for result in results:
        for finding in result["findings"]:
            if finding["status"] == "refused":
                found = samples.setdefault((result["impl_id"], result["op"]), {})
                found[finding["sample"]] = None
    for (impl_id, op), found in sorted(samples.items()):
        names = [name for name in found if LAYOUT.sub("", name) not in found.keys() - {name}]
        further = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        shown = "; ".join(map(_text, names[:SHOWN]))
        yield _row(f"`{op}`", f"`{impl_id}`", shown + further)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    text = " ".join(text.split())
    for mark in "\\`*_|<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page({p.name: json.loads(p.read_text("utf-8")) for p in RUNS.glob("*.json")}))
