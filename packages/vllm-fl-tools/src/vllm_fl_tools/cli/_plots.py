"""The plots of a report's page: SVG that takes its colours from the page, by matplotlib.

Colours are CSS variables (`--ink`, `--s0`, …), which the page sets for light and for dark: one
drawing serves both. Words stay words, and ids are unique on the page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_fl.cli.common import UsageError

__all__ = ["LOOKS", "Look", "Point", "drawing", "looks", "require"]

SERIES = 6
"""Colours that implementations take. A later one repeats a colour with another marker and dash."""

MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}
"""matplotlib's name -> the character that the page shows."""

DASHES = ("-", "--", ":", "-.")

INK, MUTED, GRID = "#fd0001", "#fd0002", "#fd0003"
"""Stand-ins: matplotlib knows no variables, so that they are put in afterwards."""

VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"}

WIDTH, HEIGHT = 4.5, 3.0
"""Inches of 72 CSS pixels: on a phone it is scaled down by little, and its words stay readable."""


@dataclass(frozen=True)
class Look:
    """How one implementation looks, in every plot of the page.

    Args:
        colour: the number of the CSS variable `--s…`.
        marker: matplotlib's name of it.
        dash: matplotlib's name of the line.
    """

    colour: int
    marker: str
    dash: str

    @property
    def sign(self) -> str:
        """The marker as a character."""
        return MARKERS[self.marker]


LOOKS = tuple(
    Look(number % SERIES, tuple(MARKERS)[number % len(MARKERS)], DASHES[number // SERIES % 4])
    for number in range(SERIES * len(MARKERS) * len(DASHES) // 2)
)


@dataclass(frozen=True)
class Point:
    """One value of a line; `low` and `high` are its quartiles, `serves` marks it."""

    tokens: int
    value: float
    low: float | None = None
    high: float | None = None
    serves: bool = False


def looks(impls: Sequence[str]) -> Mapping[str, Look]:
    """A look for each implementation of the page, by the order of their ids."""
    return {impl: LOOKS[n % len(LOOKS)] for n, impl in enumerate(sorted({*impls}))}


def require() -> None:
    """Raise UsageError where matplotlib is missing or does not work."""
    try:
        import matplotlib.backends.backend_svg  # noqa: F401
    except Exception as error:
        raise UsageError(
            "--html draws with matplotlib, which cannot be imported "
            f"({type(error).__name__}: {error}): pip install 'vllm-fl-tools[report]'"
        ) from error


def drawing(
    key: str,
    lines: Mapping[str, Sequence[Point]],
    rejected: Mapping[str, Sequence[int]],
    look: Mapping[str, Look],
    label: str,
    log: bool,
) -> str:
    """One plot as the text of an `<svg>` element, the same for the same arguments.

    Args:
        key: begins every id in it.
        lines: implementation -> its values. At the tokens of other lines that it has no value for,
            its line is interrupted.
        rejected: implementation -> the tokens at which it was not timed, marked at the bottom.
        look: implementation -> how it is drawn.
        label: of the y axis.
        log: whether the y axis is logarithmic.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a matplotlibrc of the user's would change pages
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": key,
                "font.family": ["DejaVu Sans"],
                "font.size": 9,
                "text.color": INK,
                "axes.labelcolor": INK,
                "axes.edgecolor": MUTED,
                "xtick.color": MUTED,
                "ytick.color": MUTED,
                "xtick.labelcolor": INK,
                "ytick.labelcolor": INK,
                "axes.linewidth": 0.8,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "grid.color": GRID,
                "grid.linewidth": 0.7,
            }
        )
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(True, which="major")
        tokens = sorted(
            {p.tokens for line in lines.values() for p in line}.union(*rejected.values())
        )
        for impl, line in lines.items():
            _draw(axes, tokens, line, look[impl])
        for number, (impl, where) in enumerate(rejected.items()):
            axes.plot(
                where,
                [0.03 + 0.05 * number] * len(where),
                linestyle="none",
                marker="x",
                markersize=5,
                markeredgewidth=1.4,
                color=_colour(look[impl].colour),
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )
        _scale(axes, tokens, lines, log)
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True)
    return _embedded(out.getvalue(), key)


def _draw(axes, tokens: Sequence[int], line: Sequence[Point], look: Look) -> None:  # type: ignore[no-untyped-def]
    at = {p.tokens: p for p in line}
    colour = _colour(look.colour)
    values = [at[t].value if t in at else math.nan for t in tokens]
    axes.plot(
        tokens,
        values,
        color=colour,
        linestyle=look.dash,
        linewidth=1.5,
        marker=look.marker,
        markersize=4.5,
        markeredgewidth=0,
    )
    spread = [(p.value - (p.low or p.value), (p.high or p.value) - p.value) for p in line]
    axes.errorbar(
        [p.tokens for p in line],
        [p.value for p in line],
        yerr=[*zip(*spread, strict=True)],
        fmt="none",
        ecolor=colour,
        elinewidth=1,
    )
    rings = [p for p in line if p.serves]
    axes.plot(
        [p.tokens for p in rings],
        [p.value for p in rings],
        linestyle="none",
        marker="o",
        markersize=8.5,
        markerfacecolor="none",
        markeredgecolor=INK,
        markeredgewidth=1,
    )


def _scale(axes, tokens: Sequence[int], lines: Mapping[str, Sequence[Point]], log: bool) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log", base=2)
    exponents = range(math.floor(math.log2(tokens[0])), math.ceil(math.log2(tokens[-1])) + 1)
    ticks = [2**n for n in exponents[:: 1 + len(exponents) // 8]]
    axes.set_xlim(tokens[0] / 1.3, tokens[-1] * 1.3)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    if log:
        axes.set_yscale("log")
        values = [p.value for line in lines.values() for p in line]
        decades = math.log10(max(values) / min(values))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
        axes.margins(y=0.12)
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g}" if log else "{x:g} %")
    axes.minorticks_off()


def _colour(number: int) -> str:
    return f"#fe00{number:02x}"


def _embedded(svg: str, key: str) -> str:
    """The `<svg>` element alone: no metadata, variables for colours, and shorter numbers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r"<(metadata|style).*?</\1>\s*", "", svg, flags=re.S)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', _opening, svg, count=1, flags=re.S)
    used = {*re.findall(r"#([\w-]+)\)", svg), *re.findall(r'href="#([\w-]+)"', svg)}

    def identity(found: re.Match[str]) -> str:
        return f' id="{key}-{found[1]}"' if found[1] in used else ""

    svg = re.sub(r' id="([^"]*)"', identity, svg)
    svg = re.sub(r"url\(#", f"url(#{key}-", svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{key}-', svg)
    svg = re.sub(r"#fe00([0-9a-f]{2})", lambda found: f"var(--s{int(found[1], 16)})", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), svg)
    return svg.strip()


def _opening(found: re.Match[str]) -> str:
    return f'<svg viewBox="{found[1]}" aria-hidden="true" focusable="false">'
