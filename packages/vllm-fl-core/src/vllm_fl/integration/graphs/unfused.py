"""A pass of vLLM's that finds an op, in the ranges of sizes where the plan has the op.

The pass is on for a whole engine, and so are the layers whose operators it looks for. Where the
op is ordered by size and left to vLLM in a range, the graphs of that range have what vLLM compiles
while the pass and those layers are off.

Imported where vLLM makes its pass manager, which is in a worker that compiles.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._inductor.pattern_matcher import Match

from ...engine.ranges import choice
from ...logs import get_logger
from ...plugins.types import OpImpl
from ..carried import turned_on
from ..engines import Engine
from ..patchers import fusions
from .base import GraphPass, problem_of
from .functional_operators import arguments, operator_of, put_in_place, replacing

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger("engine")


def held_to_ranges(passes: Sequence[Any], engine: Engine, vllm_config: VllmConfig) -> list[Any]:
    """`passes`, with those that find an op which is left to vLLM at some sizes run elsewhere only.

    Args:
        passes: vLLM's, in their order.
        engine: the engine.
        vllm_config: the engine's.
    """
    held = fusions.by_range(engine.plan)
    known = {target.path.rpartition(".")[2]: op for op, (target, _) in held.items()}
    return [
        HeldToRanges(each, engine, known[name], vllm_config)
        if (name := type(each).__name__) in known
        else each
        for each in passes
    ]


class HeldToRanges(GraphPass):
    """A pass of vLLM's; in ranges of sizes that are left to vLLM, its own code in its stead.

    Args:
        run: vLLM's pass.
        engine: the engine.
        op: what the pass finds.
        vllm_config: the engine's.
    """

    def __init__(self, run: Any, engine: Engine, op: str, vllm_config: VllmConfig) -> None:
        super().__init__(engine, vllm_config)
        self.run, self.op = run, op
        self.target, self.chain = fusions.by_range(engine.plan)[op]
        # Layers that the user turned on stay as they are.
        is_ours = {*self.target.layers} <= turned_on(vllm_config)
        self.unfused = dict(self.target.unfused) if is_ours else {}
        self._patterns = replacing(
            f"vllm_fl_unfused_{op}",
            lambda match: operator_of(match).name() in self.unfused,
            self._replace,
        )

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Where vLLM's is; and everywhere that the op is left to vLLM."""
        return self._left() is not None or self.run.is_applicable_for_range(compile_range)

    def __call__(self, graph: fx.Graph) -> None:
        if self._left() is None:
            self.run(graph)
        else:
            self._patterns.apply(graph)

    def uuid(self) -> str:
        """What the compiler's caches know the pass by: both passes' source, the plan's digest."""
        return "|".join((str(self.run.uuid()), super().uuid(), *sorted(self.unfused)))

    def _left(self) -> OpImpl | None:
        """vLLM's own form of the op, where the graph that is being compiled is left to it."""
        return choice(self.chain, self.sizes)

    def _replace(self, match: Match, *args: Any, **kwargs: Any) -> None:
        """Put the operator's code in its place."""
        operator, left = operator_of(match), self._left()
        if why := problem_of(
            lambda: put_in_place(match, lambda given: self._run_code(operator, given))
        ):
            log.warning(
                "Op '%s' is left to vLLM for %s tokens, where its operator %s stays all the same, "
                "since the code in its place cannot be traced: %s",
                self.op,
                self.sizes,
                operator.name(),
                why,
            )
        else:
            assert left is not None  # as `__call__` has found
            self.done.inlined[self.op, self.sizes, left.impl_id] += 1

    def _run_code(self, operator: Any, given: Mapping[str, Any]) -> Sequence[Any]:
        """What the operator's code returns for these arguments.

        Raises:
            ValueError: it does not know one of them, whose value is not its default.
        """
        code = self.unfused[operator.name()]
        known = tuple(inspect.signature(code).parameters)
        found: Sequence[Any] = code(*arguments(operator, given, known))
        return found
