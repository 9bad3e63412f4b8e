"""The list of patchers, in the order of their changes to vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from .patcher import Patcher, WhyNot
from .patchers.attention import Attention
from .patchers.communicator import Communicator
from .patchers.functions import Functions
from .patchers.fusions import Fusions, OperatorsInGraphs
from .patchers.ir import Ir
from .patchers.layers import Layers
from .patchers.linear_kernels import LinearKernels
from .patchers.operators import Operators
from .patchers.whole_layers import WholeLayers

if TYPE_CHECKING:
    from ..engine.facts import EngineFacts

K = TypeVar("K")
V = TypeVar("V")

PATCHERS: tuple[Patcher, ...] = (
    Layers(),
    WholeLayers(),
    LinearKernels(),
    Attention(),
    Communicator(),
    Ir(),
    Operators(),
    Functions(),
    Fusions(),  # creates `InGraphs`, before the next patcher adds to it
    OperatorsInGraphs(),
)


def merged(asked: Callable[[Patcher], Mapping[K, V]]) -> dict[K, V]:
    return {key: value for each in PATCHERS for key, value in asked(each).items()}


def why_not(facts: EngineFacts) -> WhyNot:
    found = [patcher.why_not(facts) for patcher in PATCHERS]
    return WhyNot(
        {op: why for each in found for op, why in each.ops.items()},
        {key: why for each in found for key, why in each.impls.items()},
        [layer for each in found for layer in each.layers],
    )


@contextmanager
def entered(asked: Callable[[Patcher], AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in PATCHERS:
            stack.enter_context(asked(each))
        yield
