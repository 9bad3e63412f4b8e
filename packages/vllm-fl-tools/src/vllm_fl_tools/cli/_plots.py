"""The plots of the benchmark report: SVG by matplotlib, with colours from the page.

Colours are CSS variables (`--ink`, `--s0`, …), which the page sets for light and dark mode. Both
modes use the same drawing. Text is not converted to paths, and ids are unique on the page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..engine.tuning_table import Figure
from ._show import UsageError

COLOURS = {
    "--paper": ("#ffffff", "#14171b"),
    "--raised": ("#f3f5f8", "#1e2329"),
    "--ink": ("#1b1f24", "#e8eaed"),
    "--muted": ("#57606a", "#a5adb6"),
    "--grid": ("#dfe3e8", "#343b43"),
    "--link": ("#0a58b0", "#7db8ff"),
    "--good": ("#0b5a2e", "#8be0ab"),
    "--good-back": ("#dcf3e4", "#12381f"),
    "--bad": ("#9b1420", "#ffb0b4"),
    "--bad-back": ("#fde3e4", "#4c161b"),
    "--open": ("#6b4700", "#f3d37a"),
    "--open-back": ("#fbeecb", "#40320c"),
    "--s0": ("#1a48cf", "#80c9ff"),
    "--s1": ("#9e2a05", "#e27631"),
    "--s2": ("#0a6f5b", "#36929a"),
    "--s3": ("#d150b1", "#b75fff"),
    "--s4": ("#af8e21", "#ffff32"),
    "--s5": ("#3b1a56", "#b3d99f"),
}
"""Colours in light and dark mode. The contrast to the background is at least 4.5 for text, and at
least 3 for lines of plots. The series `--s…` also differ clearly with red-green blindness.
"""

SERIES = 6
"""Number of colours for implementations.

Further implementations repeat colours with other markers.
"""

MARKERS = (("o", "●"), ("s", "■"), ("^", "▲"), ("D", "◆"), ("v", "▼"))
"""Markers: (matplotlib's name, character on the page)."""

DASHES = ("-", "--", ":", "-.")

STAND_INS = {f"#fd00{number:02x}": name for number, name in enumerate(COLOURS)}
"""Colours that represent the variables in matplotlib, which does not know CSS variables."""

OF = {name: colour for colour, name in STAND_INS.items()}

STYLE = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": OF["--ink"],
    "axes.labelcolor": OF["--ink"],
    "axes.edgecolor": OF["--muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "xtick.color": OF["--ink"],
    "ytick.color": OF["--ink"],
    "grid.color": OF["--grid"],
}

SIZE = 4.5, 3.0
"""Width and height in inches of 72 CSS pixels. Scaled to a phone's width, text remains readable."""


class Look(NamedTuple):
    """The look of one implementation in all plots of the page.

    `colour` is the number of the CSS variable `--s…`; `marker` and `dash` are names in matplotlib;
    `sign` is the marker as a character.
    """

    colour: int
    marker: str
    sign: str
    dash: str


LOOKS = tuple(Look(n % SERIES, *MARKERS[n % 5], DASHES[n // SERIES % 4]) for n in range(60))


def looks(impls: Sequence[str]) -> Mapping[str, Look]:
    """Return a look for each implementation of the page, assigned in the order of ids."""
    return {impl: LOOKS[n % len(LOOKS)] for n, impl in enumerate(sorted({*impls}))}


def require() -> None:
    """Raise UsageError if matplotlib cannot be imported."""
    try:
        import matplotlib.backends.backend_svg  # noqa: F401
    except Exception as error:
        raise UsageError(
            "--html draws with matplotlib, which cannot be imported "
            f"({type(error).__name__}: {error}): pip install 'vllm-fl-tools[report]'"
        ) from error


def drawing(
    key: str,
    figures: Sequence[Figure],
    serving: Mapping[int, str],
    look: Mapping[str, Look],
) -> str:
    """Return one plot as the deterministic text of an `<svg>` element; empty without values.

    Args:
        key: unique on the page.
        figures: the measurements. Each implementation is a line, interrupted at missing numbers of
            tokens. Rejections are marked at the bottom.
        serving: tokens -> the chosen implementation, which is marked.
        look: implementation -> its look.
    """
    lines: dict[str, dict[int, Figure]] = {}
    for figure in figures:
        if _value(figure):
            lines.setdefault(figure.impl, {})[figure.tokens] = figure
    if not lines:
        return ""

    import matplotlib
    from matplotlib.figure import Figure as Sheet
    from matplotlib.ticker import LogLocator

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the user's matplotlibrc would change pages
        matplotlib.rcParams.update({**STYLE, "svg.hashsalt": key})
        sheet = Sheet(figsize=SIZE, layout="constrained")
        axes = sheet.add_subplot(xlabel="tokens", ylabel=TIME)
        tokens = sorted({figure.tokens for figure in figures})
        for impl, line in sorted(lines.items()):
            _draw(axes, [line.get(t, Figure(t, impl)) for t in tokens], look[impl])
            rings = [figure for t, figure in line.items() if serving.get(t) == impl]
            places = [figure.tokens for figure in rings], [_value(f) for f in rings]
            axes.plot(*places, "o", color=OF["--ink"], markersize=8.5, fillstyle="none")
        rejected = sorted({figure.impl for figure in figures if figure.rejected})
        for number, impl in enumerate(rejected):
            where = [f.tokens for f in figures if f.impl == impl and f.rejected]
            heights, colour = [0.03 + 0.05 * number] * len(where), OF[f"--s{look[impl].colour}"]
            at_bottom = axes.get_xaxis_transform()
            axes.plot(where, heights, "x", color=colour, transform=at_bottom, clip_on=False)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        sheet.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _embedded(out.getvalue())


TIME = "µs per call"
"""Label of an axis."""


def _value(figure: Figure) -> float:
    """Return the value to draw; 0 if a logarithmic axis cannot show it."""
    value = figure.us
    return value if value is not None and 0 < value < math.inf else 0.0


def _draw(axes, line: Sequence[Figure], look: Look) -> None:  # type: ignore[no-untyped-def]
    values = [_value(figure) or math.nan for figure in line]
    known = [(f.low or v, f.high or v) for f, v in zip(line, values, strict=True)]
    spread = [(v - low, high - v) for v, (low, high) in zip(values, known, strict=True)]
    axes.errorbar(
        [figure.tokens for figure in line],
        values,
        yerr=[*zip(*spread, strict=True)],
        color=OF[f"--s{look.colour}"],
        linestyle=look.dash,
        marker=look.marker,
        markersize=4.5,
        markeredgewidth=0,
        elinewidth=1,
    )


def _embedded(svg: str) -> str:
    """Return only the `<svg>` element, with variables as colours, and without duplicate ids."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg)
    svg = re.sub(r"\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}", svg)
    return re.sub(r"#fd00[0-9a-f]{2}", lambda found: f"var({STAND_INS[found[0]]})", svg)
