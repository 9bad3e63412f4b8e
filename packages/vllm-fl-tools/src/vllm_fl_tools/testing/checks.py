"""Checks of calls: values, memory, bad inputs, unsupported calls, determinism.

Arguments are the subject, a dtype and a sample's name (empty if the check uses all samples). Checks
raise AssertionError for a fault, and Refused for an unsupported call.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from vllm_fl.contracts import Sample
from vllm_fl.dispatch.chain import refusal
from vllm_fl.errors import AllFailedError, CallError, PluginError
from vllm_fl.plugins.signatures import nothing
from vllm_fl.plugins.types import OpImpl
from vllm_fl.text import quote
from vllm_fl_verify import process_state
from vllm_fl_verify.expected import Deviation, Wanted
from vllm_fl_verify.launches import Launched, launched
from vllm_fl_verify.oracle import closed, wanted_of, worst
from vllm_fl_verify.trials import Request, Role
from vllm_fl_verify.verification import (
    Comparison,
    as_call,
    compare,
    compared,
    synchronise,
    try_call,
)

from .families import calls_of
from .subject import HIDE_FRAMES, Refused, Subject, expect, fresh

__tracebackhide__ = HIDE_FRAMES

FAR = 1 << 31
"""Number of the first element that a signed 32-bit offset cannot reach."""


def availability(subject: Subject, dtype: str, sample: str) -> None:
    """The implementation is available on this machine."""
    verdict = subject.impl.availability()
    if verdict is not True:
        raise Refused(f"{subject.impl.impl_id} is not available: {verdict}")


def declaration(subject: Subject, dtype: str, sample: str) -> None:
    """The implementation's parameters and consumed arguments match the contract."""
    try:
        subject.registry()
    except PluginError as error:
        raise AssertionError(str(error)) from error


def values(subject: Subject, dtype: str, sample: str) -> None:
    """The result is correct, and no other memory or process state changes."""
    run = partial(compare, subject.impl, subject.spec, subject.sample(dtype, sample), _torch(dtype))
    torch.rand((), device=subject.device)  # reveals a kernel that always sets the same seed
    before = process_state.state_of(subject.device)
    judge(run(packed=True))
    again = partial(run, wanted=())
    problem = process_state.changed(before, subject.device, again)
    expect(problem is None, f"it changed {problem} of the whole process")


def families(subject: Subject, dtype: str, sample: str) -> None:
    """Supported calls of a public model are correct, for small numbers of tokens."""
    refused: Refused | None = None
    taken = False
    for call in calls_of(subject.spec, sample, subject.device):
        try:
            judge(compare(subject.impl, subject.spec, call, _torch(dtype)), call)
            taken = True
        except Refused as why:
            refused = why
    if refused is not None and not taken:
        raise refused


def large_pools(subject: Subject, dtype: str, sample: str) -> None:
    """Entries of caches, state pools and expert weights beyond 2**31 elements are used correctly.

    The entries are far apart. The memory between them is untouched, so a CPU does not allocate it.
    An offset that overflows 32 bits stays within that memory. Only one dtype is tried.

    Raises:
        Refused: the device has not enough memory.
    """
    impl, spec = subject.impl, subject.spec
    for kind in subject.spec.dtypes:
        calls = 0
        for each, name, args in _with_large_pools(subject, kind):
            got, failure = try_call(as_call(impl, spec), impl, spec, args)
            if failure is not None and failure.status == "refused":
                continue
            calls += 1
            if failure is None:
                _, failure = compared(got, partial(_deviation, each, wanted_of(spec, each)))
            where = f"{each.name}, the last entry of {name} beyond 2**31 elements"
            expect(failure is None, f"{where}: {failure}")
        if calls:
            return


def _with_large_pools(subject: Subject, dtype: str) -> Iterator[tuple[Sample, str, list[Any]]]:
    """Yield (sample, parameter, arguments with that pool in a larger memory)."""
    for each in subject.samples(dtype):
        for index, (name, arg) in enumerate(subject.spec.named(each.args).items()):
            is_pool = isinstance(arg, torch.Tensor) and arg.ndim >= 3 and len(arg) > 1
            if is_pool and not subject.spec.has_rows(name, arg):
                args = [*fresh(each).args]  # the call may overwrite them
                try:
                    args[index] = _far_apart(arg)
                except RuntimeError as error:
                    raise Refused(f"no memory for {FAR} elements: {quote(error)}") from error
                yield each, name, args


def _deviation(sample: Sample, wanted: Sequence[Wanted | None], got: Any) -> Deviation:
    return worst(closed(got, sample), wanted)


def _far_apart(pool: torch.Tensor) -> torch.Tensor:
    """A copy with its last entry more than 2**31 elements after its first."""
    step = -(-FAR // (len(pool) - 1) // 256) * 256
    memory = pool.new_empty(FAR + (len(pool) - 1) * step + pool[0].numel())
    inner = pool[0].contiguous().stride()
    return memory.as_strided(pool.shape, (step, *inner), FAR).copy_(pool)


def bad_inputs(subject: Subject, dtype: str, sample: str) -> None:
    """The error of `call_op` names the invalid argument, and does not blame the implementation."""
    subject.needs_no_layer()
    bad = next(b for b in subject.bad_inputs(dtype) if b.name == sample)
    manager = subject.manager()
    try:
        result = manager.call(subject.spec.name, *copy.deepcopy(bad.args))
    except CallError as error:
        expect(error.argument == bad.argument, f"the error names {error.argument!r}: {error}")
    except (Exception, SystemExit) as error:
        raise AssertionError(f"expected a CallError, got {quote(error)}") from error
    else:
        kind = type(result).__name__
        raise AssertionError(
            f"returned a {kind} although {bad.argument!r} is invalid: incorrect result without an "
            "error. Return the reason from `supports`, or raise an exception"
        )
    expect(not manager.demotions, f"disabled: {dict(manager.demotions)}")


def unchanged_arguments(subject: Subject, dtype: str, sample: str) -> None:
    """`call_op` changes no argument except caches, not even consumed arguments."""
    subject.needs_no_layer()
    manager, op = subject.manager(), subject.spec.name
    caches = subject.impl.consumes & subject.spec.caches
    through = dataclasses.replace(
        subject.impl, fn=lambda *args: manager.call(op, *args), consumes=caches
    )
    for each in subject.samples(dtype):
        result = compare(through, subject.spec, each, _torch(dtype))
        if not isinstance(result.error, AllFailedError):  # unsupported: nothing ran
            judge(result, each, skips=False)


def determinism(subject: Subject, dtype: str, sample: str) -> None:
    """Two calls with equal inputs give identical bits."""
    for each in subject.samples(dtype):
        if subject.accepts(each):
            first, second = (subject.bits(fresh(each)) for _ in range(2))
            expect(first == second, f"{each.name}: equal inputs gave different bits")


def refusals(subject: Subject, dtype: str, sample: str) -> None:
    """`supports` returns True or a reason, independently of values and batch size.

    The implementation must reject tensors on another device, because its kernel cannot run there.
    Traceable implementations may accept them, since PyTorch runs anywhere.
    """
    impl = subject.impl
    if not states_support(impl):
        return
    device = "meta" if subject.device.type == "cpu" else "cpu"
    for each in subject.samples(dtype):
        verdict = _verdict(impl, each)
        away = dataclasses.replace(each, args=(each.args[0].to(device), *each.args[1:]))
        expect(
            impl.traceable or not _verdict(impl, away),
            f"{each.name}: it accepts tensors on {device}, where its kernel cannot run: add a rule "
            f"such as \"x.device.type == '{subject.device.type}'\" to `takes`",
        )
        for value in (0.0, 1e4, float("nan")):
            other = fresh(each)
            for arg in other.args:
                if isinstance(arg, torch.Tensor) and arg.numel():
                    is_float = arg.is_floating_point()
                    most = torch.finfo(arg.dtype).max if is_float else arg.max()
                    arg.fill_(min(value, most) if is_float else value and most)
            expect(_verdict(impl, other) is verdict, f"{each.name}: `supports` depends on values")
    sizes = [subject.served(dtype, tokens) for tokens in (1, *subject.sizes.tokens)]
    for same in zip(*sizes, strict=True):
        verdicts = {each.name: _verdict(impl, each) for each in same}
        one = len(set(verdicts.values())) == 1
        expect(one, f"`supports` depends on the batch size: {verdicts}")


def states_support(impl: OpImpl) -> bool:
    """Return whether `impl` has its own `supports`, not one that was added by registering it."""
    return impl.supports is not None and inspect.unwrap(impl.supports) is not nothing


def serving(subject: Subject, dtype: str, sample: str) -> None:
    """The implementation supports a call of a served model, in at least one dtype."""
    reasons = _refused_by(subject, dtype)
    if not reasons:
        return
    expect(
        any(not _refused_by(subject, other) for other in subject.spec.dtypes if other != dtype),
        f"it supports no call of a served model, in any dtype: {reasons}",
    )
    raise Refused(f"{subject.spec.name}: unsupported {dtype}: {'; '.join(set(reasons.values()))}")


def preflight(subject: Subject, dtype: str, sample: str) -> None:
    """Verification at engine startup finds no fault."""
    from vllm_fl_verify.preflight import find_faults

    serving(subject, dtype, sample)  # an engine does not use it with an unsupported dtype
    sizes, specs = subject.all_sizes, {subject.spec.name: subject.spec}
    options: dict[str, Any] = {"seed": 0, "specs": specs, "calls": 200.0, "launched": _profiled}
    roles = [Role(subject.impl)]
    found = find_faults(Request(roles, _torch(dtype), subject.device, sizes, **options))
    reasons = {key: each.reason for key, each in found.objections.items()}
    expect(not reasons, f"an engine would disable it at startup: {reasons}")


def _profiled(call: Callable[[], object], device: torch.device) -> Launched:
    """Return what a call launches, with any compiler. A profile has the names of all kernels."""
    if device.type == "cpu":
        return frozenset()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        found = launched(call, device)
        synchronise(device)
    kernels = (each for each in profile.events() if each.device_type.name != "CPU")
    return found | {(each.name, 0) for each in kernels}


def _refused_by(subject: Subject, dtype: str) -> dict[str, str]:
    """Return the reason for each call of a served model if all are unsupported, or empty."""
    reasons = {}
    for each in subject.served(dtype, subject.sizes.tokens[0]):
        result = compare(subject.impl, subject.spec, each, _torch(dtype))
        if result.status != "refused":
            return {}
        reasons[each.name] = _reason(result)
    return reasons


def _reason(result: Comparison) -> str:
    expect(result.reason not in ("", refusal("")), "unsupported call without a reason")
    return result.reason


def judge(result: Comparison, sample: Sample | None = None, *, skips: bool = True) -> None:
    """Raise an error if this comparison failed."""
    if result.status == "refused":
        reason = _reason(result)
        if skips:
            raise Refused(f"{result.op}: {reason}")
    elif result.status != "ok":
        where = f"{sample.name}: " if sample else ""
        status = "incorrect" if result.status == "wrong" else result.status
        raise AssertionError(f"{where}{status}: {result.reason}") from result.error


def _verdict(impl: OpImpl, sample: Sample) -> bool:
    verdict: object = True if impl.supports is None else impl.supports(*sample.args)
    expect(
        verdict is True or (isinstance(verdict, str) and verdict),
        f"{sample.name}: `supports` returned {verdict!r}, not True or a reason",
    )
    return verdict is True


def _torch(dtype: str) -> torch.dtype:
    kind: torch.dtype = getattr(torch, dtype)
    return kind
