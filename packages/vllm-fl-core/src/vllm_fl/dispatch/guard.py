"""The function that a caller gets: an implementation, guarded by the rules of fallback.

For each op and policy a small function with the contract's signature is compiled, so that a call
costs only some tens of nanoseconds more than the implementation itself. Everything else happens
after an exception or a refusal, in `Chain`.
"""

from __future__ import annotations

import dataclasses
import inspect
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any, cast

from ..contracts import OpSpec
from ..errors import AllFailedError, CallError
from ..plugins.forms import asked_for
from ..plugins.types import OpImpl, parameters_of
from ..text import spelt
from .record import Record, Skipped

__all__ = [
    "NEEDS_LAYER",
    "Chain",
    "Counting",
    "call_guard",
    "method_guard",
    "refusal",
    "uncounted",
]

NEEDS_LAYER = (
    "it takes the calling layer first (self), which only call_method_op and eager layers pass"
)


Counting = Callable[[Callable[..., Any], str, str], Callable[..., Any]]
"""(what is called, op, the id of its first candidate) -> the same, counted or not."""


def uncounted(bound: Callable[..., Any], op: str, impl_id: str) -> Callable[..., Any]:
    """The `Counting` of who counts nothing."""
    return bound


@dataclass(frozen=True)
class Call:
    """One call in the contract's form. Ops without a contract may carry keywords."""

    args: tuple[Any, ...]
    layer: object = None
    keywords: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Chain:
    """The candidates of one op under one policy, in order, and what happens when one fails.

    Args:
        op: the op's name.
        impls: the candidates, first choice first; not empty.
        spec: the contract, or None for an op that only plugins name.
        strict: the first failure is raised and nothing else is tried.
        record: what keeps count and knows what is demoted.
        grants: parameters whose owner lets an implementation overwrite them; others are copied.
        bare: nothing is put around the first candidate, and it is not counted: for code that a
            compiler traces, and for vLLM's own.
        rows: (ceiling, chain): the candidates of calls of at most so many tokens, by ascending
            ceilings; these here are then those of larger calls. Only ops with a contract have any.
    """

    op: str
    impls: tuple[OpImpl, ...]
    spec: OpSpec | None
    strict: bool
    record: Record
    grants: frozenset[str] = frozenset()
    bare: bool = False
    rows: tuple[tuple[int, Chain], ...] = ()

    def granting(self, grants: frozenset[str]) -> Chain:
        """The same chain, and its rows, with other grants."""
        rows = tuple((ceiling, chain.granting(grants)) for ceiling, chain in self.rows)
        return dataclasses.replace(self, grants=grants, rows=rows)

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
        keywords = call.keywords or {}
        if impl.needs_layer and call.layer is None:
            return NEEDS_LAYER, None
        asked = self.asked(impl)
        if asked is not None:
            verdict = asked(*call.args, **keywords)
            if verdict is not True:
                return refusal(verdict), None
        if impl.needs_layer:
            return None, impl.fn(call.layer, *self._for_layer(self._safe(impl, call)), **keywords)
        return None, impl.fn(*self._safe(impl, call), **keywords)

    def asked(self, impl: OpImpl) -> Callable[..., object] | None:
        """Who says whether `impl` takes a call; None where it takes any."""
        if self.spec is not None:
            return asked_for(impl, self.spec)
        return None if impl.needs_layer else impl.supports

    def _safe(self, impl: OpImpl, call: Call) -> Sequence[Any]:
        """The arguments, with copies of what `impl` may overwrite and nobody granted."""
        copied = self._consumed(impl, call) - self.grants
        if not copied:
            return call.args
        return [
            _copy(arg) if name in copied and arg is not None else arg
            for name, arg in zip(self.names, call.args, strict=False)
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
        return self.spec.consumed(impl.consumes, call.args) if self.spec else impl.consumes

    def _blame_caller(self, call: Call, outcome: Exception | str) -> None:
        if self.spec is None:
            return
        try:
            mistake = self.spec.check(*call.args)
        except Exception as error:  # arguments so odd that even the check trips over them
            mistake = ("(call)", f"cannot be read: {spelt(error)}")
        if mistake is not None:
            cause = outcome if isinstance(outcome, Exception) else None
            raise CallError(self.op, *mistake, cause=cause)

    def _for_layer(self, args: Sequence[Any]) -> list[Any]:
        provided = self.spec.from_layer if self.spec else {}
        names = self.names or ("",) * len(args)
        return [arg for name, arg in zip(names, args, strict=True) if name not in provided]

    @cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...] | None:
        """The op's parameters, or None for an op without contract that takes anything."""
        if self.spec is not None:
            return tuple(self.spec.signature.parameters.values())
        first = self.impls[0]
        parameters = parameters_of(first.fn)
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        if parameters is None or any(p.kind is not plain for p in parameters):
            return None
        return parameters[1:] if first.needs_layer else parameters

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the op's parameters."""
        return tuple(p.name for p in self.parameters or ())


def call_guard(chain: Chain, *, counting: Counting = uncounted) -> Callable[..., Any]:
    """The op as a plain function of the contract's parameters: the implementation and one `try`.

    Args:
        chain: the candidates. Where there are rows, each call goes by its own token count.
        counting: what counts the calls, each row's by its own first candidate.
    """
    return _written(chain, None, counting)


def method_guard(chain: Chain, *, counting: Counting = uncounted) -> Callable[..., Any]:
    """The op as a method: the layer, then the contract's parameters that it does not provide.

    What the layer provides is read at each call: its weights may be replaced.

    Args:
        chain, counting: as for `call_guard`.
    """
    return _written(chain, chain.spec.from_layer if chain.spec else {}, counting)


Provided = Mapping[str, Callable[[Any], Any]]
"""What a layer provides: parameter -> how it is read."""


def _written(chain: Chain, provided: Provided | None, counting: Counting) -> Callable[..., Any]:
    """The guard in the plain form, or as a method of what provides `provided`."""
    if not chain.rows:
        guard = _compile(chain, provided)
        return guard if chain.bare else counting(guard, chain.op, chain.impls[0].impl_id)
    rows = [(ceiling, _written(row, provided, counting)) for ceiling, row in chain.rows]
    rest = _written(dataclasses.replace(chain, rows=()), provided, counting)
    return _by_size(chain, provided, rows, rest)


def _by_size(
    chain: Chain,
    provided: Provided | None,
    rows: Sequence[tuple[int, Callable[..., Any]]],
    rest: Callable[..., Any],
) -> Callable[..., Any]:
    """A function that hands each call to the guard of its token count, written out as source."""
    assert chain.spec is not None and chain.parameters is not None
    scope: dict[str, Any] = {"_rest": rest}
    heads = _heads(chain, provided, scope)
    given = ", ".join(["_layer"] * (provided is not None) + [name for name, _ in heads])
    lines = [
        f"def _guard({', '.join(['_layer'] * (provided is not None) + [h for _, h in heads])}):",
        "    try:",
        f"        _tokens = {_tokens(chain.spec)}.shape[0]",
        "    except Exception:  # no tensor: the guard of any row says what is wrong with the call",
        f"        return _rest({given})",
    ]
    for number, (ceiling, guard) in enumerate(rows):
        scope[f"_row{number}"] = guard
        lines += [f"    if _tokens <= {ceiling}:", f"        return _row{number}({given})"]
    return _executed(chain, [*lines, f"    return _rest({given})"], scope)


def _tokens(spec: OpSpec) -> str:
    """The argument that tells a call's token count, as source: the first that has one row per token
    and is given."""
    names = [name for name in spec.parameters if name in spec.by_token]
    nullable = _nullable(spec)
    always = next((n for n, name in enumerate(names) if name not in nullable), len(names) - 1)
    source = names[always]
    for name in reversed(names[:always]):
        source = f"({name} if {name} is not None else {source})"
    return source


def _heads(chain: Chain, provided: Provided | None, scope: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, how it stands in the head) of each parameter of a guard; defaults go to `scope`."""
    nullable = _nullable(chain.spec)
    heads: list[tuple[str, str]] = []
    defaults_so_far = True  # a default may only be followed by defaults
    for p in reversed(chain.parameters or ()):
        if p.name in (provided or {}):
            continue
        default = p.default
        if default is p.empty and provided is not None and p.name in nullable:
            default = None
        if default is p.empty or not defaults_so_far:
            defaults_so_far = False
            heads.insert(0, (p.name, p.name))
        else:
            scope[f"_default_{p.name}"] = default
            heads.insert(0, (p.name, f"{p.name}=_default_{p.name}"))
    return heads


def _executed(chain: Chain, lines: Sequence[str], scope: dict[str, Any]) -> FunctionType:
    """The function `_guard` of a source, named and documented as the op."""
    exec("\n".join(lines), scope)
    guard = cast("FunctionType", scope["_guard"])
    guard.__name__ = guard.__qualname__ = chain.op
    guard.__code__ = guard.__code__.replace(co_name=chain.op, co_qualname=chain.op)
    if chain.spec is not None:
        guard.__doc__ = chain.spec.oracle.__doc__
    guard.__module__ = __name__
    return guard


def _compile(chain: Chain, provided: Provided | None) -> Callable[..., Any]:
    """Write the guard for the first candidate out as source, as `dataclasses` does, and compile.

    `provided` is what a layer provides, for the method form; None for the plain one.
    """
    is_method = provided is not None
    provided = provided or {}
    if chain.parameters is None or not all(_is_plain(p.name) for p in chain.parameters):
        return _guard_of_anything(chain, is_method)
    first = chain.impls[0]
    taken = [p for p in chain.parameters if p.name not in provided]
    scope: dict[str, Any] = {
        "_fn": first.fn,
        "_Call": Call,
        "_copy": _copy,
        "_supports": chain.asked(first),
        "_chain": chain,
    }
    heads = [head for _, head in _heads(chain, provided if is_method else None, scope)]
    for name, read in provided.items():
        scope[f"_read_{name}"] = read
    values = {
        p.name: f"_read_{p.name}(_layer)" if p.name in provided else p.name
        for p in chain.parameters
    }
    everything = ", ".join(values.values())
    safe = dict(values)
    for name in (first.consumes - chain.grants) & values.keys():
        needed = {name} | (chain.spec.consumed_with[name] if chain.spec else set())
        given = " and ".join(f"{values[p]} is not None" for p in sorted(needed))
        safe[name] = f"_copy({values[name]}) if {given} else {values[name]}"
    if first.needs_layer:
        invoke = f"_fn({', '.join(['_layer', *(safe[p.name] for p in taken)])})"
    else:
        invoke = f"_fn({', '.join(safe.values())})"
    lines = [f"def _guard({', '.join(['_layer'] * is_method + heads)}):"]
    if chain.bare:
        lines += [f"    return {invoke}"]
    else:
        call = f"_Call(({everything},), {'_layer' if is_method else None})"
        asks = chain.asked(first) is not None
        lines += _guarded(invoke, call, asks=everything if asks else None)
    guard = _executed(chain, lines, scope)
    chain.record.guards.add(guard)
    if not chain.bare:
        chain.record.watch(chain.op, guard)
    return guard


def _guarded(invoke: str, call: str, *, asks: str | None) -> list[str]:
    """The body of a guard: the first candidate, and what to call when it raises or refuses.

    `asks` are the arguments to ask `supports` with, or None.
    """
    lines = ["    try:"]
    if asks is not None:
        lines += [
            f"        _verdict = _supports({asks})",
            "        if _verdict is True:",
            f"            return {invoke}",
        ]
    else:
        lines += [f"        return {invoke}"]
    lines += [
        "    except Exception as _error:",
        f"        return _chain.recover(_error, {call})",
    ]
    if asks is not None:
        lines += [f"    return _chain.refuse(_verdict, {call})"]
    return lines


def _guard_of_anything(chain: Chain, is_method: bool) -> Callable[..., Any]:
    """The guard of an op without contract whose parameters nobody states, or whose names of
    parameters could be mistaken for those that generated code uses itself."""
    first = chain.impls[0]
    signature = inspect.Signature(chain.parameters) if chain.parameters is not None else None
    demoted = chain.record.demoted(chain.op)

    def guard(*args: Any, **keywords: Any) -> Any:
        layer, args = (args[0], args[1:]) if is_method else (None, args)
        if signature is not None:
            bound = signature.bind(*args, **keywords)
            bound.apply_defaults()
            args, keywords = bound.args, bound.kwargs
        call = Call(args, layer, keywords)
        if first.impl_id in demoted:
            return chain.recover(Skipped(), call)
        try:
            refusal, result = chain._attempt(first, call)
        except Exception as error:
            return chain.recover(error, call)
        return result if refusal is None else chain.refuse(refusal, call)

    guard.__name__ = chain.op
    return guard


def _copy(argument: Any) -> Any:
    """A copy that may be overwritten and returned: contiguous, as results are."""
    return argument.clone() if argument.is_contiguous() else argument.contiguous()


def _is_plain(name: str) -> bool:
    """Whether a parameter's name means the same in generated code, and nothing else there."""
    return not name.startswith("_") and unicodedata.normalize("NFKC", name) == name


def _nullable(spec: OpSpec | None) -> frozenset[str]:
    """The parameters that may be None: those that some torch schema of the op leaves out."""
    if spec is None:
        return frozenset()
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
