"""Comparison with the oracle on live tensors: weights, strides and values of the model.

While a forward of the loaded model runs inside `Live.watching`, the guards of its plan pass each
call to `Live`. The first call of an implementation in each kind of layer, and with each layout, is
compared. Afterwards the guards are restored.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from vllm_fl.contracts import ModelSizes, OpSpec, Sample
from vllm_fl.engine.plan import Plan
from vllm_fl.logs import get_logger
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.inspection import FAILED, Key, Objection
from vllm_fl.plugins.plugin import Owner
from vllm_fl.plugins.types import OpImpl
from vllm_fl.text import quote

from .budget import Budget, Valve, as_calls
from .expected import Deviation
from .guarded import Guarded, in_place, taken
from .oracle import each_part, float_activations, magnitudes, wanted_of, worst
from .replacing import computes, replacing
from .verification import (
    CallFailure,
    Outcome,
    attempt,
    called,
    compared,
    contract_args,
    dtype_name,
    synchronise,
)

log = get_logger("engine")

ROWS = 64
"""Maximum number of compared rows of a call if each row is independent. The number is small because
the oracle computes in float64 on the CPU.
"""

CALLS = 2000.0
"""Maximum number of compared calls at startup, weighted by the bytes that are copied. The number is
limited because the oracle computes in float64 on the CPU.
"""

ROWS_AGAIN, CALLS_AGAIN = 24, 200.0
"""`ROWS` and `CALLS` when the model is run again. Errors that are new then affect all rows of a
call or none.
"""

NO_MEMORY = "out of memory"
"""Why a call was not compared: the call, or copying its arguments, ran out of memory."""

REAL = 1e9
"""Maximum magnitude of activations that a model computes, with a margin. Larger numbers, NaN and
infinity are uninitialised memory. Calls with them are not compared."""

LARGEST = 2**28
"""Bytes of a call's arguments above which they are not copied. Experts' weights are larger. Writes
to them are not detected, and only the values that some rows read are copied (`OpSpec.part`). If the
contract has no `part`, the call is not compared."""

PART = 2**30
"""Maximum bytes of an `OpSpec.part`. It limits the number of compared rows."""

PART_ROWS = 8
"""Maximum rows of an `OpSpec.part`. The experts of each row are computed in float64."""


@dataclass
class _Before:
    """A call's state before it is made.

    Args:
        call: the arguments in place, with their content saved.
        rows: compared rows, ascending; None for all.
        sample: the call of these rows, on the CPU.
    """

    call: Guarded
    rows: torch.Tensor | None
    sample: Sample

    def made(self) -> Sample:
        """Return the whole call with its arguments as before it was made."""
        self.call.restore(self.call.arguments.keys())
        return replace(self.sample, args=self.call.args)


@dataclass
class Live:
    """Observations of a plan's implementations while a model runs.

    Args:
        models: prefix of layer names -> the model, and its draft model if there is one.
        owners: (op, impl id) -> package, for the note that remains if a kernel crashes the process.
        again: whether the model was run before. Fewer rows and calls are then compared, and calls
            that run out of memory are skipped.
        objections: (op, impl id) -> why it must not run.
        left_out: op -> why some of its calls were not compared.
        compared: number of compared calls.
        drafted: number of compared calls in the draft model.
        skipped: calls that were not compared because of unrealistic activations.
        refused: (op, impl id) -> why it supports no call, although it is their first candidate.
        served: (op, impl id) of implementations that computed a call.
        reached: ops that were called, compared or not.
        entered: names of the layers that ran.
        worst: the maximum error of correct calls, relative to the tolerance.
    """

    plan: Plan
    models: Mapping[str, torch.nn.Module]
    device: torch.device
    owners: Mapping[Key, Owner] = field(default_factory=dict)
    again: bool = False
    valve: Valve = field(default_factory=Valve)
    objections: dict[Key, Objection] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    drafted: int = 0
    skipped: int = 0
    refused: dict[Key, str] = field(default_factory=dict, init=False)
    served: set[Key] = field(default_factory=set, init=False)
    reached: set[str] = field(default_factory=set, init=False)
    entered: set[str] = field(default_factory=set, init=False)
    worst: float = field(default=0.0, init=False)
    _inside: list[str] = field(default_factory=list, init=False)
    _seen: set[Any] = field(default_factory=set, init=False)
    _short: set[Key] = field(default_factory=set, init=False)
    _running: bool = field(default=False, init=False)
    _budget: Budget = field(init=False, repr=False)
    _growth: dict[str, int] = field(default_factory=dict, init=False)
    _watch: breadcrumb.Watchdog = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._budget = Budget(CALLS_AGAIN if self.again else CALLS, self.valve)

    @contextmanager
    def watching(self) -> Iterator[None]:
        record = self.plan.record
        record.begin()
        try:
            with ExitStack() as stack:
                for prefix, model in self.models.items():
                    for name, module in model.named_modules():
                        enter = partial(self._enter, prefix + name)
                        leave = module.register_forward_hook(self._leave, always_call=True)
                        stack.enter_context(module.register_forward_pre_hook(enter))
                        stack.enter_context(leave)
                stack.enter_context(self.valve.verifying())
                self._watch = stack.enter_context(breadcrumb.Watchdog(log))
                stack.enter_context(replacing(record, self._instead, self._asking))
                yield
        finally:
            self.reached |= {op for op, _ in record.refusals}
            self.refused |= record.passed_over()
            for key in self.served | self.objections.keys():
                self.refused.pop(key, None)
            record.begin()  # discard the counts, because serving has not begun

    def _enter(self, name: str, *_: Any) -> None:
        self._inside.append(name)
        self.entered.add(name)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def _instead(self, impl: OpImpl) -> Callable[..., Any]:
        if not computes(self.plan, impl):
            return impl.fn
        spec = self.plan.contracts[impl.op_name]

        def noting(*given: Any) -> Any:
            self.reached.add(spec.name)
            result = self.call(spec, impl, given)
            self.served.add((spec.name, impl.impl_id))
            return result

        return noting

    def _asking(self, impl: OpImpl) -> Callable[..., Any] | None:
        entry, supports = self.plan.entries.get(impl.op_name), impl.supports
        planned = {i.impl_id for i in entry.impls} if entry else set()
        if supports is None or impl.impl_id not in planned:
            return supports  # None, or the implementation is not in the plan

        def asked(*args: Any) -> Any:
            with self._watched(impl):
                return supports(*args)

        return asked

    @contextmanager
    def _watched(self, impl: OpImpl) -> Iterator[None]:
        """Record that the block runs the implementation, for the next process if this one crashes.
        Log a slow block.
        """
        owner = self.owners.get((impl.op_name, impl.impl_id))
        owner_name = owner.name if owner else ""
        where = f"on live tensors in layer {self._layer}{owner_name and f' of {owner_name}'}"
        what = f"the verification of {impl.op_name}={impl.impl_id} {where}"
        with breadcrumb.noting(what, named=False), self._watch.over(what):
            yield

    def call(self, spec: OpSpec, impl: OpImpl, given: tuple[Any, ...]) -> Any:
        """Call `impl`. Compare the call if it is the first of its kind."""
        key = spec.name, impl.impl_id
        args = contract_args(spec, impl, given)
        if key in self.objections or key in self._short:
            return _zeros(spec.fake(*args))
        kind = *key, _kind_of(self._layer), _layout(args)
        if self._running:
            return impl.fn(*given)
        if kind in self._seen:
            with self._watched(impl):
                return impl.fn(*given)
        try:
            before = self._before(spec, impl, args)
        except Exception as error:
            if not self._lacked_memory(error):
                raise
            before = NO_MEMORY
        if before is None:  # another call of this kind may have usable activations
            self.skipped += 1
        else:
            self._seen.add(kind)
        if not isinstance(before, _Before):
            if before:
                self.left_out.setdefault(spec.name, before)
            with self._watched(impl):
                return impl.fn(*given)
        result, failure = called(partial(self._run, impl, given), impl, spec, before.call)
        if failure is None:
            failure = self._compared(spec, result, before)
        if failure is not None and failure.status == "refused":
            assert failure.error is not None  # `supports` has accepted the call
            raise failure.error from None
        if failure is not None and self._lacked_memory(failure.error):
            self.left_out.setdefault(spec.name, NO_MEMORY)
            if result is not None:
                return result
            # Continue the forward, because the other ranks wait for it.
            self._short.add(key)
            return _zeros(spec.fake(*args))
        self.compared += 1
        self.drafted += any(self._layer.startswith(prefix) for prefix in filter(None, self.models))
        if failure is None:
            return result
        where = f"in layer {self._layer or '(unnamed)'}, {_described(spec, args)}"
        why = f"{failure} (on live tensors {where})"
        if (keeper := self.plan.record.keeper) is not None:
            why += keeper.keep(spec, impl, why, before.made)
        self.objections[key] = Objection(FAILED, why)
        # Incorrect numbers, especially NaN, would hide errors in later layers.
        return _zeros(spec.fake(*args))

    @property
    def _layer(self) -> str:
        return self._inside[-1] if self._inside else ""

    def _before(self, spec: OpSpec, impl: OpImpl, args: tuple[Any, ...]) -> _Before | str | None:
        """Copy what is needed to compare a call later. Returns the reason if the call will not be
        compared. Returns None if no model computes such activations."""
        if spec.check(*args) is not None:
            return "a layer's call does not match the contract"
        call = in_place(spec.named(args))
        rows = None if spec.whole_batch else _rows(spec, args, ROWS_AGAIN if self.again else ROWS)
        synchronise(self.device)  # wait for writes of other streams
        if call.nbytes > LARGEST:
            part = _part(spec, args)
            if isinstance(part, str):
                return part
            rows, of_rows = part
            call = call.below(LARGEST // 4)
        else:
            of_rows = args
            if rows is not None:
                of_rows = spec.with_changed_rows(args, partial(taken, rows=rows))
        copied = sum(arg.nbytes for arg in of_rows if isinstance(arg, torch.Tensor))
        what = f"{spec.name}={impl.impl_id} on live tensors"
        if not self._budget.takes(what, as_calls(copied, torch.device("cpu"))):
            return "the limit of compared calls was reached"
        on_host = tuple(_on_host(arg, None) for arg in of_rows)
        if not _is_real(spec, on_host):
            return None
        call.remember()
        sample = Sample("live", on_host, self._scale(spec, on_host))
        return _Before(call, rows, sample)

    def _scale(self, spec: OpSpec, args: Sequence[Any]) -> float:
        """Return the magnitude of a call's values, raised to the power of `_growth`."""
        if spec.name not in self._growth:
            self._growth[spec.name] = _growth(spec)
        return float(_largest(spec, args) ** self._growth[spec.name])

    def _run(self, impl: OpImpl, given: tuple[Any, ...]) -> Outcome:
        self._running = True
        try:
            with self._watched(impl):
                return attempt("it raised", impl.fn, *given)
        finally:
            self._running = False

    def _lacked_memory(self, error: BaseException | None) -> bool:
        marks = ("out of memory", "can't allocate memory", "not enough memory")
        return self.again and (
            isinstance(error, MemoryError)
            or (isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks))
        )

    def _compared(self, spec: OpSpec, result: Any, before: _Before) -> CallFailure | None:
        try:
            wanted = wanted_of(spec, before.sample)
        except Exception as error:  # the contract does not support such a call
            log.debug("%s on live tensors: %s", spec.name, quote(error))
            self.left_out.setdefault(spec.name, "its contract cannot compute a layer's call")
            return None

        def deviation(result: Any) -> Deviation:
            return worst(
                each_part(result, partial(_on_host, rows=before.rows)), wanted, before.rows
            )

        share, failure = compared(result, deviation)
        self.worst = max(self.worst, share)
        return failure


def _rows(spec: OpSpec, args: Sequence[Any], at_most: int) -> torch.Tensor | None:
    """Return some rows of a call, ascending, or None for all rows. Includes the first and the last
    row, and both sides of each power of two, because grids and tiles begin there."""
    count = spec.tokens(args)
    if count <= at_most:
        return None
    powers = [2**n for n in range(count.bit_length())]
    edges = torch.tensor([0, count - 1, *(n + d for n in reversed(powers) for d in (-1, 0))])
    drawn = torch.randperm(count, generator=torch.Generator("cpu").manual_seed(count))
    wanted = torch.cat((edges[edges < count], drawn))
    first = {int(row): None for row in wanted}  # distinct, edges first
    return torch.tensor(list(first)[:at_most]).sort().values


def _part(spec: OpSpec, args: Sequence[Any]) -> tuple[torch.Tensor, tuple[Any, ...]] | str:
    """Return (some rows of a call, the call of these rows with only the values that they read). If
    even one row reads too much, return the reason instead."""
    if spec.part is None or spec.whole_batch:
        return "its arguments are too large to copy"
    count = spec.tokens(args)
    few = min(count, PART_ROWS)
    while few:
        rows = torch.arange(few, device="cpu") * (count - 1) // max(1, few - 1)
        given = spec.with_changed_rows(args, partial(taken, rows=rows))
        found = spec.part(*given)
        if sum(arg.nbytes for arg in found if isinstance(arg, torch.Tensor)) <= PART:
            return rows, found
        few //= 2
    return "the data that one token reads is too large to copy"


def _on_host(value: Any, rows: torch.Tensor | None) -> Any:
    """Copy these rows of a tensor to the CPU. Other values are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if rows is None:
        return value.to("cpu", copy=True)
    return taken(value, rows).to("cpu")


def _growth(spec: OpSpec) -> int:
    """Return the power with which errors grow with the magnitude of values. It is derived from the
    contract's samples of large values. It is 0 for norms, because a larger tolerance for one large
    feature would hide errors in the others. It may be 2 for products."""
    more = defaultdict[str, float | None](lambda: 64)
    small = ModelSizes(64, 64, heads=2, kv_heads=1, head_size=64, rotary=64, more=more)
    dtype = getattr(torch, spec.dtypes[-1])
    try:
        samples = [*spec.served(small, dtype, torch.device("cpu"), True)]
    except Exception as error:  # the contract does not support such sizes
        log.debug("%s has no samples of large values: %s", spec.name, quote(error))
        samples = []
    if not samples:
        return 1
    scale = max(sample.scale for sample in samples)
    largest = max(_largest(spec, sample.args) for sample in samples)
    return 0 if scale <= 1.0 else 2 if scale > 10 * largest else 1


def _largest(spec: OpSpec, args: Sequence[Any]) -> float:
    return float(torch.as_tensor(magnitudes(spec, args)).max())


def _is_real(spec: OpSpec, args: Sequence[Any]) -> bool:
    """Whether a model may compute such activations. They may include -inf, for masks."""
    floats = (each.float() for each in float_activations(spec, args).values())
    return all(float(x.nan_to_num(torch.inf, torch.inf, 0.0).abs().amax()) <= REAL for x in floats)


def _kind_of(layer: str) -> str:
    return re.sub(r"\d+", "*", layer)


def _layout(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        (tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else repr(a)
        for a in args
    )


def _described(spec: OpSpec, args: Sequence[Any]) -> str:
    return ", ".join(
        f"{name} {tuple(arg.shape)} {dtype_name(arg.dtype)}"
        for name, arg in spec.named(args).items()
        if isinstance(arg, torch.Tensor)
    )


def _zeros(shapes: Any) -> Any:
    """Return results of zeros, which do not disturb later layers."""
    return each_part(shapes, torch.zeros_like)
