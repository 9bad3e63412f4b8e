"""The function that a caller gets: an implementation, guarded by the rules of fallback.

For each op and policy a small function with the contract's signature is compiled, so that a call
costs only some tens of nanoseconds more than the implementation itself. Everything else happens
after an exception or a refusal, in `Chain`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

from ..contracts import OpSpec
from ..contracts.outputs import Exact
from ..errors import AllFailedError, CallError
from ..plugins.forms import asked_for
from ..plugins.types import OpImpl, parameters_of
from ..settings.policy import Rows
from ..text import spelt
from .record import Guard, Record, Skipped
from .resolver import FOREIGN, STOCK

NEEDS_LAYER = (
    "it takes the calling layer first (self), which only call_method_op and eager layers pass"
)


class Left(Exception):
    """A call that is left to the layer's own method, whose parameters are not the op's.

    Only the bound op knows the call, and only the layer's own call has the arguments of the layer's
    method. Between them is what `adapt` made, which an exception passes through unnoticed.
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
                demoted = self.record.demoted(self.op).get(impl.impl_id)
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
        copied = self._consumed(impl, call) - self.grants
        if not copied:
            return call.args
        return [
            _copy(arg) if name in copied and arg is not None else arg
            for name, arg in zip(self.spec.parameters, call.args, strict=False)
        ]

    def _judge(self, impl: OpImpl, outcome: Exception | str, call: Call, *, last: bool) -> None:
        """Raise what must be raised; otherwise note it, so that the next candidate is tried."""
        if isinstance(outcome, Exception):
            if _poisons_the_device(outcome):
                raise outcome
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


def uncontracted(op: str, impl: OpImpl) -> OpSpec:
    """What stands for the contract of an op that only plugins name: it checks nothing.

    Its parameters are those of the first implementation, where a call can give each of them by
    position and by name. It has none where nobody states them: such an op takes anything.

    Args:
        op: the op's name.
        impl: its first implementation.
    """
    told = (parameters_of(impl.fn) or ())[impl.needs_layer :]
    # Generated code uses names of its own that begin with an underscore.
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD or p.name.startswith("_") for p in told):
        told = ()

    def oracle(*args: Any) -> None:
        return None

    oracle.__name__ = op
    oracle.__signature__ = inspect.Signature(told)  # type: ignore[attr-defined]
    return OpSpec(
        oracle,
        variants=(),
        fake=oracle,
        check=oracle,
        samples=lambda *_: (),
        served=lambda *_: (),
        by_token=frozenset(),
        bad_inputs=lambda *_: (),
        dtypes=("float32",),
        outputs=(Exact(),),
    )


def call_guard(chain: Chain) -> Callable[..., Any]:
    """The op as a plain function of the contract's parameters: the implementation and one `try`.

    Args:
        chain: the candidates. Where there are rows, each call goes by its own token count, and is
            counted under the first candidate of its row, if the record counts calls.
    """
    return _written(chain, None)


def method_guard(chain: Chain) -> Callable[..., Any]:
    """The op as a method: the layer, then the contract's parameters that it does not provide.

    What the layer provides is read at each call: its weights may be replaced.

    Args:
        chain: as for `call_guard`.
    """
    return _written(chain, chain.spec.from_layer)


Provided = Mapping[str, Callable[[Any], Any]]
"""What a layer provides: parameter -> how it is read."""


def _written(chain: Chain, provided: Provided | None) -> Callable[..., Any]:
    """The guard in the plain form, or as a method of what provides `provided`."""
    scope: dict[str, Any] = {}
    heads = _heads(chain.spec, provided, scope)
    guards: list[tuple[int | None, Callable[..., Any]]] = []
    for ceiling, impls in chain.rows:
        is_bare = chain.bare or impls[0].impl_id in (STOCK.impl_id, FOREIGN.impl_id)
        row = chain.of(*impls, bare=is_bare)
        guard = _compile(row, provided, heads, dict(scope))
        if not row.bare:
            guard = chain.record.counting(guard, chain.op, impls[0].impl_id)
        guards.append((ceiling, guard))
    return _by_size(chain, tuple(guards), heads, scope) if chain.is_by_size else guards[0][1]


def _by_size(
    chain: Chain,
    guards: Rows[Callable[..., Any]],
    heads: Mapping[str, str],
    scope: dict[str, Any],
) -> Callable[..., Any]:
    """A function that hands each call to the guard of its token count, written out as source."""
    given = ", ".join(heads)
    lines = [
        "    try:",
        f"        _tokens = {_tokens(chain.spec)}.shape[0]",
        "    except Exception:  # no tensor: the guard of any row says what is wrong with the call",
        f"        return _row{len(guards) - 1}({given})",
    ]
    for number, (ceiling, guard) in enumerate(guards):
        scope[f"_row{number}"] = guard
        condition = "" if ceiling is None else f"if _tokens <= {ceiling}: "
        lines += [f"    {condition}return _row{number}({given})"]
    return _executed(chain, heads, lines, scope)


def _tokens(spec: OpSpec) -> str:
    """The argument that tells a call's token count, as source: what `OpSpec.tokens` takes."""
    nullable = _nullable(spec)
    rows = (name for name in spec.parameters if name in spec.by_token)
    names = [n for n in rows if n not in spec.arguments or not spec.arguments[n].may_be_one]
    always = next((n for n, name in enumerate(names) if name not in nullable), len(names) - 1)
    source = names[always]
    for name in reversed(names[:always]):
        source = f"({name} if {name} is not None else {source})"
    return source


def _heads(spec: OpSpec, provided: Provided | None, scope: dict[str, Any]) -> dict[str, str]:
    """A guard's parameters: each as the guard hands it on -> as it stands in the guard's head.

    Defaults go to `scope`.
    """
    if not spec.parameters:  # it takes anything
        heads = {"*_args": "*_args", "**_keywords": "**_keywords"}
        return heads if provided is None else {"_layer": "_layer", **heads}
    nullable = _nullable(spec) if provided is not None else frozenset()
    heads = {}
    defaults_so_far = True  # a default may only be followed by defaults
    for p in reversed((*spec.signature.parameters.values(),)):
        if (name := p.name) in (provided or {}):
            continue
        default = None if p.default is p.empty and name in nullable else p.default
        defaults_so_far &= default is not p.empty
        heads[name] = name
        if defaults_so_far:
            scope[f"_default_{name}"] = default
            heads[name] += f"=_default_{name}"
    if provided is not None:
        heads["_layer"] = "_layer"
    return dict(reversed(heads.items()))


def _executed(
    chain: Chain, heads: Mapping[str, str], lines: Sequence[str], scope: dict[str, Any]
) -> FunctionType:
    """The function of a guard's head and body, named and documented as the op."""
    exec("\n".join([f"def _guard({', '.join(heads.values())}):", *lines]), scope)
    guard = cast("FunctionType", scope["_guard"])
    guard.__name__ = guard.__qualname__ = chain.op
    guard.__code__ = guard.__code__.replace(co_name=chain.op, co_qualname=chain.op)
    guard.__doc__ = chain.spec.oracle.__doc__
    guard.__module__ = __name__
    return guard


def _compile(
    chain: Chain, provided: Provided | None, heads: Mapping[str, str], scope: dict[str, Any]
) -> Callable[..., Any]:
    """Write the guard for the first candidate out as source, as `dataclasses` does, and compile.

    Args:
        chain: the candidates, of one row.
        provided: what a layer provides, for the method form; None for the plain one.
        heads, scope: what `_heads` gave.
    """
    first = chain.impls[0]
    read = {f"_read_{name}": how for name, how in (provided or {}).items()}
    scope |= {"_Call": Call, "_copy": _copy, **read}
    values = {
        name: f"_read_{name}(_layer)" if name in (provided or {}) else name
        for name in chain.spec.parameters or [name for name in heads if name != "_layer"]
    }
    everything = ", ".join(values.values())
    safe = dict(values)
    for name in (first.consumes - chain.grants) & values.keys():
        needed = {name} | chain.spec.consumed_with[name]
        given = " and ".join(f"{values[p]} is not None" for p in sorted(needed))
        safe[name] = f"_copy({values[name]}) if {given} else {values[name]}"
    if first.needs_layer:
        safe = {"_layer": "_layer"} | {name: safe[name] for name in values if name in heads}
    invoke = f"return _fn({', '.join(safe.values())})"
    call = f"_Call({'None' if provided is None else '_layer'}, {everything})"
    recover = ["    except Exception as _error:", f"        return _chain.recover(_error, {call})"]
    if chain.bare:
        lines = [f"    {invoke}"]
    elif asked_for(first, chain.spec) is None:
        lines = ["    try:", f"        {invoke}", *recover]
    else:
        lines = [
            "    try:",
            f"        _verdict = _supports({everything})",
            "        if _verdict is True:",
            f"            {invoke}",
            *recover,
            f"    return _chain.refuse(_verdict, {call})",
        ]
    scope["_switch"] = guard = Guard(chain, scope)
    chain.record.watch(guard)
    return _executed(chain, heads, lines, scope)


def _copy(argument: Any) -> Any:
    """A copy that may be overwritten and returned: contiguous, as results are."""
    return argument.clone() if argument.is_contiguous() else argument.contiguous()


def _nullable(spec: OpSpec) -> frozenset[str]:
    """The parameters that may be None: those that some torch schema of the op leaves out."""
    return frozenset(
        name for v in spec.variants for name in set(spec.parameters) - set(v.parameters)
    )


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
