"""How the results of an op are compared with its oracle's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

__all__ = ["Exact", "ExpertBlocks", "Output", "QuantisedPair", "Routing", "Tolerance", "Within"]


@dataclass(frozen=True)
class Tolerance:
    """How far from the oracle a result may lie: |got - want| <= atol + rtol * |want|.

    Args:
        rtol: relative share, without unit.
        atol: absolute share, in the units of the result.
        reason: why these numbers, with their source. Two that differ in it alone are equal.
    """

    rtol: float
    atol: float
    reason: str = field(compare=False)


@dataclass(frozen=True)
class Within:
    """One result, each element of which lies within a tolerance of the oracle's.

    Args:
        tolerances: this result's own, by the name of its dtype (`float32`, `bfloat16`); where there
            are none, the contract's hold.
    """

    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: MappingProxyType({}))

    results: ClassVar[int] = 1


@dataclass(frozen=True)
class Exact:
    """One result, equal to the oracle's in every element: ids, indices, block tables, flags.

    The oracle returns it as integers or flags of any width. A floating result, of an op that only
    moves numbers, equals the oracle's number rounded to the result's dtype.
    """

    results: ClassVar[int] = 1


@dataclass(frozen=True)
class QuantisedPair:
    """Two results, a value and its scale, which together stand for value * scale.

    The oracle returns (what value * scale is to be, in fp64 and not rounded; the scale, in fp64).
    An op that saturates has an oracle that does. The value's dtype has integer or floating steps
    (`int8`, `float8_e4m3fn`), one element for each number: packed ones are not supported. The scale
    is one number for all (any shape of one element), or one for each row (the value's shape without
    its last dimension), or one for each group: of the value's dimensions, each is divided into
    groups of equal size, the last of which may be smaller.

    Args:
        steps: how far value * scale may lie from the oracle, in steps of the value's dtype at that
            number: 1.0 takes every way of rounding, 0.5 only to nearest. What the scale's
            tolerance allows is added.
        tolerances: the scale's own; where there are none, the contract's hold.
    """

    steps: float = 1.0
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: MappingProxyType({}))

    results: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.steps) and self.steps > 0):
            raise ValueError(f"QuantisedPair: steps must be finite and positive, got {self.steps}")


@dataclass(frozen=True)
class Routing:
    """Two results of shape (tokens, k): the weights of the experts a token takes, and their ids.

    The order of a token's experts is free. They must be the oracle's where the k-th and the
    (k+1)-th score are farther apart than `margin`. Where they are not, the tie may be decided
    otherwise, between the experts whose scores lie in the margin. A weight belongs to its expert,
    and lies within its tolerance; where a tie was decided otherwise, the token's weights are
    compared in order of size.

    Args:
        scores: the contract's parameters -> (tokens, experts), fp64: by which the oracle chooses
            the k highest.
        margin: how far apart two scores of magnitude 1 must be for their order to be certain, in
            units of the scores: above the error of computing them in fp32. Like `atol` it counts
            `Sample.scale` times.
        tolerances: the weights' own; where there are none, the contract's hold.
    """

    scores: Callable[..., torch.Tensor]
    margin: float
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: MappingProxyType({}))

    results: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise ValueError(f"Routing: margin must be finite, not negative, got {self.margin}")


@dataclass(frozen=True)
class ExpertBlocks:
    """Three results: rows sorted by expert in blocks, each block's expert, and the places in use.

    They are integers: the ids of rows, with a number for padding that is above them all; one expert
    for each block; and one number, how many places hold blocks that count. Experts come in the
    oracle's order, and padding is where the oracle has it. The order of rows is free among the
    blocks of one expert that follow each other, and so is what is behind the places in use.

    Args:
        block_size: the contract's parameters -> places of a block.
        padding: the contract's parameters -> the number that stands for no row.
    """

    block_size: Callable[..., int]
    padding: Callable[..., int]

    results: ClassVar[int] = 3


Output = Within | Exact | QuantisedPair | Routing | ExpertBlocks
"""How one result, or several that belong together, are compared."""
