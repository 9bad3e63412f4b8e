"""Measuring the candidates of an op as they serve: at one number of tokens, all of them in turn.

For `vllm-fl tune` alone. No engine imports it: a choice that is measured at every start may be
another one at every start.
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
from vllm_fl.dispatch.guard import call_guard
from vllm_fl.dispatch.resolver import Candidate, Trace
from vllm_fl.engine.opaque import is_opaque
from vllm_fl.engine.plan import Plan, PlanEntry
from vllm_fl.plugins.forms import asked_for
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.policy import Mode
from vllm_fl.text import quote
from vllm_fl_verify.form import Form
from vllm_fl_verify.guarded import Guarded, rows_of
from vllm_fl_verify.oracle import each_part, parts
from vllm_fl_verify.trials import Trials
from vllm_fl_verify.verification import as_call, compare, refusal_of

from .bench import Bench, cold_bytes
from .timing import ROOM, Measured, in_turn, ratios

__all__ = ["Contender", "OpTuning"]

ROUNDS = 11
"""Rounds in which all are timed."""

ROUND = 400e-6
"""Seconds that a round of one form lasts at least: a clock's own noise must not count."""

MOST_CALLS, MOST_BYTES = 64, 512 * 2**20
"""Calls in one round, each with arguments of its own, and what these may occupy."""

HOST_OF_A_LAYER = 2000.0
"""µs within which the host is through with a layer of a model: where the device works longer on
one, what a launch costs the host delays nothing. On an H200's host vLLM took 770 for a layer of
Qwen3-8B in a prefill of 1024 tokens, whose kernels took 580."""

LOWERED_BY = "inductor"

Over = Callable[[str], AbstractContextManager[None]]
"""(whose code runs) -> a block that raises TimeoutError where it takes too long."""

_Ways = tuple[Callable[..., Any], Callable[..., Any]]
"""(an op as it is timed, the same as the host launches it)."""


@dataclass(frozen=True)
class Contender:
    """Somebody who is compared.

    Args:
        name: an implementation's id, or `stock`.
        impls: the implementation. vLLM may have several functions for one op, each for some calls:
            of these the first that gets a call right is what is timed.
        bare: whether the caller calls it without a guard, as vLLM does its own.
        apart: impl id -> what is timed in its place: the same without what nobody needs but a
            comparison, as results that are put together.
    """

    name: str
    impls: tuple[OpImpl, ...]
    bare: bool = False
    apart: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Served:
    """What is timed for one form of the op.

    Args:
        impl: the implementation.
        call: the same as it serves, by the contract's parameters.
        timed: what is timed of it; `call`, unless the contender says otherwise.
        launched: the same as the host launches it, where the call stands in a compiled graph: a
            graph that holds this call alone costs the host more than the call does.
        bare: whether it is vLLM's own, whose callers take its results in any layout.
    """

    impl: OpImpl
    call: Callable[..., Any]
    timed: Callable[..., Any]
    launched: Callable[..., Any]
    bare: bool


@dataclass
class OpTuning:
    """One op of a model on a device.

    Args:
        spec: its contract.
        contenders: who is compared, the default among them.
        default: the name of what runs without a table.
        mode: how the engine runs the model.
        dtype, device: the model's.
        sizes: the model's, on one rank; `tokens` ends with the largest batch.
        seed: for the inputs.
        clock: seconds; a test has one of its own.
        over: who limits how long a call may take.
        captured: the tokens of the largest batch of which the engine captures a graph, 0 where it
            captures none; None where that is not known.
        traced: the names of those that stand in the graph which a compiled engine traces, as code
            or as an operator; None for all. The others are called when that graph runs, as in eager
            mode, since vLLM's own code calls the op inside an operator.
        between_graphs: whether vLLM calls the op between the pieces of its piecewise graphs
            (`Binding.between_graphs`).
        once: whether a layer makes each of the op's calls once: what they take together decides
            then, and otherwise each of them, too.
        products: the tokens of a step -> how long the device takes for the matrix products of a
            layer, µs; 0 where that is not known.
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
        """The calls that the model makes of the op; none where its sizes are not told."""
        return self._trials.forms

    def measure(self, tokens: int) -> Measured:
        """Check everybody at this number of tokens, and time who is right."""
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
        """Free what was made for measuring; it is made again where it is needed."""
        self._functions.clear()
        self._wholes.clear()
        vars(self).pop("_trials", None)

    def _slower(self, parts: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, str]:
        """Who is slower than the default in a form of the op -> in which, and by what.

        How often a model makes which of the calls is not known: of norms with and without a
        residual, and of heads, another op may take one kind away altogether.
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
        """Whether the engine is known to capture no graph of so many tokens."""
        return self.captured is not None and tokens > self.captured

    def _slower_to_launch(self, bench: Bench, found: Measured) -> dict[str, str]:
        """Who saves the device less than its launch costs the host, where no graph serves, or not
        in every step, and the device is not known to be what limits a step.

        What limits such a step may be the host. It launches a kernel that stands in a compiled
        graph as fast as an operator of PyTorch's, and what the compiler takes whole through Python.
        Each form is held to that by itself: what is saved in one that the model has not is worth
        nothing to it.
        """
        inlined = {
            c.name
            for c in self.contenders
            if self._is_traced(c) and (c.bare or not any(map(is_opaque, c.impls)))
        }
        plain = [bench.launch_of_pytorch()] * len(self.forms)
        hosts: dict[str, Sequence[float]] = {}
        for name in found.times:
            with self._rejecting(name, found.tokens, found, "was launched"):
                hosts[name] = plain if name in inlined else bench.launches[name]()
        slower: dict[str, str] = {}
        if self.default not in hosts:
            return slower
        beyond = f"no graph of {found.tokens} tokens"
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

    # Whether it is right.

    def _all_sound(
        self, asked: Sequence[Contender], found: Measured
    ) -> dict[str, Sequence[_Served]]:
        """Name -> what serves each form. Who must not serve is put with the reason into `found`.

        Where somebody refuses some of the forms, the default serves those in his place, as it does
        in an engine: a model may make no such call.
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
        """For each form what serves it, or its refusal; or why the contender must not serve.

        That is a wrong result or an exception in one of the forms, or a refusal of all.
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
                    refusal = refusal_of(error)
                    said = f"refused: {refusal}" if refusal else f"raised: {quote(error)}"
                    fault = f"{said} ({tokens} x {form.name})"
                if not fault:
                    served.append(one)
                    break
                why.append(fault)
            else:
                told = "; ".join(dict.fromkeys(why)) or "vLLM has no form of its own for this call"
                if not why or not all(fault.startswith("refused: ") for fault in why):
                    return told
                served.append(told)
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
        """What is wrong with its results for fresh inputs, ordinary and large; or nothing."""
        impl = dataclasses.replace(
            served.impl,
            fn=self._poisoning(served),
            supports=cast("Any", asked_for(served.impl, self.spec)),
        )
        for large in (True, False):
            form.switch(large=large)
            rows = self._trials.rows(tokens, large, "drawn" if large else "standing")
            laid = rows_of(form.pool(large), rows)
            name = f"{tokens} x {form.name}" + ", large values" * large
            sample = Sample(name, form.call(laid).args)
            off = partial(form.off, large, rows)
            found = compare(impl, self.spec, sample, self.dtype, off=off)
            if found.status != "ok":
                form.switch(large=False)
                return f"{found.status}: {found.reason} ({name})"
        return ""

    def _poisoning(self, served: _Served) -> Callable[..., Any]:
        """Its call, with NaN where an allocator is likely to give it the memory of its results."""

        def poisoned(*args: Any) -> Any:
            shapes = parts(self.spec.fake(*args))
            blocks = [part.new_full(part.shape, math.nan) for part in shapes if _is_float(part)]
            del shapes, blocks
            try:
                result = each_part(served.call(*args), partial(_within, args))
            except Exception as error:
                refusal = refusal_of(error)
                if refusal:
                    raise NotImplementedError(refusal) from None
                raise
            return each_part(result, partial(_laid_out, args)) if served.bare else result

        return poisoned

    def _function(self, contender: Contender, impl: OpImpl, form: int) -> _Ways:
        """The op as a layer of this mode calls the implementation in one form, and as the host
        launches such a call; made once."""
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
            if self._captures and is_opaque(impl):
                return function, function  # a compiler would take it whole
            return self._compiled(function, form), function
        if contender.bare or impl.needs_layer:
            function = as_call(impl, self.spec)
        else:
            function = call_guard(plan.chain(op, self.spec.consumable))
        return function, function

    @property
    def _captures(self) -> bool:
        """Whether calls are timed as the replay of a graph, of which Python is no part."""
        return self.mode == "compiled" and self.device.type == "cuda"

    def _is_traced(self, contender: Contender) -> bool:
        return self.traced is None or contender.name in self.traced

    def _compiled(self, function: Callable[..., Any], form: Form) -> Callable[..., Any]:
        """One graph for every number of tokens, without guards: that is how vLLM compiles.

        Heads of one projection are views that the graph makes of it, as a model does: two inputs of
        a graph that share memory are another case to a compiler.
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

        # Dynamo keeps what it has compiled with the code object; every graph needs its own.
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
        # vLLM compiles with its largest batch, and Inductor chooses its tiles by the first call.
        own = inputs(self._laid(form, self.sizes.tokens[-1], 0).args)
        for name, arg in zip(self.spec.parameters, own, strict=True):
            if self.spec.has_rows(name, arg):
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        compiled(*own)
        form.switch(large=False)
        return (lambda *args: compiled(*inputs(args))) if slices else compiled

    def _whole(self, view: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """The projection of which `view` is a part, as one that begins where its storage does.

        What torch makes of an operator that writes into two views of an input reads the views from
        the beginning of the storage.
        """
        key = view.data_ptr(), view.shape[0]
        if key not in self._wholes:
            offset = view.storage_offset() - piece.start
            whole = view.as_strided((view.shape[0], piece.width), (piece.width, 1), offset)
            self._wholes[key] = torch.utils.dlpack.from_dlpack(whole)
        return self._wholes[key]

    # How long it takes.

    def _bench(self, tokens: int, sound: Mapping[str, Sequence[_Served]], found: Measured) -> Bench:
        """Timers for everybody who is right, with arguments that they share.

        Who raises meanwhile is rejected.
        """
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
        for name, served in sound.items():
            if name not in found.rejected:
                with self._rejecting(name, tokens, found, "was made ready to be timed"):
                    self._make_ready(bench, name, served, sets)
        return bench

    def _make_ready(
        self, bench: Bench, name: str, served: Sequence[_Served], sets: Sequence[Sequence[_Laid]]
    ) -> None:
        args = [[laid.args for laid in of_form] for of_form in sets]
        timer = bench.timer(
            [
                (one.timed, of_form, self._renew(one, laid))
                for one, of_form, laid in zip(served, args, sets, strict=True)
            ]
        )
        bench.timers[name] = partial(self._sum, bench, name, timer)
        calls = [(one.launched, of_form) for one, of_form in zip(served, args, strict=True)]
        bench.launches[name] = partial(bench.launch, calls)

    def _with_own(self, sets: Sequence[_Laid]) -> list[_Laid]:
        """The calls, with weights of their own in turn, so many that caches hold none of them until
        it is its turn again: in a model each layer has another one."""
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
        """What is raised in the block is why `name` is rejected."""
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
        """Arguments of a call, with activations of its own."""
        activations = rows_of(form.pool(False), self._trials.rows(tokens, salt))
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
        first: the parameter that stands for the projection.
        width: features of a row.
        start: the view's first one.
        tail: the view's shape without its first dimension.
    """

    first: str
    width: int
    start: int
    tail: tuple[int, ...]


def _slices(spec: OpSpec, pool: Mapping[str, torch.Tensor]) -> dict[str, _Piece]:
    """The activations that are views of one projection with others, by parameter."""
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
    """Whether it has consecutive features of each row of so many."""
    inner = view.ndim > 1 and view.stride(0) == width and view[0].is_contiguous()
    return inner and view.storage_offset() + view[0].numel() <= width


@dataclass(frozen=True)
class _Laid:
    """The arguments of one call, and how to give those that it consumes back what they held."""

    form: Form
    activations: Guarded
    args: tuple[Any, ...]


def _put(args: Sequence[Any], others: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """`args` with those of `others` at these places."""
    return tuple(others[n] if n in places else arg for n, arg in enumerate(args))


def _within(args: Sequence[Any], result: Any) -> Any:
    """`result`, as a view of an argument if it lies in its memory.

    One that is a view of `OpTuning._whole` has the memory of an argument, and another storage.
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
    """`result`, contiguous if it is not memory of an argument."""
    aliases: Callable[[Any, Any], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
    if not isinstance(result, torch.Tensor):
        return result
    is_own = any(isinstance(arg, torch.Tensor) and aliases(arg, result) for arg in args)
    return result if is_own else result.contiguous()


def _of_forms(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The median time of each form, of rounds with a time for each."""
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _is_float(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype.is_floating_point
