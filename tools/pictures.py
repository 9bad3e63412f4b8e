"""Draw docs/pictures: a plan and a plot of a benchmark report, for light and for dark pages.

    python tools/pictures.py

Both show real output. The plan is that of `vllm-fl explain --mode eager`, so run this script in an
environment with the example vllm-fl-cpu, vllm-fl-reference and `vllm-fl-tools[report]`. The plot is
cut from `vllm-fl show --html` of the tuning table in benchmarks/results.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from docs_site import ROOT, stored_table

from vllm_fl_tools.cli._plots import COLOURS, looks

FOLDER = ROOT / "docs" / "pictures"
OPS = ("rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding", "reshape_and_cache")
FONTS = "system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif"
WIDTH = 880


def main() -> None:
    pictures = {"plan": [*plan_picture(candidates())], "report": [*report_picture(*report_plot())]}
    for name, lines in pictures.items():
        text = "\n".join(lines) + "\n"
        for number, page in enumerate(("light", "dark")):
            (FOLDER / f"{name}-{page}.svg").write_text(coloured(text, number))


def coloured(text: str, number: int) -> str:
    """Replace CSS variables by their colours for light (0) or dark (1). `<img>` inherits none."""
    return re.sub(r"var\((--[\w-]+)\)", lambda found: COLOURS[found[1]][number], text)


def vllm_fl(*arguments: str) -> str:
    command = [sys.executable, "-m", "vllm_fl_tools.cli", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def candidates() -> dict[str, tuple[list[str], str]]:
    """Op -> its candidates for an eager engine in order, and the layer or operator it replaces."""
    found = {}
    for op in OPS:
        answer = json.loads(vllm_fl("explain", op, "--mode", "eager", "--json"))
        (mode,) = answer["modes"]
        taken = [each for each in mode["candidates"] if each["status"] != "rejected"]
        ids = [each["impl_id"].replace("stock.vllm", "stock") for each in taken]
        ids = ids[: ids.index("stock") + 1]  # stock accepts every call
        layer = answer["places"][0].partition(",")[0].removeprefix("layer ")
        found[op] = ids, layer.removeprefix("operator ")
    return found


def plan_picture(plan: Mapping[str, tuple[Sequence[str], str]]) -> Iterator[str]:
    """Draw one row per op: the layer or operator, and its candidates in order."""
    top, step, left, first, chip = 84, 46, 20, 330, 150
    height = top + step * len(plan) + 56
    yield opening(WIDTH, height, "A plan: vLLM's ops and their implementations")
    yield words(left, 34, "what vLLM runs", size=13, fill="--muted")
    yield words(first, 34, "the plan", size=13, fill="--muted")
    yield words(first + chip + 24, 34, "fallbacks for unsupported calls", size=13, fill="--muted")
    yield f'<path d="M20 50H{WIDTH - 20}" stroke="var(--grid)"/>'
    for number, (op, (ids, layer)) in enumerate(plan.items()):
        y = top + step * number
        yield words(left, y - 3, op, weight=600)
        yield words(left, y + 14, layer, size=11.5, fill="--muted")
        yield arrow(first - 56, y, 44)
        for place, impl in enumerate(ids):
            x = first + (chip + 24) * place
            chosen = place == 0
            ground, ink = ("--good-back", "--good") if chosen else ("--raised", "--ink")
            edge = "--good" if chosen else "--grid"
            yield (
                f'<rect x="{x}" y="{y - 15}" width="{chip}" height="30" rx="6" '
                f'fill="var({ground})" stroke="var({edge})"/>'
            )
            weight = 600 if chosen else 400
            yield words(x + chip / 2, y + 5, impl, fill=ink, anchor="middle", weight=weight)
            if not chosen:
                yield arrow(x - 20, y, 14)
    yield words(
        left,
        height - 20,
        "An eager engine on a CPU. vendor.cpu is the example vllm-fl-cpu, reference.torch is plain "
        "PyTorch, stock is vLLM's code.",
        size=12,
        fill="--muted",
    )
    yield "</svg>"


def report_plot() -> tuple[str, list[str]]:
    """The first plot of the HTML report, and the sorted names of its implementations."""
    table = stored_table()
    with tempfile.TemporaryDirectory() as folder:
        file, page = Path(folder) / "table.json", Path(folder) / "page.html"
        file.write_text(json.dumps({"schema": 1, "table": table}))
        vllm_fl("show", str(file), "--html", str(page))
        plot = re.search(r"<svg.*?</svg>", page.read_text(), re.S)
    assert plot
    (op,) = table["ops"].values()
    return plot[0], sorted({figure["impl"] for figure in op["figures"]})


def report_picture(plot: str, drawn: Sequence[str]) -> Iterator[str]:
    """Draw the plot with a title and a legend."""
    look = looks(drawn)
    yield opening(600, 470, "A plot of vllm-fl show --html: µs of a call by tokens")
    yield words(24, 36, "qk_norm_rope of Qwen3-8B on one H200, 2026-11-22", weight=600)
    x = 24
    for impl in drawn:
        yield f'<circle cx="{x + 5}" cy="60" r="5" fill="var(--s{look[impl].colour})"/>'
        yield words(x + 16, 65, impl, size=13)
        x += 32 + round(7.4 * len(impl))
    yield words(x, 65, "◯ in use", size=13)
    box = re.search(r'viewBox="([^"]*)"', plot)
    assert box
    inner = plot[plot.index(">") + 1 :]
    yield f'<svg x="14" y="84" width="572" height="372" viewBox="{box[1]}">'
    yield f'<g font-size="9">{inner[: inner.rindex("</svg>")]}</g></svg>'
    yield "</svg>"


def opening(width: int, height: int, about: str) -> str:
    """The start of an SVG with its own background, readable on pages of any colour."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" width="{width}" height="{height}" '
        f'font-family="{FONTS}"><title>{escape(about)}</title>'
        f'<rect width="100%" height="100%" rx="8" fill="var(--paper)"/>'
    )


def arrow(x: float, y: float, length: float) -> str:
    return f'<path d="M{x:g} {y:g}h{length:g}m-5 -4l5 4l-5 4" fill="none" stroke="var(--muted)"/>'


def words(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 14,
    fill: str = "--ink",
    anchor: str = "start",
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="var({fill})" '
        f'text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    main()
