"""The candidates of one op in order, and what happens when the first one refuses or fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..contracts import OpSpec
from ..errors import AllFailedError, CallError
from ..plugins.forms import asked_for
from ..plugins.types import OpImpl
from ..settings.policy import Rows
from ..text import spelt
from .record import Record, Skipped
from .resolver import NEEDS_LAYER


class Left(Exception):
    """Raised to leave a call to the layer's own method.

    Only the bound op knows that, and only the caller of the method has its arguments. What `adapt`
    made is between the two, and an exception passes through it.
    """


class Call:
    """One call: the layer or None, and the contract's arguments.

    Those of an op without contract may be given by name.
    """

    def __init__(self, layer: object, /, *args: Any, **keywords: Any) -> None:
        self.layer, self.args, self.keywords = layer, args, keywords


@dataclass(frozen=True)
class Chain:
    """The candidates of one op under one policy, in order, and what happens when one fails.

    Args:
        op: the op's name.
        rows: the candidates by the size of a call, first choice first; no row is empty. Only an op
            with a contract has several rows.
        spec: the contract, or what stands for it (`uncontracted`).
        strict: the first failure is raised and nothing else is tried.
        record: what keeps count and knows what is demoted.
        grants: parameters whose owner lets an implementation overwrite them; others are copied.
        bare: nothing is put around the first candidate, and it is not counted: for code that a
            compiler traces. A row that is left to vLLM or another plugin is bare in any case.
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
        """The candidates of the largest calls; where size does not matter, of every call."""
        return self.rows[-1][1]

    @property
    def is_by_size(self) -> bool:
        """Whether calls of different sizes have different candidates."""
        return len(self.rows) > 1

    def of(self, *impls: OpImpl, bare: bool = False) -> Chain:
        """The same op with these candidates, for calls of every size."""
        return dataclasses.replace(self, rows=((None, impls),), bare=bare)

    def refuse(self, verdict: object, call: Call) -> Any:
        """Go on after the first candidate's `supports` said no."""
        return self._try_others(refusal(verdict), call)

    def recover(self, error: Exception, call: Call) -> Any:
        """Go on after the first candidate raised, or was passed over."""
        return self._try_others(None if isinstance(error, Skipped) else error, call)

    def _try_others(self, first: Exception | str | None, call: Call) -> Any:
        self.record.left(self.op, self.impls[0])
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
                except Left:
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
        """A later candidate: (refusal, None) or (None, result). Overwrites only what is granted."""
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
        """The arguments, with copies of what `impl` may overwrite and nobody granted."""
        own = self._consumed(impl, call) - self.grants
        if not own:
            return call.args
        return [
            copied(arg) if name in own and arg is not None else arg
            for name, arg in zip(self.spec.parameters, call.args, strict=False)
        ]

    def _judge(self, impl: OpImpl, outcome: Exception | str, call: Call, *, last: bool) -> None:
        """Raise what must be raised; otherwise note it, so that the next candidate is tried."""
        if isinstance(outcome, Exception):
            if _poisons_the_device(outcome):
                raise outcome
            if not isinstance(outcome, NotImplementedError):
                self._blame_caller(call, outcome)
        if isinstance(outcome, str | NotImplementedError):
            self.record.refused(self.op, impl, _text(outcome))
            if self.strict:
                self._blame_caller(call, outcome)
                raise AllFailedError(
                    f"Implementation '{impl.impl_id}' refused op '{self.op}': {_text(outcome)}. "
                    "Strict mode tries nothing else; set VLLM_FL_STRICT=0 to fall back.",
                    op=self.op,
                    causes=[(impl.impl_id, outcome)],
                )
        elif (
            self.strict
            or self._consumed(impl, call)
            or not self.record.failed(self.op, impl, outcome, last=last)
        ):
            # What it consumes of this call may be half written: no second try.
            raise outcome

    def _consumed(self, impl: OpImpl, call: Call) -> frozenset[str]:
        """The arguments of this call that `impl` may overwrite."""
        return self.spec.consumed(impl.consumes, call.args)

    def _blame_caller(self, call: Call, outcome: Exception | str) -> None:
        try:
            mistake = self.spec.check(*call.args)
        except Exception as error:  # arguments so odd that even the check trips over them
            mistake = ("(call)", f"cannot be read: {spelt(error)}")
        if mistake is not None:
            cause = outcome if isinstance(outcome, Exception) else None
            raise CallError(self.op, *mistake, cause=cause)


def copied(argument: Any) -> Any:
    """A copy that may be overwritten and returned: contiguous, as results are."""
    return argument.clone() if argument.is_contiguous() else argument.contiguous()


def _poisons_the_device(error: Exception) -> bool:
    """Out of memory, or a device error: sticky, so that every later kernel would fail too."""
    if isinstance(error, MemoryError):
        return True
    kinds = {c.__name__ for c in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "AcceleratorError"}:  # torch's, without importing torch
        return True
    marks = ("CUDA error", "CUDNN_STATUS", "out of memory", "NPU error", "HIP error", "aclrt")
    return isinstance(error, RuntimeError) and any(mark in spelt(error) for mark in marks)


def refusal(verdict: object) -> str:
    """What a `supports` that did not say True has said."""
    return verdict if isinstance(verdict, str) and verdict else "its supports gave no reason"


def _text(outcome: BaseException | str) -> str:
    return outcome if isinstance(outcome, str) else spelt(outcome)
