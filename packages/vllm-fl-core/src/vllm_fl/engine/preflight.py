"""Running a plan's implementations as they will serve: a wrong kernel is caught by name, at start.

Every candidate is called on the contract's samples and on the served model's sizes, in inference
mode, with many token counts, on guarded memory, twice on the same buffers, with values as large
as activations get; in compiled mode the first choice also as the compiler will have it. What will
serve is then called at further token counts, so that nothing of it is left to compile, and where
vLLM will capture graphs it is captured in one, which is replayed with other values.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..contracts import ModelSizes, OpSpec, Sample
from ..contracts.batches import POOL, STANDING_COUNTS, Order
from ..contracts.batches import rows as drawn_rows
from ..logs import get_logger
from ..plugins import breadcrumb
from ..plugins.forms import verdict_of
from ..plugins.loading import known_contracts
from ..text import quote
from . import graphs, launches, process_state
from .guarded import Guarded, bits, guarded, handed_over, poisoned, rows_of, taken
from .verification import (
    Comparison,
    LayerFactory,
    as_call,
    compare,
    dtype_name,
    misplaced,
    misuse,
    refusal_of,
    synchronise,
    tried,
)
from .wanted import Wanted, parts, wanted_of, worst

if TYPE_CHECKING:
    from ..plugins.registry import Owner
    from ..plugins.types import OpImpl

__all__ = [
    "Findings",
    "Form",
    "Trials",
    "as_provided",
    "dtypes_of",
    "find_faults",
    "release",
    "token_counts",
]

log = get_logger("engine")

SECONDS = 2.0
"""What all implementations of a start together may cost beyond the counts that are always tried;
each has an equal share, and what goes beyond it is left out."""

AGAIN_SECONDS = 0.2
"""A batch of more tokens than the pool has rows is tried a second time in the same memory, unless
making and calling it took longer than this: on a CPU that is much of what a start takes."""

WARM_SECONDS = 3.0
"""How long what will serve is called at the token counts of a warm-up which were not tried before;
each has an equal share, and what goes beyond it is left out."""

COMPILE_SECONDS = 2.0
"""How long forms are lowered at one start; what comes later is traced only. A compiler of C++ takes
seconds for each when its cache is cold."""

TRACE_SECONDS = 4.0
"""How long forms are compiled at all; what comes later is left out, but for an implementation's
first form, which is traced whatever it takes."""

LARGE_COUNTS = (1, 7, 64, 256)
"""Token counts of the large values, beside the largest batch: what they show lies in the numbers,
and in the tiles that a kernel takes for many rows."""

ORDERS: tuple[Order, ...] = ("standing", "drawn", "repeated", "alike")
"""The batches of so many tokens that are tried one after the other in the same memory. Of more than
64, only the first two are, and the third with one row less."""

COMPILED_COUNTS = (5, 7, 33, 300)
"""Token counts of the compiled form. One graph serves them all, as in vLLM; a graph of its own,
which 0 and 1 would have, is not what serves."""

_VALUES = {False: "other", True: "large"}

Fault = tuple[str, BaseException | None]

Provided = Sequence[Mapping[str, torch.dtype]]
"""The dtypes of what layers provide, by parameter: each set of them once."""


@dataclass
class Findings:
    """What was found.

    Args:
        faults: (op, impl id) -> (why it must not serve, its exception or None).
        remarks: what was not looked at, one phrase each, for the start line.
        refused: (op, impl id) -> a reason, of those that refuse every call which the model makes:
            these are right, and of no use here.
        smaller: op -> what of its calls was tried in a smaller size than the model's, one phrase
            each; empty where none of them was.
    """

    faults: dict[tuple[str, str], Fault] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    smaller: dict[str, list[str]] = field(default_factory=dict)


def find_faults(
    impls: Iterable[OpImpl],
    dtype: torch.dtype,
    device: torch.device,
    sizes: ModelSizes | None,
    *,
    compares: bool = True,
    compiled: Mapping[tuple[str, str], Callable[..., Any]] | None = None,
    backend: str = "inductor",
    layer_for: LayerFactory | None = None,
    seed: int | None = None,
    owners: Mapping[tuple[str, str], Owner] = MappingProxyType({}),
    specs: Mapping[str, OpSpec] | None = None,
    seconds: float | None = None,
    warm: Mapping[tuple[str, str], Sequence[int]] = MappingProxyType({}),
    captured: Mapping[tuple[str, str], int] = MappingProxyType({}),
    in_graphs: Collection[tuple[str, str]] = (),
    provided: Mapping[str, Provided] = MappingProxyType({}),
    profiled: bool = False,
) -> Findings:
    """Run each implementation on its contract's samples and on the model's own sizes.

    Args:
        impls: the implementations: every one that may take over a call.
        dtype: the model's dtype.
        device: the worker's device.
        sizes: the model's sizes; None where its configuration does not tell them.
        compares: whether results are compared with the oracle; otherwise they must only run.
        compiled: (op, impl id) -> the implementation as it is handed to the compiler, a function of
            the contract's parameters: for those that the model will be compiled with. They are
            lowered while time is left for it, and traced after that.
        backend: what lowers them: `inductor`, or `aot_eager`, which traces only.
        layer_for: who makes the layer for an implementation that needs one; None takes the
            contract's stand-in.
        seed: for the token counts that are drawn anew at each start; None draws one. It is logged.
        owners: (op, impl id) -> who brought it, for the note that is left by a process which a
            kernel ends.
        specs: the contracts by op; None takes those of the distributions that bring contracts
            and nothing else.
        seconds: how long further token counts are tried, for all implementations together; None
            takes `SECONDS`.
        warm: (op, impl id) -> the token counts at which it must have run once before it serves, in
            the order of their weight. Those that were not tried are called without a comparison.
        captured: (op, impl id) -> the token count at which it is captured in a graph: for those
            that vLLM will capture.
        in_graphs: (op, impl id) of those whose traced form compiled graphs may have.
        provided: op -> the dtypes of what the model's layers provide (`EngineFacts.provided`).
        profiled: whether a profile tells at how many tokens other kernels are launched, beside
            Triton: not for a process that serves afterwards.
    """
    specs = known_contracts().contracts if specs is None else specs
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    findings, thinned, of_others = Findings(), set[str](), set[str]()
    trials: dict[str, list[Trials]] = {}
    compiled = compiled or {}
    log.debug("verifying with seed %d", seed)
    impls = list(impls)
    share = (SECONDS if seconds is None else seconds) / max(1, len(impls))
    warm_share = WARM_SECONDS / max(1, len(warm))
    cold: dict[str, int] = {}
    compiling = _Compiling(backend)
    with breadcrumb.Watchdog(log) as watch:
        for impl in impls:
            key = impl.op_name, impl.impl_id
            spec = specs[impl.op_name]
            if impl.op_name not in trials:
                kinds = dtypes_of(spec, dtype)
                given = provided.get(impl.op_name, ())
                trials[impl.op_name] = [Trials(spec, k, device, sizes, seed, given) for k in kinds]
            if not trials[impl.op_name]:
                known = ", ".join(spec.dtypes)
                why = f"the contract of its op is for {known}, not for {dtype_name(dtype)}"
                findings.faults[key] = why, None
            owner = owners[key].name if key in owners else ""
            whose = owner and f" of {owner}"
            refusals: list[str] = []
            for trial in trials[impl.op_name]:
                run = _Run(
                    trial,
                    impl,
                    compares,
                    layer_for,
                    compiled.get(key),
                    compiling,
                    watch,
                    share,
                    warm.get(key, ()),
                    warm_share / len(trials[impl.op_name]),
                    captured.get(key, 0),
                    key in in_graphs,
                    profiled=profiled,
                )
                what = f"the verification of {key[0]}={key[1]}{whose}"
                with breadcrumb.running(what, owner, named=False):
                    fault = run.fault()
                of_others |= run.of_others
                if run.thinned:
                    thinned.add(f"{impl.op_name} of {impl.impl_id}")
                if run.cold:
                    cold[f"{impl.op_name} of {impl.impl_id}"] = min(run.cold)
                if fault is not None:
                    findings.faults[key] = fault
                    break
                refusals += filter(None, [run.refused_all])
            else:
                if refusals and len(refusals) == len(trials[impl.op_name]):
                    findings.refused[key] = refusals[0]
    if compiled:
        torch._dynamo.reset()  # vLLM compiles the model afterwards, and finds nothing of this
    findings.smaller = {op: each for op, some in trials.items() if (each := _smaller(some))}
    unknown = [op for op, some in trials.items() if sizes and some and not any(map(_calls, some))]
    trials.clear()
    release(device)
    if findings.smaller:
        findings.remarks.append(f"smaller than served: {', '.join(findings.smaller)}")
    if unknown:
        findings.remarks.append(f"not verified at its sizes: {', '.join(unknown)}")
    if compiling.traced_only:
        findings.remarks.append(f"traced, not lowered: {', '.join(sorted(compiling.traced_only))}")
    if compiling.left_out:
        forms = ", ".join(sorted(compiling.left_out))
        findings.remarks.append(f"compiled in fewer forms than usual: {forms}")
    if of_others:
        what = ", ".join(sorted(of_others))
        findings.remarks.append(f"not watched, since other threads change it: {what}")
    if thinned:
        findings.remarks.append(f"fewer batches than usual for {_whose(thinned)}")
    if cold:
        first = min(cold.values())
        where = f"at some sizes from {first} tokens on"
        findings.remarks.append(f"not warmed up {where}: {_whose(cold)}")
    return findings


def _calls(trials: Trials) -> list[Sample]:
    """The served model's calls that are tried, one of each form."""
    return [*(form.samples[0] for form in trials.forms), *trials.standing]


def _smaller(some: Iterable[Trials]) -> list[str]:
    phrases = (sample.smaller for trials in some for sample in _calls(trials))
    return [*dict.fromkeys(filter(None, phrases))]


def _whose(names: Collection[str]) -> str:
    """At most two by name."""
    return ", ".join(sorted(names)) if len(names) < 3 else f"{len(names)} implementations"


def dtypes_of(spec: OpSpec, dtype: torch.dtype) -> list[torch.dtype]:
    """In which an op is run for a model of `dtype`: that, or every one of an op of integers alone.

    None where the op has other floating dtypes only: the model's calls are none of its contract.
    """
    if dtype_name(dtype) in spec.dtypes:
        return [dtype]
    known = [getattr(torch, name) for name in spec.dtypes]
    return [] if any(kind.is_floating_point for kind in known) else known


def token_counts(largest: int, seed: int) -> tuple[list[int], list[int]]:
    """(counts that are always tried, further ones that are tried while time is left).

    Each is tried with one row less, too. So both sides of a power of two are among them.

    Args:
        largest: the largest batch, in tokens.
        seed: for those that are drawn anew.
    """
    rng = random.Random(seed)
    always = {1, 2, 3, 4, 8, 12, 16, 17, 32, 33, 64, 65, 100, 256, 257, largest}
    always.add(rng.randint(1, largest))
    powers = [1 << n for n in range(largest.bit_length() + 1)]
    edges = {p + d for p in powers for d in (0, 1)} - always
    drawn = {p + p // 2 + 1 for p in powers} | {rng.randint(1, largest) for _ in range(8)}
    others = {*range(1, 65), *drawn} - always - edges
    # Small batches cost little and are what decoding has; of large ones, the edges come first.
    small, large = [n for n in others if n <= 512], [n for n in others if n > 512]
    rng.shuffle(large)
    further = [*sorted(edges), *sorted(small), *large]
    return sorted(n for n in always if n <= largest), [n for n in further if 1 <= n <= largest]


class Form:
    """One kind of call of the served model: a pool of rows with ordinary values, and one with large
    ones, in one layout."""

    def __init__(self, spec: OpSpec, ordinary: Sample, large: Sample) -> None:
        self.spec = spec
        self.samples = (ordinary, large)
        self.name = ordinary.name.partition(" x ")[2]
        self.static = guarded(self._others(ordinary))
        self._pools: dict[bool, dict[str, torch.Tensor]] = {}
        self._wanted: dict[bool, list[Wanted | None]] = {}

    def _others(self, sample: Sample) -> dict[str, Any]:
        given = zip(self.spec.parameters, sample.args, strict=True)
        return {n: a for n, a in given if n not in self.spec.by_token or a is None}

    def switch(self, large: bool) -> None:
        """Write the weights and tables of the ordinary or the large values, in place."""
        for name, value in self._others(self.samples[large]).items():
            if isinstance(value, torch.Tensor):
                self.static.arguments[name].copy_(value)
        self.static.remember()

    def pool(self, large: bool) -> dict[str, torch.Tensor]:
        """The rows of the activations."""
        if large not in self._pools:
            self._pools[large] = poisoned(self.spec.with_rows(self.samples[large].args))
        return self._pools[large]

    def off(self, large: bool, rows: torch.Tensor, got: Any) -> tuple[float, str]:
        """(worst error as a share of the tolerance, what is wrong or nothing) of a batch's results.

        Where they have a row per token, or repeated rows change nothing, the oracle is asked once,
        about the pool. Of equal rows the first is compared with it, and each that has other bits.

        Args:
            large: which of the two pools.
            rows: those of the pool that the batch has.
            got: the results.
        """
        spec = self.spec
        holds_all = spec.ignores_repeats and len(rows.unique()) == self._rows
        if spec.whole_batch and not holds_all:
            return worst(got, self._of(self._batch(large, rows), rows.device))
        if large not in self._wanted:
            self._wanted[large] = self._of(self.samples[large], rows.device)
        count, exact = len(rows), self._wanted[large]
        tokens = torch.arange(count, device=rows.device)
        first = torch.full((self._rows,), count, device=rows.device)
        first.scatter_reduce_(0, rows, tokens, "amin")
        held = (first < count).nonzero().squeeze(1)
        if len(held) < self._rows:
            exact = [want and want.rows(held) for want in exact]
        off = worst(_of_tokens(got, first[held], count), exact, first[held])
        like = first[rows]
        again = (like < tokens).nonzero().squeeze(1)
        unlike = again[_differing(got, again, like[again], count)]
        for some in unlike.split(POOL) if not off[1] else ():
            exact = [want and want.rows(rows[some]) for want in self._wanted[large]]
            off = max(off, worst(_of_tokens(got, some, count), exact, some))
            if off[1]:
                break
        return off

    @cached_property
    def _rows(self) -> int:
        """How many rows the pool has."""
        return int(self.spec.tokens(self.samples[0].args))

    def _of(self, sample: Sample, device: torch.device) -> list[Wanted | None]:
        tokens = None
        if not self.spec.whole_batch:
            tokens = next(map(len, self.spec.with_rows(sample.args).values()), None)
        return [want and want.on(device) for want in wanted_of(self.spec, sample, tokens=tokens)]

    def _batch(self, large: bool, rows: torch.Tensor) -> Sample:
        """The call with these rows of the pool."""
        sample = self.samples[large]
        args = [
            arg[rows] if name in self.spec.by_token and arg is not None else arg
            for name, arg in zip(self.spec.parameters, sample.args, strict=True)
        ]
        return dataclasses.replace(sample, args=tuple(args))

    def call(self, activations: Guarded) -> Guarded:
        """The whole call: activations, weights and tables, in the contract's order."""
        both = {**handed_over(self.static.arguments), **activations.arguments}
        ordered = {name: both[name] for name in self.spec.parameters}
        return Guarded(ordered, (*activations.storages, *self.static.storages))


@dataclass
class Trials:
    """What every implementation of one op is tried with. The oracle is asked once.

    Args:
        spec: the op's contract.
        dtype: the model's.
        device: where it runs.
        sizes: the model's; None where its configuration does not tell them.
        seed: for what is drawn.
        provided: the dtypes of what the model's layers provide; none where nothing is known of
            them: then all is of the contract's own choice.
    """

    spec: OpSpec
    dtype: torch.dtype
    device: torch.device
    sizes: ModelSizes | None
    seed: int
    provided: Provided = ()
    _wanted: dict[int, list[Wanted | None]] = field(default_factory=dict, init=False)

    @cached_property
    def samples(self) -> list[Sample]:
        """The contract's own samples, some of them laid out otherwise, and the served model's
        calls that stand."""
        return [*tried(self.spec, self.dtype, self.device), *self.standing]

    @cached_property
    def standing(self) -> list[Sample]:
        """The served model's calls of a contract whose batches cannot be rearranged."""
        if self.sizes is None or not self.spec.stands:
            return []
        counts = [n for n in STANDING_COUNTS if n <= self.largest]
        usual, last = (dataclasses.replace(self.sizes, tokens=(*n,)) for n in (counts, counts[-1:]))
        return [
            *self.spec.served(usual, self.dtype, self.device, False),
            *self.spec.served(last, self.dtype, self.device, True),
        ]

    def shared(self) -> dict[int, Guarded]:
        """Index of a standing call -> memory, one for all of equal shapes: what is written anew
        there are weights, too, as after an update."""
        found: dict[Any, Guarded] = {}
        memories = {}
        for index in range(len(self.samples) - len(self.standing), len(self.samples)):
            args = self.samples[index].args
            shapes = tuple(
                (arg.shape, arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args
            )
            if shapes not in found:
                given = dict(zip(self.spec.parameters, args, strict=True))
                found[shapes] = guarded(given, self.spec.by_token)
            memories[index] = found[shapes]
        return memories

    def wanted(self, index: int) -> list[Wanted | None]:
        """What a sample of the contract must give."""
        if index not in self._wanted:
            self._wanted[index] = wanted_of(self.spec, self.samples[index])
        return self._wanted[index]

    @cached_property
    def forms(self) -> list[Form]:
        """The calls of the served model."""
        if self.sizes is None or self.spec.stands:
            return []
        pool = dataclasses.replace(self.sizes, tokens=(min(POOL, self.largest),))
        kinds = (self.spec.served(pool, self.dtype, self.device, big) for big in (False, True))
        pairs = [*zip(*kinds, strict=True)]
        passed: dict[tuple[int, str], list[Sample]] = {}
        for dtypes in self.provided:
            for number, pair in enumerate(pairs):
                given = [as_provided(self.spec, sample, dtypes) for sample in pair]
                # A layer may pass what is no call of the op; two may make the same calls.
                if self.spec.check(*given[0].args) is None:
                    passed.setdefault((number, given[0].name), given)
        return [Form(self.spec, *pair) for pair in (passed.values() or pairs)]

    @property
    def largest(self) -> int:
        """The largest batch, in tokens."""
        return self.sizes.tokens[-1] if self.sizes else 1

    def rows(self, count: int, salt: int = 0, order: Order = "drawn") -> torch.Tensor:
        """The rows of the pool that make a batch of `count` tokens, in this order, drawn for it."""
        generator = torch.Generator("cpu").manual_seed(self.seed + 2 * count + salt)
        pool = min(POOL, self.largest)
        return drawn_rows(count, pool, generator, order).to(self.device)


def as_provided(spec: OpSpec, sample: Sample, dtypes: Mapping[str, torch.dtype]) -> Sample:
    """A call with what layers provide in the dtypes that theirs has."""
    told, args = [], []
    for name, arg in zip(spec.parameters, sample.args, strict=True):
        dtype = dtypes.get(name)
        if isinstance(arg, torch.Tensor) and dtype is not None and arg.dtype != dtype:
            args.append(arg.to(dtype))
            told.append(f", {name} {dtype_name(dtype)}")
        else:
            args.append(arg)
    return dataclasses.replace(sample, name=sample.name + "".join(told), args=tuple(args))


def _differing(got: Any, tokens: torch.Tensor, others: torch.Tensor, count: int) -> torch.Tensor:
    """Which of these tokens of a batch of `count` have other bits than those that they equal.

    A right kernel need not give equal bits: it takes other tiles at an edge.
    """
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for part in parts(got) if len(tokens) else ():
        if isinstance(part, torch.Tensor) and _has_rows(part, count):
            mine = bits(part.detach())
            found |= (mine[tokens] != mine[others]).reshape(len(tokens), -1).any(1)
    return found


def _has_rows(part: torch.Tensor, count: int) -> bool:
    """Whether it has a row per token, and is no one number for all of them."""
    return part.ndim > 0 and len(part) == count and (part.numel() > 1 or count == 1)


def _of_tokens(got: Any, tokens: torch.Tensor, count: int) -> Any:
    """The results of these tokens, of a batch of `count`."""
    if isinstance(got, tuple):
        return tuple(_of_tokens(part, tokens, count) for part in got)
    if not isinstance(got, torch.Tensor) or not _has_rows(got, count):
        return got
    return taken(got, tokens)


class _Compiling:
    """What lowers the compiled forms, and how much time is left for it."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.traced_only: set[str] = set()
        self.left_out: set[str] = set()
        self._begun: float | None = None

    def has_time(self, seconds: float) -> bool:
        """Whether less than `seconds` have gone since the first form, which always has time."""
        if self._begun is None:
            self._begun = time.monotonic()
        return time.monotonic() - self._begun < seconds


class _Stop(Exception):
    """A fault was found: why the implementation must not serve."""

    def __init__(self, why: str, error: BaseException | None = None) -> None:
        super().__init__(why)
        self.why, self.error = why, error


class _Refuses(_Stop):
    """It takes none of the served model's calls: nothing more of it can be tried."""


@dataclass
class _Run:
    """One implementation on all trials of its op."""

    trials: Trials
    impl: OpImpl
    compares: bool
    layer_for: LayerFactory | None
    compiled: Callable[..., Any] | None
    compiling: _Compiling
    watch: breadcrumb.Watchdog
    seconds: float
    warm: Sequence[int] = ()
    warm_seconds: float = 0.0
    captured: int = 0
    in_graphs: bool = False
    tried: set[tuple[str, int]] = field(default_factory=set)
    cold: Sequence[int] = ()
    refusals: list[str] = field(default_factory=list)
    served: set[str] = field(default_factory=set)
    thinned: bool = False
    was_slow: bool = False
    refused_all: str = ""
    asked: str = "it"
    of_others: set[str] = field(default_factory=set)
    profiled: bool = False

    def __post_init__(self) -> None:
        self.spec = self.trials.spec
        self.call = as_call(self.impl, self.spec, self.layer_for)

    def fault(self) -> Fault | None:
        """Why it must not serve, or None."""
        before = process_state.state_of(self.trials.device)
        try:
            with torch.inference_mode():
                self._run_samples()
                self._check_state(before)
                self._run_served(before)
                self._warm_up()
                self._run_captured()
                self._run_traced()
                self._run_compiled()
                self._check_state(before)
        except _Refuses as refused:
            self.refused_all = refused.why
        except _Stop as stop:
            return stop.why, stop.error
        except Exception as error:  # of ours, where the implementation has spoiled what we rely on
            problem = self._changed(before)
            if problem is None:
                raise
            return problem, error
        finally:
            process_state.restore(before, self.trials.device)
            self.of_others = before.others
        return None

    def _check_state(self, before: process_state.State) -> None:
        problem = self._changed(before)
        if problem is not None:
            raise _Stop(problem)

    def _changed(self, before: process_state.State) -> str | None:
        """What it has changed of the process, in words."""
        with torch.inference_mode(False):
            problem = process_state.changed(before, self.trials.device, self._again)
        return None if problem is None else f"it changed {problem} of the whole process"

    def _again(self) -> None:
        """Some of its calls once more, for what they change of the process; nothing is compared."""
        with torch.inference_mode():
            for sample in self.trials.samples:
                compare(
                    self.impl,
                    self.spec,
                    sample,
                    self.trials.dtype,
                    off=lambda got: (0.0, ""),
                    layer_for=self.layer_for,
                )
            for form in (form for form in self.trials.forms if form.name in self.served):
                for count in {1, min(7, self.trials.largest), self.trials.largest}:
                    self._call_at(form, count)

    def _run_samples(self) -> None:
        """The contract's own samples, edges that every caller may bring, and calls that stand."""
        refused: list[str] = []
        own = len(self.trials.samples) - len(self.trials.standing)
        memories = self.trials.shared()
        for index, sample in enumerate(self.trials.samples):
            run = partial(compare, self.impl, self.spec, sample, self.trials.dtype)
            if index in memories:
                run = partial(run, memory=memories[index])
            off = partial(worst, wanted=self.trials.wanted(index))
            result: Comparison = self._timed(
                sample.name, partial(run, off=off, layer_for=self.layer_for)
            )
            if result.status == "raised" or (result.status == "wrong" and self.compares):
                what = "it is wrong: " if result.status == "wrong" else ""
                raise _Stop(f"{what}{result.reason} ({sample.name}, {result.dtype})", result.error)
            if result.status == "refused" and index >= own:
                refused.append(f"{sample.name}, {result.dtype}: {result.reason}")
        if refused and len(refused) == len(self.trials.standing):
            raise _Refuses(refused[0])

    def _run_served(self, before: process_state.State) -> None:
        """The served model's calls, with many token counts."""
        always, further = token_counts(self.trials.largest, self.trials.seed)
        for form in self.trials.forms:
            form.switch(large=False)
            for count in always:
                orders = ORDERS if count <= 64 else ORDERS[:2]
                self._run_batches(form, count, orders, less="drawn" if count <= 64 else ORDERS[2])
            self._in_another_thread(form)
            self._check_intact(form)
            form.switch(large=True)
            for count in (count for count in LARGE_COUNTS if count < self.trials.largest):
                self._run_batches(form, count, ORDERS[:2], large=True)
            self._run_batches(form, self.trials.largest, ORDERS[1:2], large=True)
            self._check_intact(form)
        deadline = time.monotonic() + self.seconds
        for form in self.trials.forms:
            form.switch(large=False)
            self._run_edges(form, deadline)
        for count in further:
            if time.monotonic() > deadline:
                self.thinned = True
                break
            for form in self.trials.forms:
                self._run_batches(form, count, ORDERS[1:2], less=ORDERS[0])
        for form in self.trials.forms:
            self._check_intact(form)
        if self.trials.forms and not self.served:
            self._check_state(before)
            raise _Refuses(self.refusals[0])

    def _run_batches(
        self,
        form: Form,
        count: int,
        orders: Iterable[Order],
        *,
        less: Order | None = None,
        large: bool = False,
    ) -> None:
        """Batches one after the other in the same memory, their results kept to the end.

        Args:
            form: the call.
            count: tokens of each.
            orders: how each takes its rows.
            less: how another one does, of one token less, as where a request has ended.
            large: whether its values are.
        """
        trials = self.trials
        self.tried.add((form.name, count))
        batches = [(count, order) for order in orders]
        if less is not None and count > 1:
            batches.append((count - 1, less))
        laid: Guarded | None = None
        results: list[tuple[str, torch.Tensor, Any]] = []
        begun = time.monotonic()
        for number, (tokens, order) in enumerate(batches):
            took_long = count > POOL and time.monotonic() - begun > AGAIN_SECONDS
            if number and took_long and not self.was_slow:  # one that stalls is called again
                self.thinned = True
                break
            rows = trials.rows(tokens, number, order)
            laid = rows_of(form.pool(large), rows, into=laid)
            where = self._where(f"{tokens} x {form.name}", large)
            got = self._call_once(form, laid, where)
            if got is None:
                return
            said = f"{where}, same buffers again" if number else where
            results.append((said, rows, _kept(got, form.call(laid))))
        for where, rows, got in results if self.compares else ():
            self._compare(form, rows, got, where, large=large)

    def _where(self, what: str, large: bool = False) -> str:
        return f"{what}, {dtype_name(self.trials.dtype)}" + ", large values" * large

    def _compare(
        self,
        form: Form,
        rows: torch.Tensor,
        got: Any,
        where: str,
        *,
        large: bool = False,
        wrong: str = "it is wrong",
    ) -> None:
        """A result that is off, or cannot be compared, is a fault."""
        with self._blamed("its result cannot be compared:", where):
            _, problem = form.off(large, rows, got)
        if problem:
            raise _Stop(f"{wrong}: {problem} ({where})")

    def _run_edges(self, form: Form, deadline: float) -> None:
        """Both sides of the token counts from which on it launches other kernels."""

        def kernels(count: int) -> launches.Launched:
            call = partial(self._call_at, form, count)
            return launches.launched(call, self.trials.device, profiled=self.profiled)

        for count in launches.edges(kernels, self.trials.largest, deadline):
            self._run_batches(form, count, ORDERS[1:2], less=ORDERS[0])

    def _warm_up(self) -> None:
        """Whatever it compiles when it is called, it has compiled afterwards."""
        deadline = time.monotonic() + self.warm_seconds
        for form in self.trials.forms if self.warm else ():
            form.switch(large=False)
        for number, count in enumerate(self.warm):
            for form in self.trials.forms:
                if (form.name, count) in self.tried:
                    continue
                if time.monotonic() > deadline:
                    self.cold = self.warm[number:]
                    return
                self._call_at(form, count)

    def _call_at(self, form: Form, count: int) -> None:
        """One call with so many tokens, of which nothing is compared."""
        where = self._where(f"{count} x {form.name}") + ", warming up"
        _, args = self._call_of(form, count)
        form.static.restore(self.spec.consumed(self.impl.consumes, args))
        with self._blamed("it raised", where):
            self._timed(where, partial(self._answer, args))

    def _call_of(self, form: Form, count: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """(its rows of the pool, the arguments) of a call with so many tokens."""
        rows = self.trials.rows(count)
        return rows, form.call(rows_of(form.pool(False), rows)).args

    @contextmanager
    def _blamed(self, what: str, where: str) -> Iterator[None]:
        """Inside the block the implementation runs: a refusal is noted, and all else that it raises
        is a fault, `what` it did."""
        try:
            yield
        except NotImplementedError as error:
            self.refusals.append(f"{where}: {error}")
        except (_Stop, KeyboardInterrupt):
            raise
        except BaseException as error:  # a plugin may raise anything, SystemExit included
            raise _Stop(f"{what} {quote(error)} ({where})", error) from error

    def _in_another_thread(self, form: Form) -> None:
        """A batch in another thread than the one that builds the model, as micro-batches have."""
        stopped: list[BaseException] = []

        def run() -> None:
            device = self.trials.device
            if device.index is not None:
                torch.get_device_module(device).set_device(device)
            try:
                with torch.inference_mode():
                    self._run_batches(form, min(7, self.trials.largest), ORDERS[:2])
            except BaseException as error:
                stopped.append(error)

        thread = threading.Thread(target=run, name="vllm-fl verification")
        thread.start()
        thread.join()
        if stopped and isinstance(stopped[0], _Stop):
            raise _Stop(f"in another thread {stopped[0].why}", stopped[0].error)
        if stopped:
            raise stopped[0]

    def _call_once(self, form: Form, laid: Guarded, where: str) -> Any:
        """One call; its result, or None when it was refused."""
        impl, spec = self.impl, self.spec
        call = form.call(laid)
        consumed = spec.consumed(impl.consumes, call.args)
        form.static.restore(consumed)  # a cache: the call before has written into it
        laid.remember()
        try:
            got = self._timed(where, partial(self._answer, call.args))
            self.served.add(form.name)
            if not self.compares:
                return got
            problem = misplaced(got, spec.fake(*call.args), call, consumed)
            problem = problem or misuse(laid, consumed, impl, spec)
        except NotImplementedError as error:
            if call.disturbance(frozenset()) is not None and self.compares:
                why = "it refuses a call after it has written into its arguments"
                raise _Stop(f"{why}, which the next candidate is given ({where})", error) from error
            self.refusals.append(f"{where}: {error}")
            return None
        except (_Stop, KeyboardInterrupt):
            raise
        except BaseException as error:  # a plugin may raise anything, SystemExit included
            raise _Stop(f"{self.asked} raised {quote(error)} ({where})", error) from error
        if problem:
            raise _Stop(f"it is wrong: {problem} ({where})")
        return got

    def _answer(self, args: tuple[Any, ...]) -> Any:
        """What it gives for a call that its `supports` takes.

        Raises:
            NotImplementedError: it refuses the call.
        """
        self._accept(args)
        got = self.call(*args)
        synchronise(self.trials.device)
        return got

    def _accept(self, args: tuple[Any, ...]) -> None:
        self.asked = "its supports"
        verdict = verdict_of(self.impl, self.spec, args)
        self.asked = "it"
        if verdict is not True:
            raise NotImplementedError(str(verdict))

    def _check_intact(self, form: Form) -> None:
        """Weights and tables are as they were before all these calls, but for consumed ones."""
        consumed = self.spec.consumed(self.impl.consumes, form.samples[0].args)
        problem = misuse(form.static, consumed, self.impl, self.spec)
        if problem and self.compares:
            raise _Stop(f"it is wrong: {problem} ({form.name})")

    def _run_captured(self) -> None:
        """In a captured graph, which is replayed with other values in the same memory."""
        for form in self.trials.forms if self.captured else ():
            form.switch(large=False)
            where = self._where(f"{self.captured} x {form.name}") + ", in a graph"
            laid = rows_of(form.pool(False), self.trials.rows(self.captured))
            args = form.call(laid).args
            consumed = self.spec.consumed(self.impl.consumes, args)
            begun, made = time.monotonic(), None
            with self._blamed("it cannot be captured in a graph:", where):
                made = self._timed(where, partial(self._captured, args))
            if made is None:
                continue
            replay, result = made
            for number, large in enumerate((False, True), 1):
                form.switch(large)
                form.static.restore(consumed)
                rows = self.trials.rows(self.captured, number)
                rows_of(form.pool(large), rows, into=laid)
                replay()
                if self.compares:
                    wrong = f"it is wrong when a graph is replayed with {_VALUES[large]} values"
                    self._compare(form, rows, result, where, large=large, wrong=wrong)
            log.debug(
                "%s=%s captured and replayed twice in %.2f s (%s)",
                self.spec.name,
                self.impl.impl_id,
                time.monotonic() - begun,
                where,
            )

    def _captured(self, args: tuple[Any, ...]) -> tuple[Callable[[], object], Any]:
        self._accept(args)
        return graphs.captured(partial(self.call, *args), self.trials.device)

    def _run_traced(self) -> None:
        """The traced form, which compiled graphs may have in its place: as it is traced, and run as
        it is written."""
        if not self.in_graphs or self.impl.traced is None:
            return
        from .traced import trial  # what traces is not loaded for an engine that compiles nothing

        traced = dataclasses.replace(self.impl, fn=self.impl.traced)
        for form in (form for form in self.trials.forms if form.name in self.served):
            form.switch(large=False)
            for count in COMPILED_COUNTS[:2]:
                rows, args = self._call_of(form, count)
                where = self._where(f"traced, {count} x {form.name}")
                if why := trial(self.impl, self.spec, args):
                    raise _Stop(f"{why} ({where})")
                sample = Sample(where, args)
                off = partial(form.off, False, rows)
                found = compare(traced, self.spec, sample, self.trials.dtype, off=off)
                if found.status == "raised" or (found.status == "wrong" and self.compares):
                    what = "it is wrong: " if found.status == "wrong" else ""
                    raise _Stop(f"{what}{found.reason} ({where})", found.error)

    def _run_compiled(self) -> None:
        """The form that the compiler will get, in one graph for all batches."""
        if self.compiled is None:
            return
        compiling, whose = self.compiling, f"{self.spec.name} of {self.impl.impl_id}"
        # A form that is refused stays with who comes next: there is nothing of this one to compile.
        forms = [form for form in self.trials.forms if form.name in self.served]
        for number, form in enumerate(forms):
            form.switch(large=False)
            if compiling.has_time(COMPILE_SECONDS):
                self._run_lowered(form, compiling.backend)
                continue
            if number and not compiling.has_time(TRACE_SECONDS):
                compiling.left_out.add(whose)
                break
            self._run_lowered(form, "aot_eager")
            if compiling.backend != "aot_eager":
                compiling.traced_only.add(whose)

    def _run_lowered(self, form: Form, backend: str) -> None:
        torch._dynamo.reset()
        call = torch.compile(self.compiled, fullgraph=True, dynamic=True, backend=backend)
        for count in COMPILED_COUNTS:
            if count > self.trials.largest:
                continue
            how = f"compiled by {backend}, {count} x {form.name}"
            where = self._where(how)
            rows, args = self._call_of(form, count)
            form.static.restore(self.spec.consumed(self.impl.consumes, args))
            args = _apart(self.spec, args)
            try:
                with torch._dynamo.config.patch(error_on_recompile=count != COMPILED_COUNTS[0]):
                    got = self._timed(where, partial(call, *args), compiles=True)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if refusal := refusal_of(error):
                    self.refusals.append(f"{where}: {refusal}")
                    return
                raise _Stop(f"it cannot be compiled: {quote(error)} ({where})", error) from error
            if self.compares:
                self._compare(form, rows, got, where)

    def _timed(self, where: str, run: Callable[[], Any], *, compiles: bool = False) -> Any:
        """Run it, named in the log while it takes long. Two slow calls in a row are a fault: it
        would stall the engine.

        One that `compiles` may take as long as it likes.
        """
        line = "Implementation '%s' of op '%s' has been running for %.0f s on one call (%s)"
        impl = self.impl
        with self.watch.over(line, impl.impl_id, impl.op_name, breadcrumb.SLOW, where):
            result = run()
        slow = self.watch.seconds > breadcrumb.SLOW and not compiles
        if slow and self.was_slow:
            raise _Stop(f"takes {self.watch.seconds:.0f} s for one call ({where})")
        self.was_slow = slow
        return result


def _apart(spec: OpSpec, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, each activation in memory of its own, of the same strides.

    Heads of one projection are views that a model's graph makes itself. As inputs of a graph that
    writes into them they are another case: torch makes one input of their memory then, whose size
    it does not keep dynamic.
    """

    def place(arg: Any) -> int:
        return int(arg.untyped_storage().data_ptr()) if isinstance(arg, torch.Tensor) else 0

    seen = Counter(map(place, args))
    return tuple(
        arg.new_empty_strided(arg.shape, arg.stride()).copy_(arg)
        if name in spec.by_token and place(arg) and seen[place(arg)] > 1
        else arg
        for name, arg in zip(spec.parameters, args, strict=True)
    )


def _kept(result: Any, laid: Guarded) -> Any:
    """A result that stays what it is when the memory of the arguments `laid` is written anew."""
    if isinstance(result, tuple):
        return tuple(_kept(part, laid) for part in result)
    alias: Callable[..., bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
    if result is not None and any(alias(result, storage.memory) for storage in laid.storages):
        return result.clone()
    return result


def release(device: torch.device) -> None:
    """Leave nothing allocated: vLLM sizes its KV cache by what is free afterwards."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
        return
    # Of the CPU's memory it is what the process holds, and glibc keeps what is given back.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
