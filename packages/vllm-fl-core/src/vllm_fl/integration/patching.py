"""The patchers, in the order in which they change vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .patcher import Patcher, WhyNot
from .patchers.attention import Attention
from .patchers.communicator import Communicator
from .patchers.functions import Functions
from .patchers.fusions import Fusions
from .patchers.ir import Ir
from .patchers.layers import Layers
from .patchers.operators import Operators
from .patchers.torch_operators import OperatorsInGraphs
from .patchers.whole_layers import WholeLayers

if TYPE_CHECKING:
    from ..dispatch.chain import Chain
    from ..engine.facts import EngineFacts
    from ..engine.plan import Plan
    from .engines import Engine

PATCHERS: tuple[Patcher, ...] = (
    Layers(),
    WholeLayers(),
    Attention(),
    Communicator(),
    Ir(),
    Operators(),
    Functions(),
    Fusions(),
    OperatorsInGraphs(),
)


def why_not(facts: EngineFacts) -> WhyNot:
    """Return every patcher's reasons not to replace targets in this engine."""
    ops: dict[str, str] = {}
    impls: dict[tuple[str, str], str] = {}
    layers: list[str] = []
    for patcher in PATCHERS:
        found = patcher.why_not(facts)
        ops |= found.ops
        impls |= found.impls
        layers += found.layers
    return WhyNot(ops, impls, layers)


def by_range(plan: Plan) -> dict[str, Chain]:
    """Return every patcher's ops that graphs can have by range of sizes, in the plan's order."""
    found = {op: chain for each in PATCHERS for op, chain in each.by_range(plan).items()}
    return {op: found[op] for op in plan.entries if op in found}


def faults(plan: Plan, facts: EngineFacts) -> dict[tuple[str, str], str]:
    """Return the planned classes that cannot be used in this process: (op, impl id) -> why."""
    return {key: why for each in PATCHERS for key, why in each.faults(plan, facts).items()}


def contents(plan: Plan) -> dict[str, Any]:
    """Return the code of others that computes under the plan."""
    return {key: told for each in PATCHERS for key, told in each.contents(plan).items()}


def opening(engine: Engine) -> AbstractContextManager[None]:
    """While the block runs, vLLM opens the device with what the patchers replace there."""
    return _all_of(patcher.opening(engine) for patcher in PATCHERS)


def building(engine: Engine) -> AbstractContextManager[None]:
    """While the block runs, vLLM builds the model with every patcher's classes."""
    return _all_of(patcher.building(engine) for patcher in PATCHERS)


@contextmanager
def _all_of(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def report(engine: Engine) -> dict[str, Any]:
    """Return what the patchers add to the worker's report."""
    return {key: told for each in PATCHERS for key, told in each.report(engine).items()}
