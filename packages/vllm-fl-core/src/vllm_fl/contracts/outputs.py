"""The ways to compare an op's results with the reference results of its oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tolerance:
    """The largest error of a correct result: |got - want| <= atol + rtol * |want|.

    Args:
        rtol: the relative part, without unit.
        atol: the absolute part, in the units of the result.
        reason: the reason for these numbers, with their source. It is ignored when tolerances are
            compared.
    """

    rtol: float
    atol: float
    reason: str = field(compare=False)


@dataclass(frozen=True)
class Within:
    """One result that has every element within the tolerance.

    Args:
        tolerances: name of the result's dtype (`float32`, `bfloat16`) -> its tolerance; if empty,
            the contract's tolerances apply.
    """

    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: MappingProxyType({}))

    results: ClassVar[int] = 1


@dataclass(frozen=True)
class Exact:
    """One result that equals the reference result in every element: ids, indices, block tables.

    The oracle returns integers of any width, or bools. If the op only moves floating-point numbers,
    the result must equal the reference result rounded to the result's dtype.
    """

    results: ClassVar[int] = 1


@dataclass(frozen=True)
class QuantisedPair:
    """Two results, a quantised value and its scale, compared as value * scale.

    The oracle returns (the exact value * scale, not rounded; the scale), both in fp64. It saturates
    if the op's result does. The value has an integer or floating-point dtype (`int8`,
    `float8_e4m3fn`) with one element for each number. Packed dtypes are not supported. There is one
    scale for all numbers (in any shape of one element), for each row (the value's shape without its
    last dimension), or for each group. Groups divide each dimension of the value into equal parts,
    but the last part may be smaller.

    Args:
        steps: the largest error of value * scale, in steps between adjacent numbers of the value's
            dtype. 1.0 allows every rounding mode, 0.5 only rounding to nearest. The tolerance of
            the scale is added to this error.
        tolerances: the tolerances of the scale; if empty, the contract's tolerances apply.
    """

    steps: float = 1.0
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: MappingProxyType({}))

    results: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.steps) and self.steps > 0):
            raise ValueError(f"QuantisedPair: steps must be finite and positive, got {self.steps}")


@dataclass(frozen=True)
class Routing:
    """Two results of shape (tokens, k): the weights of each token's experts, and their ids.

    A token's experts may be in any order. They must be the oracle's experts if the k-th and
    (k+1)-th highest scores differ by more than `margin`. Otherwise the experts with scores within
    the margin are tied, and any of them may be chosen. Each expert's weight must be within the
    tolerance. If the oracle chose other tied experts, the token's weights are sorted and then
    compared.

    Args:
        scores: the contract's parameters -> (tokens, experts), fp64; the oracle chooses the k
            highest.
        margin: the largest difference at which two scores of magnitude 1 count as equal. It
            must exceed the error of scores that are computed in fp32. Like `atol`, it is multiplied
            by `Sample.scale`.
        tolerances: the tolerances of the weights; if empty, the contract's tolerances apply.
    """

    scores: Callable[..., torch.Tensor]
    margin: float
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: MappingProxyType({}))

    results: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise ValueError(f"Routing: margin must be finite and not negative, got {self.margin}")


@dataclass(frozen=True)
class ExpertBlocks:
    """Three integer results: row ids in blocks by expert, each block's expert, and the length used.

    The first result contains the ids of rows, and a larger number as padding. The second contains
    the expert of each block. The third is one number, the used length of the first result. Experts
    and padding must be in the same positions as in the oracle's results. Rows may be in any order
    within successive blocks of the same expert. Elements after the used length may have any value.

    Args:
        block_size: the contract's parameters -> number of positions in a block.
        padding: the contract's parameters -> the number that marks padding.
    """

    block_size: Callable[..., int]
    padding: Callable[..., int]

    results: ClassVar[int] = 3


Output = Within | Exact | QuantisedPair | Routing | ExpertBlocks
"""How one result, or several results that belong together, are compared."""
