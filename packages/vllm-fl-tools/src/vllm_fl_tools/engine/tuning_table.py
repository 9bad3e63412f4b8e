"""The result of `vllm-fl tune`: figures, choices, and the settings file of the choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_fl.settings.policy import REST, Mode, Selector

KEEP_DEFAULT = "default"
"""Value in a row if no implementation is faster than the default."""

STOCK_NAME = "stock"
"""Name of vLLM's implementation of an op, in results and options."""


@dataclass(frozen=True)
class Figure:
    """The measurement of one implementation of an op at one number of tokens.

    An op that a model calls in several forms (a norm with and without a residual) is measured in
    each; times are their sum.

    Args:
        tokens: of the call.
        impl: the implementation's id, or `stock`.
        us: median time of a call, µs; None if it was not timed.
        low, high: quartiles, µs.
        n: number of timings.
        ratio: the default's time divided by this time: the median over pairs of consecutive
            measurements. Above 1, the implementation is faster than the default.
        ratio_low: the lower quartile of these ratios.
        slower: why the implementation gets no row: the form in which it is slower than the default,
            with the ratio; or a longer launch, at sizes without a captured graph. Empty otherwise.
            It is unknown how often a model calls each form.
        rejected: why it was not timed: an incorrect result, with the worst element, or an
            unsupported call. Empty otherwise.
    """

    tokens: int
    impl: str
    us: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    ratio: float | None = None
    ratio_low: float | None = None
    slower: str = ""
    rejected: str = ""


@dataclass(frozen=True)
class Row:
    """The choice for calls with at most `up_to` tokens, and more than in the previous row.

    `impl` is an implementation's id, `stock`, or `default`.
    """

    up_to: int
    impl: str


@dataclass(frozen=True)
class TunedOp:
    """The result for one op.

    Args:
        default: the implementation's id without a tuning table, or `stock`.
        rows: in ascending order. Calls with more tokens than in the last row use the default.
        figures: the measurements.
    """

    default: str
    rows: tuple[Row, ...]
    figures: tuple[Figure, ...] = ()

    @property
    def choices(self) -> set[str]:
        """The implementations that were faster than the default somewhere."""
        return {row.impl for row in self.rows} - {KEEP_DEFAULT}

    def chosen(self, tokens: int) -> str:
        impl = next((row.impl for row in self.rows if tokens <= row.up_to), KEEP_DEFAULT)
        return self.default if impl == KEEP_DEFAULT else impl

    @property
    def best(self) -> Figure | None:
        """The figure of the choice with the largest ratio."""
        chosen = (f for f in self.figures if f.ratio and f.impl == self.chosen(f.tokens))
        return max(chosen, key=lambda figure: figure.ratio or 0.0, default=None)


@dataclass(frozen=True)
class Tuned:
    """The result of one run.

    Args:
        mode: how the engine runs the model.
        dtype: torch's name of the model's dtype.
        sizes: of the model, on one rank.
        model: the user's name of the model.
        date: ISO 8601, UTC.
        seconds: duration of the measurement.
        holds: contains `vllm`, `device` and `distributions`, as in the settings file.
        ops: op -> its result.
    """

    mode: Mode
    dtype: str
    sizes: Mapping[str, float]
    model: str
    date: str
    seconds: float
    holds: Mapping[str, Any]
    ops: Mapping[str, TunedOp]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Tuned:
        """Read the `table` that `vllm-fl tune --json` printed.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: the data has another structure.
        """
        ops = {}
        for op, entry in data["ops"].items():
            rows = tuple(Row(**row) for row in entry["rows"])
            figures = tuple(Figure(**figure) for figure in entry["figures"])
            ops[op] = TunedOp(entry["default"], rows, figures)
        return cls(**{**data, "ops": ops})

    @property
    def text(self) -> str:
        """The settings file for VLLM_FL_TABLE."""
        import yaml

        device = self.holds["device"]
        ops = dict(self._orders())
        file: dict[str, Any] = {"holds": self.holds}
        file["devices"] = [{"name": device, "op_backends": ops}] if ops else []
        model = ascii(self.model)[1:-1]
        return (
            f"# Written by `vllm-fl tune` for {model}, {self.dtype}, in {self.seconds:.0f} s.\n"
            "# Use it with VLLM_FL_TABLE. Ops that are not listed here keep their orders.\n"
            + yaml.safe_dump(file, sort_keys=False, allow_unicode=True)
        )

    def _orders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for op, tuned in self.ops.items():
            if not tuned.choices:
                continue
            found = [(f"<={row.up_to}", tuned.chosen(row.up_to)) for row in tuned.rows]
            rows = {key: _token(impl) for key, impl in [*found, (REST, tuned.default)]}
            best = tuned.best
            what = f"{best.impl} by {tuned.default} at {best.tokens} tokens" if best else "this op"
            measured = {
                "date": self.date[:10],
                "device": self.holds["device"],
                "ratio": best.ratio if best else 1.0,
                "what": what,
            }
            yield op, {self.mode: rows, "measured": measured}


def _token(impl: str) -> str:
    return STOCK_NAME if impl == STOCK_NAME else str(Selector("impl", impl))
