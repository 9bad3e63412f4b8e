"""Measures the candidates of an op in the way that an engine calls them, interleaved.

Only for `vllm-fl tune`. Engines do not import it, because a choice that is measured at startup
could differ between startups.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FunctionType
from typing import Any, cast

import torch

from vllm_fl.contracts import ModelSizes, OpSpec, Sample
from vllm_fl.contracts.routes import aliases
from vllm_fl.dispatch.guard import call_guard
from vllm_fl.dispatch.resolver import Candidate, Trace
from vllm_fl.engine.opaque import is_opaque
from vllm_fl.engine.plan import Plan, PlanEntry
from vllm_fl.plugins.signatures import asked_for
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.policy import Mode
from vllm_fl.text import quote
from vllm_fl_verify.form import Form
from vllm_fl_verify.guarded import Guarded, copy_rows
from vllm_fl_verify.oracle import each_part, parts
from vllm_fl_verify.trials import Trials
from vllm_fl_verify.verification import as_call, compare, refusal_reason

from .bench import Bench, cold_bytes
from .timing import ROOM, Measured, in_turn, ratios

ROUNDS = 11

ROUND = 400e-6
"""Minimum seconds of a round of one form, above the noise of the clock."""

MOST_CALLS, MOST_BYTES = 64, 512 * 2**20
"""Maximum number of calls in a round, and maximum bytes of their arguments.

No calls share arguments.
"""

HOST_OF_A_LAYER = 2000.0
"""Maximum µs of the host for the launches of a layer. Launches delay nothing if the device needs
longer. On an H200's host, vLLM needed 770 µs for a layer of Qwen3-8B in a prefill of 1024 tokens;
the layer's kernels took 580 µs."""

LOWERED_BY = "inductor"

Over = Callable[[str], AbstractContextManager[None]]
"""(candidate's name) -> a context manager that raises TimeoutError if its block takes too long."""

_Ways = tuple[Callable[..., Any], Callable[..., Any]]
"""(function for timing, function for timing launches)."""


@dataclass(frozen=True)
class Contender:
    """A candidate: an implementation, or vLLM's code.

    Args:
        name: an implementation's id, or `stock`.
        impls: the implementation, or vLLM's functions. Each of these may be for some calls only;
            for each call, the first correct function is timed.
        bare: whether it is called without a guard, like vLLM's functions.
        apart: impl id -> function that is timed instead, without work that only the comparison
            needs, such as joining results.
    """

    name: str
    impls: tuple[OpImpl, ...]
    bare: bool = False
    apart: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Served:
    """The functions of a candidate for one form of the op.

    Args:
        impl: the implementation.
        call: the function that an engine calls, with the contract's parameters.
        timed: the timed function: `call`, or the replacement in the candidate's `apart`.
        launched: the function for timing launches. It is not compiled, because a compiled graph of
            only this call costs the host more than the call.
        bare: whether it is vLLM's code. Callers of vLLM's code accept results in any layout.
    """

    impl: OpImpl
    call: Callable[..., Any]
    timed: Callable[..., Any]
    launched: Callable[..., Any]
    bare: bool


@dataclass
class OpTuning:
    """Measures one op of a model on a device.

    Args:
        spec: its contract.
        contenders: the candidates, including the default.
        default: the candidate that runs without a tuning table.
        mode: how the engine runs the model.
        dtype, device: of the model.
        sizes: of the model, on one rank; `tokens` ends with the largest batch.
        seed: for the inputs.
        clock: returns seconds; tests pass their own.
        over: limits the duration of calls.
        captured: tokens of the largest captured graph; 0 without graphs, None if unknown.
        traced: candidates in the graph that a compiled engine traces, inlined or as an operator;
            None for all. The others are called when that graph runs, like in eager mode, because
            vLLM calls the op inside an operator.
        between_graphs: whether vLLM calls the op between the pieces of its piecewise graphs
            (`Binding.between_graphs`).
        once: whether a layer makes each call of the op exactly once. Then only the sum of the calls
            decides; otherwise a winner must not be slower in any call.
        products: tokens of a step -> device time of matrix products in a layer, µs; 0 if unknown.
    """

    spec: OpSpec
    contenders: Sequence[Contender]
    default: str
    mode: Mode
    dtype: torch.dtype
    device: torch.device
    sizes: ModelSizes
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter
    over: Over = field(default=lambda name: nullcontext())
    captured: int | None = None
    traced: frozenset[str] | None = None
    between_graphs: bool = False
    once: bool = False
    products: Callable[[int], float] = field(default=lambda tokens: 0.0)
    _functions: dict[tuple[str, Callable[..., Any], int], _Ways | Exception] = field(
        default_factory=dict, init=False
    )
    _wholes: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self.spec, self.dtype, self.device, self.sizes, self.seed)

    @property
    def forms(self) -> list[Form]:
        """The model's calls of the op; empty if its sizes are unknown."""
        return self._trials.forms

    def measure(self, tokens: int) -> Measured:
        """Verify all candidates at this number of tokens, and time the correct ones."""
        found = Measured(tokens, self.default)
        self._wholes.clear()
        with torch.inference_mode():
            sound = self._all_sound(self.contenders, found)
            if not sound:
                return found
            bench = self._bench(tokens, sound, found)
            found.times, dropped = in_turn(bench.timers, ROUNDS)
            found.rejected |= dropped
            found.slower = {} if self.once else self._slower(bench.parts)
            by_host = self.between_graphs or self._beyond_graphs(tokens)
            if bench.captures and by_host and self.products(tokens) < HOST_OF_A_LAYER:
                found.slower = {**self._slower_to_launch(bench, found), **found.slower}
        return found

    def forget(self) -> None:
        """Free the measurement's data, which is recreated on demand."""
        self._functions.clear()
        self._wholes.clear()
        vars(self).pop("_trials", None)
        if self.mode == "compiled":
            torch._dynamo.reset()

    def _slower(self, parts: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, str]:
        """Return candidate -> a form in which it is slower than the default, and the ratio.

        It is unknown how often a model makes each call. Another op may replace all calls of a form,
        such as norms with a residual, norms without a residual, or norms of heads.
        """
        found = {}
        for name, rounds in parts.items():
            defaults = parts.get(self.default, ())
            if name == self.default or len(rounds) != len(defaults):
                continue
            for number, form in enumerate(self.forms):
                theirs, mine = ([times[number] for times in every] for every in (defaults, rounds))
                ratio = statistics.median(ratios(theirs, mine))
                if ratio < 1 / ROOM:
                    found[name] = f"{form.name}: {ratio:.2f}"
                    break
        return found

    def _beyond_graphs(self, tokens: int) -> bool:
        """Return whether the engine is known to capture no graph of this size."""
        return self.captured is not None and tokens > self.captured

    def _slower_to_launch(self, bench: Bench, found: Measured) -> dict[str, str]:
        """Return candidate -> why its launch costs the host more than it saves on the device.

        Call it only for steps that no single graph covers, and that the host may slow down. The
        host launches a kernel in a compiled graph as fast as a PyTorch operator, and an opaque
        operator through Python. Forms are compared separately, because a model may not call each of
        them.
        """
        inlined = {
            c.name
            for c in self.contenders
            if self._is_traced(c) and (c.bare or not any(map(is_opaque, c.impls)))
        }
        plain = bench.launch([(torch.zeros(1, device=self.device).add_, [(1,)])]) * len(self.forms)
        hosts: dict[str, Sequence[float]] = {}
        for name in found.times:
            with self._rejecting(name, found.tokens, found, "was launched"):
                hosts[name] = plain if name in inlined else bench.launches[name]()
        slower: dict[str, str] = {}
        if self.default not in hosts:
            return slower
        beyond = f"without a graph of {found.tokens} tokens"
        where = beyond if self._beyond_graphs(found.tokens) else "between the graphs of a prefill"
        of_default = _of_forms(bench.parts[self.default])
        for name in hosts.keys() - {self.default}:
            saved = map(operator.sub, of_default, _of_forms(bench.parts[name]))
            costs = map(operator.sub, hosts[name], hosts[self.default])
            for form, less, more in zip(self.forms, saved, costs, strict=True):
                if more > 0 and less < more:
                    slower[name] = (
                        f"{where}: {form.name}: {more:.0f} µs more to launch, and {less:.0f} µs "
                        "less on the device"
                    )
                    break
        return slower

    # Verification.

    def _all_sound(
        self, asked: Sequence[Contender], found: Measured
    ) -> dict[str, Sequence[_Served]]:
        """Return candidate -> its functions for each form; add rejected candidates to `found`.

        The default runs forms that a candidate does not support, like in an engine.
        """
        sound: dict[str, Sequence[_Served]] = {}
        partly: dict[str, Sequence[_Served | str]] = {}
        for contender in asked:
            served = self._sound(contender, found.tokens)
            if isinstance(served, str):
                found.rejected[contender.name] = served
                continue
            partly[contender.name] = served
        for name, forms in partly.items():
            pairs = zip(forms, partly.get(self.default, forms), strict=True)
            filled = [other if isinstance(one, str) else one for one, other in pairs]
            sound[name] = [one for one in filled if not isinstance(one, str)]
            if len(sound[name]) < len(forms):
                found.rejected[name] = next(one for one in forms if isinstance(one, str))
                del sound[name]
        return sound

    def _sound(self, contender: Contender, tokens: int) -> list[_Served | str] | str:
        """Return for each form the functions, or why it is unsupported; or a reason for rejection.

        A candidate is rejected for an incorrect result or an exception in any form, or if it
        supports no form.
        """
        served: list[_Served | str] = []
        for number, form in enumerate(self.forms):
            why: list[str] = []
            for impl in contender.impls:
                try:
                    with self.over(contender.name):
                        one = self._served(contender, impl, number)
                        fault = self._fault(one, form, tokens)
                except Exception as error:
                    refusal = refusal_reason(error)
                    said = f"unsupported: {refusal}" if refusal else f"raised: {quote(error)}"
                    fault = f"{said} ({tokens} x {form.name})"
                if not fault:
                    served.append(one)
                    break
                why.append(fault)
            else:
                reason = "; ".join(dict.fromkeys(why)) or "vLLM has no implementation of this call"
                if not why or not all(fault.startswith("unsupported: ") for fault in why):
                    return reason
                served.append(reason)
        refusals = [one for one in served if isinstance(one, str)]
        return refusals[0] if refusals and len(refusals) == len(served) else served

    def _served(self, contender: Contender, impl: OpImpl, form: int) -> _Served:
        call, launched = self._function(contender, impl, form)
        timed = call
        if impl.impl_id in contender.apart:
            less = dataclasses.replace(impl, fn=contender.apart[impl.impl_id], consumes=frozenset())
            timed, launched = self._function(contender, less, form)
        return _Served(impl, call, timed, launched, contender.bare)

    def _fault(self, served: _Served, form: Form, tokens: int) -> str:
        """Return the fault of the results for new inputs, ordinary and large; empty if correct."""
        impl = dataclasses.replace(
            served.impl,
            fn=self._poisoning(served),
            supports=cast("Any", asked_for(served.impl, self.spec)),
        )
        for large in (True, False):
            form.switch(large=large)
            rows = self._trials.rows(tokens, large, "drawn" if large else "consecutive")
            laid = copy_rows(form.pool(large), rows)
            name = f"{tokens} x {form.name}" + ", large values" * large
            sample = Sample(name, form.call(laid).args)
            deviation = partial(form.deviation, large, rows)
            found = compare(impl, self.spec, sample, self.dtype, deviation=deviation)
            if found.status != "ok":
                form.switch(large=False)
                status = {"wrong": "incorrect", "refused": "unsupported"}.get(
                    found.status, "raised"
                )
                return f"{status}: {found.reason} ({name})"
        return ""

    def _poisoning(self, served: _Served) -> Callable[..., Any]:
        """Wrap the call: write NaN to memory that its results will probably reuse."""

        def poisoned(*args: Any) -> Any:
            shapes = parts(self.spec.fake(*args))
            blocks = [part.new_full(part.shape, math.nan) for part in shapes if _is_float(part)]
            del shapes, blocks
            try:
                result = each_part(served.call(*args), partial(_within, args))
            except Exception as error:
                if refusal := refusal_reason(error):
                    raise NotImplementedError(refusal) from None
                raise
            return each_part(result, partial(_laid_out, args)) if served.bare else result

        return poisoned

    def _function(self, contender: Contender, impl: OpImpl, form: int) -> _Ways:
        """Return the functions of a candidate for timing calls and for timing launches."""
        key = contender.name, impl.fn, form
        if key not in self._functions:
            try:
                self._functions[key] = self._made(contender, impl, self.forms[form])
            except Exception as error:
                self._functions[key] = error
        found = self._functions[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _made(self, contender: Contender, impl: OpImpl, form: Form) -> _Ways:
        op = self.spec.name
        trace = Trace(op, self.mode, (), (Candidate(impl, "selected", "measured"),))
        entry = PlanEntry(op, ((None, trace),))
        plan = Plan(self.mode, {op: entry}, strict=True, contracts={op: self.spec})
        if self.mode == "compiled" and self._is_traced(contender):
            function = plan.as_compiled(op, impl)
            if self.device.type == "cuda" and is_opaque(impl):  # timed as the replay of a graph
                return function, function  # compiling does not change an opaque operator
            return self._compiled(function, form), function
        if contender.bare or impl.needs_layer:
            function = as_call(impl, self.spec)
        else:
            function = call_guard(plan.chain(op, self.spec.consumable))
        return function, function

    def _is_traced(self, contender: Contender) -> bool:
        return self.traced is None or contender.name in self.traced

    def _compiled(self, function: Callable[..., Any], form: Form) -> Callable[..., Any]:
        """Compile like vLLM: one graph for every number of tokens, without guards.

        The graph makes the views of heads from their projection, like a model's graph, because
        compilers treat inputs that share memory differently.
        """
        slices = _slices(self.spec, self.spec.with_rows(form.samples[0].args))
        places = {name: self.spec.parameters.index(name) for name in slices}
        firsts = {name: piece for name, piece in slices.items() if name == piece.first}

        def traced(*args: Any) -> Any:
            own = list(args)
            for name, piece in slices.items():
                whole = args[places[piece.first]]
                part = whole[:, piece.start : piece.start + math.prod(piece.tail)]
                own[places[name]] = part.unflatten(1, piece.tail)
            return function(*own)

        # Dynamo stores compiled code with the code object, so every graph needs its own.
        code = traced.__code__.replace(co_name=self.spec.name)
        compiled = torch.compile(
            FunctionType(code, globals(), None, None, traced.__closure__),
            fullgraph=True,
            backend=LOWERED_BY,
            options={"guard_filter_fn": lambda guards: [False for _ in guards]},
        )

        def inputs(args: Sequence[Any]) -> list[Any]:
            own = list(args)
            for name in slices:
                own[places[name]] = None
            for name, piece in firsts.items():
                own[places[name]] = self._whole(args[places[name]], piece)
            return own

        form.switch(large=False)
        # vLLM compiles with its largest batch, and Inductor chooses tile sizes at the first call.
        own = inputs(self._laid(form, self.sizes.tokens[-1], 0).args)
        for name, arg in zip(self.spec.parameters, own, strict=True):
            if self.spec.has_rows(name, arg):
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        compiled(*own)
        form.switch(large=False)
        return (lambda *args: compiled(*inputs(args))) if slices else compiled

    def _whole(self, view: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """Return the projection that contains `view`, as a tensor with offset 0 in its storage.

        If an operator writes to two views of an input, torch's functional form of the operator
        reads these views at offset 0 of the storage.
        """
        key = view.data_ptr(), view.shape[0]
        if key not in self._wholes:
            offset = view.storage_offset() - piece.start
            whole = view.as_strided((view.shape[0], piece.width), (piece.width, 1), offset)
            self._wholes[key] = torch.utils.dlpack.from_dlpack(whole)
        return self._wholes[key]

    # Timing.

    def _bench(self, tokens: int, sound: Mapping[str, Sequence[_Served]], found: Measured) -> Bench:
        """Return timers for the correct candidates, with shared arguments; reject candidates that
        raise."""
        bench = Bench(self.device, self.mode, self.clock)
        first = [self._laid(form, tokens, 0) for form in self.forms]
        least = math.inf
        for name, served in sound.items():
            with self._rejecting(name, tokens, found, "was warmed up"):
                for one, laid in zip(served, first, strict=True):
                    least = min(least, bench.seconds_of(one.timed, laid.args))
        size = sum(storage.memory.nbytes for laid in first for storage in laid.activations.storages)
        calls = 1 if math.isinf(least) else math.ceil(ROUND / max(least, 1e-7))
        calls = max(1, min(calls, MOST_CALLS, MOST_BYTES // max(1, 2 * size)))
        sets = [
            self._with_own([laid, *(self._laid(form, tokens, n) for n in range(1, calls))])
            for form, laid in zip(self.forms, first, strict=True)
        ]
        args = [[laid.args for laid in of_form] for of_form in sets]
        for name, served in sound.items():
            if name not in found.rejected:
                with self._rejecting(name, tokens, found, "was prepared for timing"):
                    forms = [
                        (one.timed, of_form, self._renew(one, laid))
                        for one, of_form, laid in zip(served, args, sets, strict=True)
                    ]
                    bench.timers[name] = partial(self._sum, bench, name, bench.timer(forms))
                    launched = [
                        (one.launched, of_form) for one, of_form in zip(served, args, strict=True)
                    ]
                    bench.launches[name] = partial(bench.launch, launched)
        return bench

    def _with_own(self, sets: Sequence[_Laid]) -> list[_Laid]:
        """Return the calls with weights that rotate between copies.

        Layers of a model have different weights, so no cache may keep a copy until it is used
        again.
        """
        given = zip(self.spec.parameters, sets[0].args, strict=True)
        places = [
            place
            for place, (name, arg) in enumerate(given)
            if name in self.spec.read_whole and isinstance(arg, torch.Tensor) and arg.numel()
        ]
        if not places:
            return list(sets)
        size = sum(sets[0].args[place].nbytes for place in places)
        others = min(len(sets), 1 + -(-cold_bytes(self.device) // size)) - 1
        turns = [sets[0].args]
        for _ in range(others):
            copies = [arg.clone() if n in places else arg for n, arg in enumerate(turns[0])]
            turns.append(tuple(copies))
        return [
            dataclasses.replace(laid, args=_put(laid.args, turns[n % len(turns)], places))
            for n, laid in enumerate(sets)
        ]

    @contextmanager
    def _rejecting(self, name: str, tokens: int, found: Measured, when: str) -> Iterator[None]:
        """Reject `name` if the block raises."""
        try:
            with self.over(name):
                yield
        except Exception as error:
            found.rejected[name] = f"raised: {quote(error)}, while it {when} ({tokens} tokens)"

    def _sum(self, bench: Bench, name: str, timer: Callable[[], list[float]]) -> float:
        with self.over(name):
            times = timer()
        bench.parts.setdefault(name, []).append(times)
        return sum(times)

    def _laid(self, form: Form, tokens: int, salt: int) -> _Laid:
        activations = copy_rows(form.pool(False), self._trials.rows(tokens, salt))
        activations.remember()
        return _Laid(form, activations, form.call(activations).args)

    def _renew(self, served: _Served, sets: Sequence[_Laid]) -> Callable[[], None]:
        consumed = self.spec.consumed(served.impl.consumes, sets[0].args)

        def renew() -> None:
            sets[0].form.static.restore(consumed)
            for laid in sets:
                laid.activations.restore(consumed)

        return renew


@dataclass(frozen=True)
class _Piece:
    """A view of consecutive features in each row of a projection.

    Args:
        first: the parameter that represents the projection.
        width: features of a row.
        start: the view's first feature.
        tail: the view's shape without its first dimension.
    """

    first: str
    width: int
    start: int
    tail: tuple[int, ...]


def _slices(spec: OpSpec, pool: Mapping[str, torch.Tensor]) -> dict[str, _Piece]:
    """Return the activations that are views of one projection: parameter -> piece."""
    storages: dict[int, list[str]] = {}
    for name in spec.parameters:
        if name in pool:
            storages.setdefault(pool[name].untyped_storage().data_ptr(), []).append(name)
    found: dict[str, _Piece] = {}
    for names in storages.values():
        width = pool[names[0]].stride(0)
        if len(names) > 1 and all(_is_slice(pool[name], width) for name in names):
            for name in names:
                view = pool[name]
                found[name] = _Piece(
                    names[0], width, int(view.storage_offset()), tuple(view.shape[1:])
                )
    return found


def _is_slice(view: torch.Tensor, width: int) -> bool:
    """Return whether the view is a range of features in every row of `width` features."""
    inner = view.ndim > 1 and view.stride(0) == width and view[0].is_contiguous()
    return inner and view.storage_offset() + view[0].numel() <= width


@dataclass(frozen=True)
class _Laid:
    """The arguments of one call; `form` and `activations` can restore consumed arguments."""

    form: Form
    activations: Guarded
    args: tuple[Any, ...]


def _put(args: Sequence[Any], others: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    return tuple(others[n] if n in places else arg for n, arg in enumerate(args))


def _within(args: Sequence[Any], result: Any) -> Any:
    """Return `result`, as a view of an argument that has the same memory.

    A view of `OpTuning._whole` has an argument's memory, but another storage object.
    """
    for arg in args:
        if not isinstance(arg, torch.Tensor) or not isinstance(result, torch.Tensor):
            continue
        storage = arg.untyped_storage()
        start = result.data_ptr() - storage.data_ptr()
        is_own = result.untyped_storage().data_ptr() == storage.data_ptr()
        if arg.dtype == result.dtype and 0 <= start < storage.nbytes() and not is_own:
            place = start // arg.element_size()
            return arg.as_strided(result.shape, result.stride(), place)
    return result


def _laid_out(args: Sequence[Any], result: Any) -> Any:
    """Return `result`, made contiguous unless it uses an argument's memory."""
    if not isinstance(result, torch.Tensor):
        return result
    is_own = any(isinstance(arg, torch.Tensor) and aliases(arg, result) for arg in args)
    return result if is_own else result.contiguous()


def _of_forms(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _is_float(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype.is_floating_point
