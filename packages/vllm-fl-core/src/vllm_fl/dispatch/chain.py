"""The ordered candidates of an op, and the fallback when a call is unsupported or fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..contracts import OpSpec, Sample
from ..errors import NO_FALLBACK, AllFailedError, CallError
from ..plugins.signatures import asked_for
from ..plugins.types import OpImpl
from ..settings.policy import Rows
from ..text import spelt
from .record import BY_GUARD, Record, Skipped
from .resolver import NEEDS_LAYER


class UseOriginal(Exception):
    """Raised by a bound op to run the layer's original method. Only the caller has the original
    arguments, and an exception passes through the method that `adapt` made around the op."""


class Call:
    """One call: the layer or None, and the contract's arguments. Only an op without a contract may
    have keyword arguments."""

    def __init__(self, layer: object, /, *args: Any, **keywords: Any) -> None:
        self.layer, self.args, self.keywords = layer, args, keywords


@dataclass(frozen=True)
class Chain:
    """The candidates of one op under one policy, in order, and the fallback between them.

    Args:
        rows: the candidates by the size of a call. No row is empty. Only an op with a contract has
            several rows.
        spec: the contract, or a substitute (`uncontracted`).
        strict: whether to raise the first failure instead of falling back.
        grants: parameters that an implementation may overwrite. Other arguments that it would
            overwrite are copied.
        bare: whether to run the first candidate without a guard or counter, for code that a
            compiler traces. A row that begins with `stock` or `foreign` is always bare.
    """

    op: str
    rows: Rows[tuple[OpImpl, ...]]
    spec: OpSpec
    strict: bool
    record: Record
    grants: frozenset[str] = frozenset()
    bare: bool = False

    @property
    def impls(self) -> tuple[OpImpl, ...]:
        """The candidates of the largest calls, or of all calls if the size does not matter."""
        return self.rows[-1][1]

    @property
    def is_by_size(self) -> bool:
        return len(self.rows) > 1

    def of(self, *impls: OpImpl, bare: bool = False) -> Chain:
        """Return the chain of the same op with these candidates for calls of every size."""
        return dataclasses.replace(self, rows=((None, impls),), bare=bare)

    def refuse(self, verdict: object, call: Call) -> Any:
        """Fall back after the first candidate's `supports` rejected the call."""
        return self._try_others(refusal(verdict), call)

    def recover(self, error: Exception, call: Call) -> Any:
        """Fall back after the first candidate raised, or after it was skipped because it is
        demoted."""
        return self._try_others(None if isinstance(error, Skipped) else error, call)

    def _try_others(self, first: Exception | str | None, call: Call) -> Any:
        self.record.skipped_first(self.op, self.impls[0])
        causes: list[tuple[str, BaseException | str]] = []
        outcome: Exception | str = "" if first is None else first
        for index, impl in enumerate(self.impls):
            if index > 0 or first is None:
                demoted = self.record.demotions.get((self.op, impl.impl_id))
                if demoted is not None:
                    outcome = demoted
                    causes.append((impl.impl_id, demoted))
                    continue
                try:
                    refusal, result = self._attempt(impl, call)
                except UseOriginal:
                    self.record.fell_back(self.op, self.impls[0], impl)
                    raise
                except Exception as error:
                    outcome = error
                else:
                    if refusal is None:
                        self.record.fell_back(self.op, self.impls[0], impl)
                        return result
                    outcome = refusal
            self._judge(impl, outcome, call, last=index == len(self.impls) - 1)
            causes.append((impl.impl_id, outcome))
        self._blame_caller(call, outcome)
        tried = "; ".join(f"{impl_id}: {_text(cause)}" for impl_id, cause in causes)
        raise AllFailedError(
            f"All {len(causes)} implementation(s) failed for op='{self.op}'. "
            f"Last error: {_text(outcome)}. Tried: {tried}. "
            f"`vllm-fl explain {self.op}` shows every candidate.",
            op=self.op,
            causes=causes,
        )

    def _attempt(self, impl: OpImpl, call: Call) -> tuple[str | None, Any]:
        if impl.needs_layer and call.layer is None:
            return NEEDS_LAYER, None
        asked = asked_for(impl, self.spec)
        if asked is not None:
            verdict = asked(*call.args, **call.keywords)
            if verdict is not True:
                return refusal(verdict), None
        args = self._safe(impl, call)
        if impl.needs_layer:
            args = [call.layer, *self.spec.unprovided(args)]
        return None, impl.fn(*args, **call.keywords)

    def _safe(self, impl: OpImpl, call: Call) -> Sequence[Any]:
        """Return the arguments, with copies of those that `impl` may overwrite and `grants` does
        not contain."""
        own = self._consumed(impl, call) - self.grants
        if not own:
            return call.args
        return [
            copied(arg) if name in own and arg is not None else arg
            for name, arg in zip(self.spec.parameters, call.args, strict=False)
        ]

    def _judge(self, impl: OpImpl, outcome: Exception | str, call: Call, *, last: bool) -> None:
        """Raise the error if a fallback must not hide it. Otherwise record it.

        Raises:
            CallError: the arguments break the contract.
            AllFailedError: in strict mode, `impl` does not support the call.
            Exception: the error of `impl`: in strict mode, if it makes the device unusable, if
                arguments may be half overwritten, or if `impl` was not demoted (`Record.failed`).
        """
        if isinstance(outcome, Exception):
            if _poisons_the_device(outcome):
                raise outcome
            if not isinstance(outcome, NotImplementedError):
                self._blame_caller(call, outcome)
        is_refused = isinstance(outcome, str | NotImplementedError)
        keeper = self.record.keeper
        if keeper is not None and keeper.wants(self.op, impl.impl_id, is_refused):
            made = partial(Sample, BY_GUARD, tuple(call.args), math.nan)
            keeper.keep(self.spec, impl, _text(outcome), made, refused=is_refused)
        if isinstance(outcome, str | NotImplementedError):
            self.record.refused(self.op, impl, _text(outcome))
            if self.strict:
                self._blame_caller(call, outcome)
                raise AllFailedError(
                    f"Implementation '{impl.impl_id}' does not support a call of op '{self.op}': "
                    f"{_text(outcome)}. {NO_FALLBACK}",
                    op=self.op,
                    causes=[(impl.impl_id, outcome)],
                )
        elif (
            self.strict
            or self._consumed(impl, call) & self.grants
            or not self.record.failed(self.op, impl, outcome, last=last)
        ):
            # A fallback cannot use half overwritten arguments.
            raise outcome

    def _consumed(self, impl: OpImpl, call: Call) -> frozenset[str]:
        return self.spec.consumed(impl.consumes, call.args)

    def _blame_caller(self, call: Call, outcome: Exception | str) -> None:
        try:
            mistake = self.spec.check(*call.args)
        except Exception as error:  # arguments that even the check cannot handle
            mistake = ("(call)", f"cannot be read: {spelt(error)}")
        if mistake is not None:
            cause = outcome if isinstance(outcome, Exception) else None
            raise CallError(self.op, *mistake, cause=cause)


def copied(argument: Any) -> Any:
    """Return a copy that may be overwritten and returned. The copy is contiguous, because results
    must be contiguous."""
    return argument.clone() if argument.is_contiguous() else argument.contiguous()


def _poisons_the_device(error: Exception) -> bool:
    """Whether an error is an out-of-memory error, or a device error that makes all later kernels
    fail."""
    if isinstance(error, MemoryError):
        return True
    kinds = {c.__name__ for c in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "AcceleratorError"}:  # by name, to avoid importing torch
        return True
    marks = ("CUDA error", "CUDNN_STATUS", "out of memory", "NPU error", "HIP error", "aclrt")
    return isinstance(error, RuntimeError) and any(mark in spelt(error) for mark in marks)


def refusal(verdict: object) -> str:
    return verdict if isinstance(verdict, str) and verdict else "`supports` returned no reason"


def _text(outcome: BaseException | str) -> str:
    return outcome if isinstance(outcome, str) else spelt(outcome)
