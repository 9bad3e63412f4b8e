"""The checks on calls: values, memory, bad inputs, refusals, repetition.

Each takes the subject, a dtype and a sample's name (empty where the check takes all of them), and
raises AssertionError that says what is wrong, or Refused.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..dispatch.contracts import Sample
from ..dispatch.forms import states_support
from ..dispatch.registry import OpRegistry
from ..dispatch.types import OpImpl
from ..dispatch.verification import Comparison, compare
from ..errors import AllFailedError, CallError, PluginError
from .subject import Refused, Subject, digest, fresh, tensors

__all__ = [
    "availability",
    "bad_inputs",
    "call_op",
    "declaration",
    "determinism",
    "preflight",
    "refusals",
    "serving",
    "values",
]


def availability(subject: Subject, dtype: str, sample: str) -> None:
    """It runs on this machine."""
    verdict = subject.impl.availability()
    if verdict is not True:
        raise Refused(f"{subject.impl.impl_id} is not available: {verdict}")


def declaration(subject: Subject, dtype: str, sample: str) -> None:
    """A registry takes it: parameters and consumed arguments are the contract's."""
    try:
        OpRegistry().register_impl(subject.impl)
    except PluginError as error:
        raise AssertionError(str(error)) from error


def values(subject: Subject, dtype: str, sample: str) -> None:
    """The result is the oracle's, its memory its own, and the arguments are as they were."""
    calls: list[tuple[tuple[Any, ...], Any]] = []
    recorded = dataclasses.replace(subject.impl, fn=_recording(subject.impl.fn, calls))
    judge(compare(recorded, subject.spec, subject.sample(dtype, sample), _torch(dtype)))
    (args, result), *_ = calls
    taken = dict(zip(subject.spec.parameters, args, strict=True))
    consumed = subject.spec.consumed(subject.impl.consumes, args)
    own: list[torch.Tensor] = []
    for part in tensors(result):
        shared = [n for n, a in taken.items() if isinstance(a, torch.Tensor) and _shares(part, a)]
        if consumed.intersection(shared):
            continue  # in place: its memory and layout are the argument's
        assert not shared, f"a result shares memory with {shared[0]!r}"
        assert not any(_shares(part, other) for other in own), "two results share memory"
        assert part.is_contiguous(), (
            f"a result has strides {part.stride()}: the contract promises a contiguous one"
        )
        own.append(part)


def bad_inputs(subject: Subject, dtype: str, sample: str) -> None:
    """`call_op` blames the caller, by argument, and not the implementation."""
    bad = next(b for b in subject.bad_inputs(dtype) if b.name == sample)
    manager = subject.manager()
    try:
        result = manager.call(subject.spec.name, *copy.deepcopy(bad.args))
    except CallError as error:
        assert error.argument == bad.argument, f"it blames {error.argument!r}: {error}"
    except (Exception, SystemExit) as error:
        raise AssertionError(f"no CallError, but {type(error).__name__}: {error}") from error
    else:
        kind = type(result).__name__
        raise AssertionError(f"returned a {kind} instead of raising: a wrong result in silence")
    assert not manager.demotions, f"demoted: {dict(manager.demotions)}"


def call_op(subject: Subject, dtype: str, sample: str) -> None:
    """Through `call_op`, every argument is intact afterwards, the consumed ones included."""
    manager, op = subject.manager(), subject.spec.name
    through = dataclasses.replace(
        subject.impl, fn=lambda *args: manager.call(op, *args), consumes=frozenset()
    )
    for each in subject.samples(dtype):
        result = compare(through, subject.spec, each, _torch(dtype))
        if not isinstance(result.error, AllFailedError):  # it refused inside: nothing was run
            judge(result, each, skips=False)


def determinism(subject: Subject, dtype: str, sample: str) -> None:
    """Two calls with the same inputs give the same bits."""
    for each in subject.samples(dtype):
        if subject.accepts(each):
            first, second = (digest(subject.impl.fn(*fresh(each).args)) for _ in range(2))
            assert first == second, f"{each.name}: the same inputs gave other bits"


def refusals(subject: Subject, dtype: str, sample: str) -> None:
    """`supports` answers True or a reason; other values or another batch change nothing.

    Another device does: a kernel would read memory that is not its own. What a compiler looks into
    is not asked, since PyTorch runs anywhere.
    """
    impl = subject.impl
    if not states_support(impl):
        return
    device = "meta" if subject.device.type == "cpu" else "cpu"
    for each in subject.samples(dtype):
        verdict = _verdict(impl, each)
        away = dataclasses.replace(each, args=(each.args[0].to(device), *each.args[1:]))
        assert impl.traceable or not _verdict(impl, away), (
            f"{each.name}: supports takes tensors on {device}, where its kernel cannot run"
        )
        for value in (0.0, 1e4, float("nan")):
            other = fresh(each)
            for arg in other.args:
                if isinstance(arg, torch.Tensor) and arg.numel():
                    arg.fill_(value if arg.is_floating_point() else value and arg.max())
            assert _verdict(impl, other) is verdict, f"{each.name}: supports looks at values"
    sizes = [subject.served(dtype, tokens) for tokens in (1, *subject.sizes.tokens)]
    for same in zip(*sizes, strict=True):
        verdicts = {each.name: _verdict(impl, each) for each in same}
        assert len(set(verdicts.values())) == 1, f"supports looks at the batch size: {verdicts}"


def serving(subject: Subject, dtype: str, sample: str) -> None:
    """Some call of a served model is not refused."""
    reasons = {}
    for each in subject.served(dtype, subject.sizes.tokens[0]):
        result = compare(subject.impl, subject.spec, each, _torch(dtype))
        if result.status != "refused":
            return
        reasons[each.name] = result.reason
    raise AssertionError(f"it refuses every call of a served model: {reasons}")


def preflight(subject: Subject, dtype: str, sample: str) -> None:
    """What an engine runs before it serves finds no fault."""
    from ..dispatch.preflight import find_faults

    faults = find_faults([subject.impl], _torch(dtype), subject.device, subject.sizes)
    assert not faults, f"an engine would demote it at start: {faults}"


def judge(result: Comparison, sample: Sample | None = None, *, skips: bool = True) -> None:
    """Turn a comparison into what a check raises."""
    if result.status == "refused":
        assert result.reason not in ("", "False", "None"), "refused without a reason"
        if skips:
            raise Refused(f"{result.op}: {result.reason}")
    elif result.status != "ok":
        where = f"{sample.name}: " if sample else ""
        raise AssertionError(f"{where}{result.status}: {result.reason}") from result.error


def _verdict(impl: OpImpl, sample: Sample) -> bool:
    assert impl.supports is not None
    verdict: object = impl.supports(*sample.args)
    assert verdict is True or (isinstance(verdict, str) and verdict), (
        f"{sample.name}: supports answered {verdict!r}, neither True nor a reason"
    )
    return verdict is True


def _recording(fn: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def recorded(*args: Any) -> Any:
        result = fn(*args)
        calls.append((args, result))
        return result

    return recorded


def _shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def _torch(dtype: str) -> torch.dtype:
    kind: torch.dtype = getattr(torch, dtype)
    return kind
