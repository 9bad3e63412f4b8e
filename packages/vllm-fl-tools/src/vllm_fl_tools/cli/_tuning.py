"""The work of `vllm-fl tune`: measures every op at every number of tokens."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import ModelSizes
from vllm_fl.contracts.binding import (
    Binding,
    FunctionTarget,
    FusionTarget,
    GraphTarget,
    IrTarget,
    LayerTarget,
    OperatorTarget,
)
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.resolver import Stock
from vllm_fl.engine.plan import Plan
from vllm_fl.plugins.calling import plugin_rejections
from vllm_fl.plugins.installed import installed_version
from vllm_fl.plugins.plugin import Owner
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.policy import Mode
from vllm_fl.text import quote

from ..engine.tuning_table import KEEP_DEFAULT, STOCK_NAME, Row, Tuned, TunedOp
from ..integration.model_ops import taken_in
from ._show import say
from ._watch import TookTooLong, Watch

if TYPE_CHECKING:
    import torch

    from ..engine.timing import Measured
    from ..engine.tuning import Contender, OpTuning

CLOCK = time.perf_counter
"""Clock for timing calls, in seconds."""


@dataclass(frozen=True)
class TuningSubject:
    """The model and the engine to tune for.

    Args:
        name: the user's name of the model.
        sizes: on one rank; the last of `tokens` is the largest measured number.
        tokens: numbers of tokens to measure, in ascending order.
        mode: how the engine will run the model.
        dtype, device: of the model.
        absent: ops that the model does not have.
        captured: tokens of the largest captured graph; 0 without graphs, None if unknown.
        plan: of the engine, without a table; None if only sizes are known.
        ordered: ops with a device-specific order in an engine without a table. The default ignores
            this order.
    """

    name: str
    sizes: ModelSizes
    tokens: tuple[int, ...]
    mode: Mode
    dtype: torch.dtype
    device: torch.device
    absent: frozenset[str]
    captured: int | None = None
    plan: Plan | None = None
    ordered: tuple[str, ...] = ()

    @property
    def known_sizes(self) -> dict[str, float]:
        """The known sizes, by name."""
        sizes = self.sizes
        own = {f.name: getattr(sizes, f.name) for f in fields(sizes)}
        own = {name: value for name, value in own.items() if name not in ("more", "tokens")}
        return {name: value for name, value in {**own, **sizes.more}.items() if value is not None}


@dataclass(frozen=True)
class GraphPosition:
    """The position of one op's calls in the graphs that an engine compiles."""

    subject: TuningSubject
    binding: Binding
    op: str
    contenders: Sequence[Contender]

    @property
    def traced(self) -> frozenset[str]:
        """Candidates that are called in the model's graph, as traced by a compiler.

        The graph has the calls from layers, and the operators of a GraphTarget. It lacks operators,
        functions and layers that vLLM calls inside another operator. For an op that a pass of vLLM
        finds, the graph has vLLM's implementation before the pass.
        """
        if self.binding.between_graphs:
            return frozenset()
        if self._targets(LayerTarget, IrTarget, GraphTarget):
            return frozenset(contender.name for contender in self.contenders)
        return frozenset({STOCK_NAME} if self._targets(FusionTarget) else ())

    @property
    def bound_to_all(self) -> frozenset[str]:
        """Candidates that run at all sizes or at none, if a graph is compiled for all sizes.

        These are candidates that the compiler inlines into the model's graph, instead of calling
        one operator. vLLM's implementation is one of them if it is in the graph, or if a target of
        the op does not define a call's number of tokens (`tokens`). In the second case, arguments
        are converted to the contract and back even at sizes at which a row selects vLLM. If all
        targets define it, a call at such a size costs only a few microseconds of Python.
        """
        from vllm_fl.engine.opaque import is_opaque

        if self.subject.mode != "compiled":
            return frozenset()
        code = {c.name for c in self.contenders if not any(map(is_opaque, c.impls))}
        all_tell = all(target.tokens for target in self._targets(OperatorTarget, FunctionTarget))
        return self.traced & (code | {STOCK_NAME}) | (frozenset() if all_tell else {STOCK_NAME})

    @property
    def is_by_range(self) -> bool:
        """Whether an engine can choose the op's implementation for each compiled range of sizes.

        Only a pass that replaces operators in graphs does so, with vLLM's operator as the other
        choice. It does not on a CPU, because vLLM traces and compiles its model once there.
        """
        is_split = self.subject.mode == "compiled" and self.subject.device.type == "cuda"
        has_vllm = any(contender.name == STOCK_NAME for contender in self.contenders)
        return is_split and has_vllm and bool(self._targets(GraphTarget))

    def _targets(self, *kinds: type) -> list[Any]:
        return [target for target in self.binding.targets if isinstance(target, kinds)]


Measurements = Sequence[tuple[GraphPosition, Sequence["Measured"]]]
"""The measurements of each op, by size."""


def rows_by_op(found: Measurements) -> Iterator[tuple[Row, ...]]:
    """Yield the rows of each op. An op that a winning op fuses keeps the default.

    The ends of separately compiled ranges are equal for all ops, which are in the same graphs.
    """
    from vllm_fl.integration.graphs.ranges import MAX_RANGES

    from ..engine.timing import best_edges, table_rows

    inlined = [(measured, op.bound_to_all) for op, measured in found if op.is_by_range]
    edges = best_edges(inlined, MAX_RANGES)
    every = [
        (op, table_rows(measured, op.bound_to_all, edges if op.is_by_range else ()))
        for op, measured in found
    ]
    won = [op.binding for op, rows in every if any(row.impl != KEEP_DEFAULT for row in rows)]
    parts = frozenset[str]().union(*map(taken_in, won))
    for op, rows in every:
        yield (Row(rows[-1].up_to, KEEP_DEFAULT),) if op.op in parts else rows


class Work:
    """The ops of a subject that have more than one candidate, and their results.

    `ops` and `impls` restrict the measurement; None for all. The default is always a candidate.
    """

    def __init__(
        self,
        manager: OpManager,
        subject: TuningSubject,
        bindings: Mapping[str, Binding],
        *,
        ops: Sequence[str] | None,
        impls: Sequence[str] | None,
    ) -> None:
        self.manager, self.subject = manager, subject
        self.remarks: list[str] = []
        self._bindings, self._impls = bindings, impls
        self._owners: dict[str, Owner] = {}
        self._seconds = 0.0
        self._without_stock = ""
        self._found: dict[tuple[str, int], Measured] = {}
        specs = manager.registry.snapshot().contracts
        self._tunings = {
            op: tuning
            # Products come first, because their time decides if launches matter.
            for op in sorted(specs, key=lambda op: not self._binding(op).products)
            if (not ops or op in ops) and (tuning := self._tuning(op, explicit=bool(ops)))
        }
        if self._without_stock:
            self.remarks.append(f"vLLM's implementations were not measured: {self._without_stock}")

    @property
    def units(self) -> int:
        """The number of measurements, each of an op at one number of tokens."""
        return len(self._tunings) * len(self.subject.tokens)

    @property
    def done(self) -> int:
        return len(self._found)

    # Candidates.

    def _tuning(self, op: str, *, explicit: bool) -> OpTuning | None:
        """Return the measurement of an op, or None, with a remark if it is useful."""
        from vllm_fl_verify.verification import dtype_name

        from ..engine.tuning import OpTuning

        subject, spec = self.subject, self.manager.registry.snapshot().contracts[op]
        if op in subject.absent and not explicit:
            return None
        if dtype_name(subject.dtype) not in spec.dtypes:
            if explicit:
                known = ", ".join(spec.dtypes)
                self.remarks.append(f"{op}: skipped: its contract supports only {known}")
            return None
        default = self._default(op)
        kept = self._contenders(op, {*self._impls, default} if self._impls else None)
        if len(kept) < 2 and not explicit:
            return None
        if default not in [c.name for c in kept]:
            why = f"its default, {default or 'none'}, has no function to measure"
        elif len(kept) < 2:
            why = f"{default} is its only candidate"
        else:
            graphs = GraphPosition(subject, self._binding(op), op, kept)
            tuning = OpTuning(
                spec,
                kept,
                str(default),
                subject.mode,
                subject.dtype,
                subject.device,
                subject.sizes,
                seed=random.SystemRandom().randrange(1 << 32),
                clock=CLOCK,
                captured=subject.captured,
                traced=graphs.traced,
                between_graphs=graphs.binding.between_graphs,
                once=graphs.binding.products,
                # Launches of the products count, because only earlier work could hide them.
                products=(lambda _: 0.0) if graphs.binding.products else self._products,
            )
            if tuning.forms:
                snapshot = self.manager.registry.snapshot()
                owners = [snapshot.owners.get((op, contender.name)) for contender in kept]
                for owner in (*owners, snapshot.authors.get(op)):
                    if owner is not None:
                        self._owners[owner.label] = owner
                return tuning
            names = ", ".join(rule.name for rule in self._bindings[op].sizes)
            why = f"a size of the model is unknown ({names})"
        self.remarks.append(f"{op}: skipped: {why}")
        return None

    def _default(self, op: str) -> str | None:
        """Return the implementation for the op's largest calls without a table."""
        subject = self.subject
        entry = subject.plan.entries.get(op) if subject.plan is not None else None
        if entry is not None and entry.note:
            return STOCK_NAME
        if entry is not None:
            selected = entry.rows[-1][1].selected
        else:
            selected = self.manager.trace(
                op, mode=subject.mode, engine=True, without_layer=subject.mode == "compiled"
            ).selected
        return STOCK_NAME if isinstance(selected, Stock) else selected.impl_id if selected else None

    def _contenders(self, op: str, names: set[str | None] | None) -> list[Contender]:
        """Return vLLM's code and every available implementation that is not denied.

        `names` restricts them; None for all.
        """
        from ..engine.tuning import Contender

        manager, compiled = self.manager, self.subject.mode == "compiled"
        installed = manager.registry.snapshot().impls_by_op.get(op, ())
        denied = plugin_rejections(manager.registry.plugins, manager.settings, op, installed)
        subject, default = self.subject, self._default(op)
        # On a GPU, plain PyTorch runs several kernels, or the same compiled code as stock vLLM.
        without_plain = subject.device.type == "cuda" and names is None
        found = [
            Contender(impl.impl_id, (impl,))
            for impl in installed
            if isinstance(impl, OpImpl)
            and (names is None or impl.impl_id in names)
            and not manager.policy.refuses(impl)
            and impl.impl_id not in denied
            and not (compiled and impl.needs_layer)
            and not (
                without_plain and impl.kind is BackendImplKind.REFERENCE and impl.impl_id != default
            )
            and impl.availability() is True
        ]
        own = self._stock(op) if names is None or STOCK_NAME in names else ()
        if not own:
            return found
        from ..integration.stock_calls import apart

        return [*found, Contender(STOCK_NAME, own, bare=True, apart=apart(self._bindings[op], own))]

    def _stock(self, op: str) -> tuple[OpImpl, ...]:
        if self._without_stock or op not in self._bindings:
            return ()
        try:
            from ..integration.stock_calls import stock_forms

            return stock_forms(op, self._bindings[op], self.subject.mode, self.subject.device)
        except Exception as error:  # vLLM is not installed, or cannot be imported
            self._without_stock = quote(error)
            return ()

    # Measuring.

    def run(self, limit: float) -> None:
        """Measure everything. Calls are limited to `limit` seconds. Raises KeyboardInterrupt."""
        running = ["", 0, ""]

        def stuck() -> None:
            """Report a call in native code that cannot be interrupted, before the process ends."""
            op, tokens, name = running
            problem = f"{op}, {tokens} tokens: {name} hangs and cannot be interrupted"
            say(f"vllm-fl: {problem}; exclude it by listing the others with --impl", error=True)

        watch = Watch(self.units, limit, stuck)

        @contextmanager
        def over(name: str) -> Iterator[None]:
            running[2] = name
            try:
                with watch.call(name):
                    yield
            except TookTooLong as error:
                raise TimeoutError(f"timed out after {limit:g} s") from error

        def measure(op: str, tokens: int) -> None:
            running[:2] = op, tokens
            watch.begin(f"{op}, {tokens} tokens", self.done + 1)
            start = time.monotonic()
            found = self._found[op, tokens] = self._tunings[op].measure(tokens)
            self._seconds += time.monotonic() - start
            where = f"[{100 * self.done // self.units:3} %] {op}, {tokens} tokens"
            say(f"{where}: {_outcome(found)}", error=True)

        with _without_old_objects(self.subject.mode):
            for op, tuning in self._tunings.items():
                tuning.over = over
                for tokens in self.subject.tokens:
                    measure(op, tokens)
                tuning.forget()

    # Sizes.

    def _of(self, op: str) -> list[Measured]:
        found = [one for (of, _), one in self._found.items() if of == op]
        return sorted(found, key=lambda one: one.tokens)

    def _graphs(self, op: str) -> GraphPosition:
        return GraphPosition(self.subject, self._binding(op), op, self._tunings[op].contenders)

    def _products(self, tokens: int) -> float:
        """Return a lower bound of the device time of matrix products in a layer, µs; 0 if unknown.

        It is the sum of the times at the next smaller measured size. A layer has each form of these
        ops once.
        """
        return sum(
            max((one.fastest for one in self._of(op) if one.tokens <= tokens), default=0.0)
            for op in self._tunings
            if self._binding(op).products
        )

    def _binding(self, op: str) -> Binding:
        return self._bindings.get(op, Binding())

    def table(self) -> Tuned:
        from vllm_fl_verify.verification import dtype_name

        from ..operate.identity import device_name

        subject = self.subject
        found, ops = [(self._graphs(op), self._of(op)) for op in self._tunings], {}
        for (graphs, measured), rows in zip(found, rows_by_op(found), strict=True):
            tuning = self._tunings[graphs.op]
            figures = tuple(figure for one in measured for figure in one.figures())
            ops[graphs.op] = TunedOp(tuning.default, rows, figures)
        names = {owner.distribution for owner in self._owners.values()} | {"torch", "triton"}
        versions = {
            name: version for name in names if name and (version := installed_version(name))
        }
        return Tuned(
            subject.mode,
            dtype_name(subject.dtype),
            subject.known_sizes,
            subject.name,
            datetime.now(UTC).isoformat(timespec="seconds"),
            round(self._seconds, 1),
            {
                **({"vllm": release} if (release := installed_version("vllm")) else {}),
                "device": device_name(subject.device),
                "distributions": dict(sorted(versions.items())),
            },
            ops,
        )


@contextmanager
def _without_old_objects(mode: Mode) -> Iterator[None]:
    """Exclude existing objects from garbage collection, including the compiler's modules."""
    from vllm_fl_verify.trials import without_old_objects

    if mode == "compiled":
        import torch._inductor.compile_fx  # noqa: F401
    gc.collect()
    with without_old_objects():
        yield


def _outcome(found: Measured) -> str:
    figures = {figure.impl: figure for figure in found.figures() if figure.us is not None}
    if (winner := figures.get(found.winner)) is not None:
        speed = f"{winner.ratio:.2f} times as fast as {found.default}"
        outcome = f"{winner.impl} {winner.us:.1f} µs, {speed}"
    else:
        default = figures.get(found.default)
        speed = "not timed" if default is None else f"{default.us:.1f} µs"
        outcome = f"{found.default} is kept, {speed}"
    return "; ".join([outcome, *[f"rejected: {', '.join(found.rejected)}"] * bool(found.rejected)])
