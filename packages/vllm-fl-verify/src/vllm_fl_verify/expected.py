"""Expected outputs of a call, and the error of results relative to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from .guarded import taken

Deviation = tuple[float, str]
"""(maximum error relative to the tolerance, description of the problem or an empty string)."""

OutputTensors = Sequence[torch.Tensor]

COARSE = frozenset({torch.float16, torch.bfloat16})
"""Dtypes with a rounding error that dominates the error of float32 arithmetic."""

TELLING, LOOKED_AT = 64, 4096
"""Minimum number of rounded elements to determine a bias, and approximate number of sampled
elements."""

SLOPING = 1024
"""Minimum number of elements to determine a constant factor of all results."""

WITHIN_A_STEP = 0.95
"""Minimum share of results that differ from the exact number by less than a step. Only then is a
bias caused by the last rounding. A scale or a sum of the whole row causes larger errors, possibly
in one direction.
"""

Tokens = torch.Tensor | None
"""Token numbers of some rows in their batch; None for all rows."""


@dataclass(frozen=True)
class Wanted:
    """Expected output of a contract: one result of a call, or several that belong together. Its
    tensors have a row per token if the contract's results do."""

    results: ClassVar[int] = 1

    def deviation(self, results: OutputTensors, names: Sequence[str], tokens: Tokens) -> Deviation:
        """Return the error of results.

        Args:
            results: results of an implementation with the same number of rows, on any device.
            tokens: token numbers of these rows, for messages.
        """
        raise NotImplementedError

    def measured(self, results: OutputTensors) -> list[torch.Tensor]:
        """Return the errors of results as numbers on the device, without synchronisation.

        Args:
            results: results of an implementation with the same number of rows, on the device of
                these tensors.

        Returns:
            One float64 tensor per compared quantity. Its elements are: the maximum error relative
                to the tolerance; the sums of squares of the finite differences and of the exact
                numbers; the numbers of incorrect NaN and of incorrect infinite elements.

        Raises:
            NotImplementedError: this kind of output is not in `MEASURED_OUTPUTS`.
        """
        raise NotImplementedError

    def bias(self, results: OutputTensors) -> float:
        """Return the average bias of results, away from zero, in units of the last place of their
        dtype. It is about 0 for rounding to nearest, and -0.5 for truncation. Return NaN if too few
        elements are rounded, or if too few are within a step.
        """
        return math.nan

    def slope(self, results: OutputTensors) -> float:
        """Return the factor of results relative to the exact numbers, minus 1: the least-squares
        fit of a line through 0. Return NaN for few elements or a dtype that is not in `COARSE`."""
        return math.nan

    def farthest(self, results: OutputTensors, tokens: Tokens = None) -> str:
        """Describe the element with the largest error; arguments as for `deviation`."""
        return ""

    def is_empty(self, results: OutputTensors) -> bool:
        return not results[0].numel()

    def rows(self, order: torch.Tensor) -> Self:
        """Select rows, in this order. A single number for all rows is kept."""
        return self._each(lambda tensor: tensor if tensor.numel() == 1 else taken(tensor, order))

    def columns(self, order: torch.Tensor) -> Self:
        return self._each(lambda tensor: tensor.index_select(-1, order))

    def on(self, device: torch.device) -> Self:
        """Move to `device`, in a dtype that is fast on it and exact enough."""
        wide = torch.float64 if device.type == "cpu" and self._is_fine() else torch.float32

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(wide if tensor.dtype == torch.float64 else tensor.dtype).to(device)

        return self._each(moved)

    def _is_fine(self) -> bool:
        return True

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        changed = {
            name: value._each(change) if isinstance(value, Wanted) else change(value)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor | Wanted)
        }
        return replace(self, **changed)


Expected = Sequence[Wanted | None]
"""Expected outputs of a call; None for a missing one."""


@dataclass(frozen=True)
class Near(Wanted):
    """Output with a tolerance for each element.

    NaN is correct if the oracle has NaN. Infinity is correct if the oracle has infinity, or if the
    exact number exceeds the range of the dtype.

    Args:
        allowed: tolerance of each element, with the same shape.
    """

    exact: torch.Tensor
    allowed: torch.Tensor
    dtype: torch.dtype

    def deviation(self, results: OutputTensors, names: Sequence[str], tokens: Tokens) -> Deviation:
        mine = results[0].to(self.exact.device)
        share = self.share(mine)
        problem = _problem(names[0], *share, mine.numel())
        if not problem:
            return share[0], ""
        return share[0], f"{problem}; worst at {self.farthest(results, tokens)}{self._factor(mine)}"

    def _factor(self, mine: torch.Tensor) -> str:
        """Return the factor that explains all errors, for a message, or an empty string."""
        factor = self._slope(mine) + 1
        if mine.numel() < 2 or not factor or not math.isfinite(factor):
            return ""
        explains = self.share(mine.to(self.exact.dtype) / factor)[0] <= 1.0
        return f"; got/expected is {factor:.3f} everywhere" if explains else ""

    def bias(self, results: OutputTensors) -> float:
        if self.dtype not in COARSE:
            return math.nan
        every = max(1, self.exact.numel() // LOOKED_AT) | 1  # odd, to sample all columns
        exact = self.exact.reshape(-1)[::every]
        mine = results[0].reshape(-1)[::every].to(exact)
        step = step_of(exact, exact.new_ones(()), self.dtype)
        # Exclude numbers that need no rounding, and midpoints, which have two nearest numbers.
        mask = exact.isfinite() & mine.isfinite() & ((2 * exact / step) % 1 != 0)
        mask &= exact.abs() >= torch.finfo(self.dtype).smallest_normal
        beyond = ((mine - exact) * exact.sign() / step)[mask]
        if len(beyond) < TELLING or (beyond.abs() < 1).double().mean() < WITHIN_A_STEP:
            return math.nan
        return float(beyond.clamp(-1, 1).mean())

    def slope(self, results: OutputTensors) -> float:
        if self.dtype not in COARSE or self.exact.numel() < SLOPING:
            return math.nan
        return self._slope(results[0])

    def _slope(self, mine: torch.Tensor) -> float:
        mine, exact = mine.to(self.exact), self.exact
        mine, exact = (x.where(mine.isfinite() & exact.isfinite(), 0.0) for x in (mine, exact))
        return float((mine * exact).sum() / exact.square().sum()) - 1

    def farthest(self, results: OutputTensors, tokens: Tokens = None) -> str:
        mine = results[0].to(self.exact.device)
        shares = self.shares(mine)
        at = tuple(int(n) for n in torch.unravel_index(shares.argmax(), shares.shape))
        got, exact = (float(each[at]) for each in (mine.to(self.exact.dtype), self.exact))
        place = (_token(at[0], tokens), *at[1:]) if at else ()
        share = f" ({float(shares[at]):.3g}x tolerance)" if shares[at].isfinite() else ""
        return f"{place}: got {got:.6g}, expected {exact:.6g}{share}"

    def share(self, mine: torch.Tensor) -> tuple[float, int]:
        top = float((mine.to(self.exact.dtype) - self.exact).abs_().div_(self.allowed).max())
        if top <= 1.0:
            return top, 0
        # Only now consider NaN, infinity, and elements with tolerance 0, because that is slower.
        shares = self.shares(mine)
        return float(shares.max()), int((shares > 1.0).sum())

    def shares(self, mine: torch.Tensor) -> torch.Tensor:
        """Return each element's error relative to the tolerance; 0 for correct NaN and infinity."""
        error = (mine.to(self.exact.dtype) - self.exact).abs_().div_(self.allowed)
        return error.nan_to_num_(nan=math.inf, posinf=math.inf).masked_fill_(self._same(mine), 0.0)

    def _same(self, mine: torch.Tensor) -> torch.Tensor:
        return (mine == self.exact.to(mine.dtype)) | (mine.isnan() & self.exact.isnan())

    def measured(self, results: OutputTensors) -> list[torch.Tensor]:
        (mine,), exact = results, self.exact
        squared = (
            numbers.nan_to_num(0.0, 0.0, 0.0).square().sum(dtype=torch.float64)
            for numbers in (mine.to(exact.dtype) - exact, exact)
        )
        # `>` of booleans: the first and not the second.
        wrong = (which > self._same(mine) for which in (mine.isnan(), mine.isinf()))
        worst, counts = self.shares(mine).amax().double(), (each.sum().double() for each in wrong)
        return [torch.stack([worst, *squared, *counts])]

    def _is_fine(self) -> bool:
        return self.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class Same(Wanted):
    exact: torch.Tensor

    def deviation(self, results: OutputTensors, names: Sequence[str], tokens: Tokens) -> Deviation:
        mine, exact = comparable(results[0].to(self.exact.device)), self.exact
        differs = self._differs(mine)
        count = int(differs.sum())
        if not count:
            return 0.0, ""
        at = tuple(differs.nonzero()[0].tolist())
        place = (_token(at[0], tokens), *at[1:]) if at else ()
        first = f"first at {place}: got {mine[at].item()}, expected {exact[at].item()}"
        total = results[0].numel()
        return math.inf, f"{names[0]}: {count} of {total} elements differ; {first}"

    def measured(self, results: OutputTensors) -> list[torch.Tensor]:
        mine = comparable(results[0])
        differs = self._differs(mine)
        worst = torch.where(differs.any(), math.inf, 0.0).double()
        nothing = torch.zeros_like(worst)
        wrong = ((which & differs).sum().double() for which in (mine.isnan(), mine.isinf()))
        return [torch.stack([worst, nothing, nothing, *wrong])]

    def _differs(self, mine: torch.Tensor) -> torch.Tensor:
        return (mine != self.exact) & ~((mine != mine) & (self.exact != self.exact))  # NaN == NaN

    def on(self, device: torch.device) -> Self:
        return self._each(lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class Pair(Wanted):
    """Quantised values with their scale.

    Args:
        number: the expected value * scale, with the tolerance of its rounding.
        scale: expected scale.
    """

    number: Near
    scale: Near

    results: ClassVar[int] = 2

    def deviation(self, results: OutputTensors, names: Sequence[str], tokens: Tokens) -> Deviation:
        number, scale = self._number(results), results[1].to(self.number.exact.device)
        of_scale = self.scale.deviation([scale], [names[1]], tokens)
        of_number = self.number.deviation([number], [f"{names[0]} times its scale"], tokens)
        return of_scale if of_scale[1] else max(of_scale, of_number)

    def farthest(self, results: OutputTensors, tokens: Tokens = None) -> str:
        return self.number.farthest([self._number(results)], tokens)

    def _number(self, results: OutputTensors) -> torch.Tensor:
        value, scale = (each.to(self.number.exact.device) for each in results)
        wide = self.number.exact.dtype
        return value.to(wide) * spread(scale.to(wide), value.shape)

    def measured(self, results: OutputTensors) -> list[torch.Tensor]:
        scale, number = results[1], self._number(results)
        return [*self.scale.measured([scale]), *self.number.measured([number])]


@dataclass(frozen=True)
class Routed(Wanted):
    """Weights and ids of each token's experts.

    Args:
        weights: the oracle's weights, in the order of `ids`.
        ids: the oracle's ids, ascending, int64.
        scores: (tokens, experts); the scores by which experts are chosen.
        margin: two scores that differ by less are tied.
    """

    weights: Near
    ids: torch.Tensor
    scores: torch.Tensor
    margin: float

    results: ClassVar[int] = 2

    def deviation(self, results: OutputTensors, names: Sequence[str], tokens: Tokens) -> Deviation:
        weights, ids = (result.to(self.ids.device) for result in results)
        ascending, order = ids.to(torch.int64).sort(-1)
        unfit = self.unfit(ascending)
        if bool(unfit.any()):
            at = int(unfit.nonzero()[0])
            return math.inf, (
                f"{names[1]}: {int(unfit.sum())} of {len(ids)} tokens have incorrect experts; "
                f"first at token {_token(at, tokens)}: got {ascending[at].tolist()}, expected "
                f"{self.ids[at].tolist()}"
            )
        weights_off = self._weights_off(weights.gather(-1, order), ascending)
        problem = _problem(names[0], *weights_off, results[0].numel())
        return weights_off[0], problem and f"{problem}; worst: {weights_off[0]:.3g}x tolerance"

    def unfit(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a mask of tokens with incorrect experts. `ids` are ascending."""
        known = self.scores.shape[-1]
        wrong = ((ids < 0) | (ids >= known)).any(-1) | (ids.diff(dim=-1) == 0).any(-1)
        others = (ids != self.ids).any(-1)
        if not bool((others & ~wrong).any()):
            return wrong | others
        k = ids.shape[-1]
        highest = self.scores.topk(min(k + 1, known), dim=-1).values
        last, next_one = highest[:, k - 1, None], highest[:, -1, None]
        chosen = torch.zeros_like(self.scores, dtype=torch.bool)
        chosen.scatter_(-1, ids.clamp(0, known - 1), True)
        # Allowed are experts that are not certainly after the k-th. Required are those certainly
        # before the (k + 1)-th.
        may = self.scores >= last - self.margin
        must = self.scores > next_one + self.margin
        untied = (chosen & ~may).any(-1) | (must & ~chosen).any(-1)
        no_order = self.scores.isnan().any(-1)
        return wrong | (others & untied & ~no_order)

    def _weights_off(self, weights: torch.Tensor, ids: torch.Tensor) -> tuple[float, int]:
        """Return `Near.share` of the weights, in the order of ascending `ids`."""
        want = self.weights
        others = (ids != self.ids).any(-1, keepdim=True)
        if bool(others.any()):
            exact, order = want.exact.sort(-1)
            weights = torch.where(others, weights.sort(-1).values, weights)
            exact = torch.where(others, exact, want.exact)
            allowed = torch.where(others, want.allowed.gather(-1, order), want.allowed)
            want = replace(want, exact=exact, allowed=allowed)
        return want.share(weights)


@dataclass(frozen=True)
class Blocks(Wanted):
    """Rows sorted by expert in blocks, the expert of each block, and the number of used positions.

    Args:
        used: number of used positions; one element, int64.
        size: positions of a block.
        padding: row number of padding; greater than all rows.
    """

    rows_of: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor
    size: int
    padding: int

    results: ClassVar[int] = 3

    def is_empty(self, results: OutputTensors) -> bool:
        return False  # without rows, the number of used positions must still be 0

    def deviation(self, results: OutputTensors, names: Sequence[str], tokens: Tokens) -> Deviation:
        rows, experts, used = (result.to(self.used.device, torch.int64) for result in results)
        places = int(self.used)
        blocks = places // self.size
        both = rows[:places], self.rows_of[:places]
        each = self.experts[:blocks]
        compared = {
            names[2]: (used, self.used),
            names[1]: (experts[:blocks], each),
            f"the padding of {names[0]}": [(some == self.padding).long() for some in both],
            f"the rows of each expert in {names[0]}": [
                ascending(some, each, self.size) for some in both
            ],
        }
        found = (
            Same(want).deviation([mine], [name], None) for name, (mine, want) in compared.items()
        )
        return next((each for each in found if each[1]), (0.0, ""))


def ascending(rows: torch.Tensor, experts: torch.Tensor, size: int) -> torch.Tensor:
    run = experts.diff(prepend=experts[:1]).ne(0).cumsum(0).repeat_interleave(size)
    order = rows.argsort(stable=True)
    order = order[run[order].argsort(stable=True)]
    return rows[order]


def _token(row: int, places: Tokens) -> int:
    return row if places is None else int(places[row])


def _problem(name: str, share: float, count: int, total: int) -> str:
    return "" if share <= 1.0 else f"{name}: {count} of {total} elements exceed the tolerance"


def comparable(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Convert to int64, or round to `dtype` and convert to a comparable floating-point dtype."""
    if not (dtype or tensor.dtype).is_floating_point:
        return tensor.to(torch.int64)
    tensor = tensor.to(dtype or tensor.dtype)
    return tensor if tensor.element_size() >= 4 else tensor.float()


def spread(scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Expand a scale to a value of this shape; raise ValueError if the shapes do not fit."""
    if scale.numel() == 1:
        return scale.reshape(())
    if tuple(scale.shape) == tuple(shape[:-1]):
        scale = scale.unsqueeze(-1)
    fits = all(groups <= size for groups, size in zip(scale.shape, shape, strict=False))
    if scale.ndim != len(shape) or not fits:
        raise ValueError(
            f"a scale of shape {tuple(scale.shape)} does not fit a value of shape {tuple(shape)}: "
            "it needs one element, the value's shape without its last dimension, or a number of "
            "groups per dimension"
        )
    for dim, (groups, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if groups not in (1, size):
            scale = scale.repeat_interleave(-(-size // groups), dim).narrow(dim, 0, size)
    return scale


def step_of(exact: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbouring numbers of `dtype` at exact / scale, times |scale|."""
    if not dtype.is_floating_point:
        return scale.abs().expand(exact.shape)
    info = torch.finfo(dtype)
    value = (exact / scale).nan_to_num(0.0, 0.0, 0.0)
    step = torch.ldexp(torch.full_like(value, info.eps), value.frexp().exponent - 1)
    return step.clamp_(min=info.smallest_normal * info.eps) * scale.abs()
