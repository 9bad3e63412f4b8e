"""Adapt implementations with fewer or more trailing parameters than their contract's, when they are
registered.

Contracts only ever gain trailing parameters with defaults, and implementations keep working: one
that lacks such a parameter refuses calls that give it another value, and says which; one that has
further parameters with defaults is called without them; one that takes any (`*args`) is given those
of the contract. Behind the registry, all have the contract's parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..contracts import OpSpec
from ..contracts.spec import differs
from ..contracts.takes import checked, supports_of
from .types import OpImpl, older_probe, parameters_of

Parameters = Sequence[inspect.Parameter]

VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}

INPLACE = "inplace"
"""The parameter by which the older form says that it may overwrite its arguments."""


def asked_for(impl: OpImpl, spec: OpSpec) -> Callable[..., object] | None:
    """Who says whether `impl` takes a call, of the contract's parameters; None takes any.

    An implementation that takes the layer is given plain layers only, as the contract tells them.
    """
    return spec.plain if impl.needs_layer else impl.supports


def verdict_of(impl: OpImpl, spec: OpSpec, args: Sequence[Any]) -> object:
    """True where `impl` takes the call, or where nobody says; else what who says it gave."""
    asked = asked_for(impl, spec)
    return True if asked is None else asked(*args)


def fitted(impl: OpImpl, spec: OpSpec) -> OpImpl:
    """`impl` with the contract's parameters, where it differs only in trailing optional ones.

    What differs otherwise comes back as it is. An implementation that declares nothing in
    `consumes` is called with `inplace=False` if it has that parameter: its arguments stay intact.
    One that takes the layer overwrites what layers own, as vLLM's kernels do, and its form has no
    way to say so: it counts as consuming whatever the contract lets it.
    """
    fn, supports, available = impl.fn, impl.supports, impl.available
    if impl.takes is not None and not impl.needs_layer:
        supports = supports_of(spec, impl.takes)
        if impl.traceable and not impl.takes:  # with `supports` it would be opaque
            fn, supports = checked(fn, supports), None
    traced = _spread_out(impl.traced, tuple(spec.signature.parameters.values()))
    consumes = impl.consumes or (spec.consumable if impl.needs_layer else frozenset())
    told = parameters_of(fn)
    if told is not None:
        wanted = tuple(spec.signature.parameters.values())
        if impl.needs_layer:  # what the layer provides is no parameter of this form
            wanted = tuple(p for p in wanted if p.name not in spec.from_layer)
            rest = [_as_wanted(p, wanted) for p in told[1:]]  # it may have defaults of its own
            fn = _fitted(fn, wanted, rest, layer=told[0].name, intact=not consumes)
        else:
            fn = _fitted(fn, wanted, told, intact=not consumes)
            own = _without_inplace(_spread(told, wanted), wanted)
            if supports is not None or _missing(wanted, own):
                supports = _asking(supports, wanted, _missing(wanted, own))
            # Of a newer contract's parameters it is given none, so it overwrites none.
            consumes -= {p.name for p in _further(wanted, own)}
        if fn is not impl.fn:  # the older form's probe hangs on the function that is wrapped here
            available = available or older_probe(impl.fn)
    made = (fn, supports, traced, consumes)
    if made == (impl.fn, impl.supports, impl.traced, impl.consumes):
        return impl
    return dataclasses.replace(
        impl,
        fn=fn,
        supports=supports,
        takes=None,
        traced=traced,
        available=available,
        consumes=consumes,
    )


def shape(parameters: Parameters) -> list[tuple[object, ...]]:
    """What must be equal in two lists of parameters: names and defaults, in order."""
    return [(p.name, p.default) for p in parameters]


def _spread(told: Parameters, wanted: Parameters) -> Parameters:
    """`told` with the parameters of `wanted` that `*args` and `**kwargs` take in their place."""
    kinds = {p.kind for p in told}
    if not kinds & VARIADIC:
        return told
    plain = [p for p in told if p.kind not in (*VARIADIC, inspect.Parameter.KEYWORD_ONLY)]
    named = [p for p in told if p.kind is inspect.Parameter.KEYWORD_ONLY]
    rest = wanted[len(plain) :]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        asked = {p.name for p in named}
        return [*plain, *itertools.takewhile(lambda p: p.name not in asked, rest), *named]
    by_name = {p.name: p.replace(kind=p.KEYWORD_ONLY) for p in rest} | {p.name: p for p in named}
    return [*plain, *by_name.values()]


def _spread_out(fn: Callable[..., Any] | None, wanted: Parameters) -> Callable[..., Any] | None:
    """`fn` as a function of `wanted`, if it takes `*args` or `**kwargs`; else `fn` itself."""
    told = parameters_of(fn) if fn is not None else None
    if fn is None or told is None or _spread(told, wanted) is told:
        return fn
    return _fitted(fn, wanted, told, intact=False)


def _without_inplace(told: Parameters, wanted: Parameters) -> Parameters:
    """`told` without the older form's flag, unless that is a parameter of the contract."""
    if any(p.name == INPLACE for p in wanted):
        return told
    return [p for p in told if p.name != INPLACE or p.default is p.empty]


def _missing(wanted: Parameters, told: Parameters) -> Parameters:
    """The trailing optional parameters that `told` lacks, if nothing else differs."""
    missing = wanted[len(told) :]
    return missing if _agree(wanted, told, missing) else ()


def _further(wanted: Parameters, told: Parameters) -> Parameters:
    """The trailing optional parameters that `told` has beyond `wanted`, if nothing else differs."""
    further = told[len(wanted) :]
    return further if _agree(wanted, told, further) else ()


def _agree(wanted: Parameters, told: Parameters, rest: Parameters) -> bool:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    optional = all(p.default is not p.empty and p.kind in named for p in rest)
    common = min(len(wanted), len(told))
    return optional and shape(wanted[:common]) == shape(told[:common])


def _fitted(
    fn: Callable[..., Any],
    wanted: Parameters,
    told: Parameters,
    *,
    layer: str | None = None,
    intact: bool,
) -> Callable[..., Any]:
    """`fn` as a function of `wanted`, or `fn` itself where there is nothing to bridge.

    Args:
        fn: the implementation.
        wanted: the parameters that it shall have.
        told: those that it has, without the layer.
        layer: the name of its first parameter, if that is the layer.
        intact: whether it must leave its arguments as they are.
    """
    is_any = _spread(told, wanted) is not told
    told = _spread(told, wanted)
    own = _without_inplace(told, wanted)
    missing = _missing(wanted, own)
    flagged = len(own) < len(told)
    if not (is_any or flagged or missing or _further(wanted, own) or _has_keywords(own)):
        return fn
    if not missing and not _agree(wanted, own, own[len(wanted) :]):
        return fn  # the registry says what is wrong with it
    passed = _passed(told, wanted)
    if intact and flagged:
        passed.append(f"{INPLACE}=False")
    given = ", ".join(passed if layer is None else [layer, *passed])
    body = _refusing(missing, "raise NotImplementedError({!r})")
    return _written(fn, wanted, [*body, f"return _fn({given})"], layer=layer)


def _has_keywords(told: Parameters) -> bool:
    return any(p.kind is p.KEYWORD_ONLY for p in told)


def _passed(told: Parameters, wanted: Parameters) -> list[str]:
    """How a function of `told` is given those of its parameters that are wanted."""
    names = {p.name for p in wanted}
    passed: list[str] = []
    by_name = False
    for p in told:
        by_name |= p.kind is p.KEYWORD_ONLY or p.name not in names  # one before it is left out
        if p.name in names:
            passed.append(f"{p.name}={p.name}" if by_name else p.name)
    return passed


def _as_wanted(parameter: inspect.Parameter, wanted: Parameters) -> inspect.Parameter:
    default = next((p.default for p in wanted if p.name == parameter.name), parameter.default)
    return parameter.replace(default=default)


def _asking(
    supports: Callable[..., Any] | None, wanted: Parameters, missing: Parameters
) -> Callable[..., Any]:
    """`supports` as a function of `wanted` that first refuses what the implementation lacks."""
    if supports is None:
        return _written(nothing, wanted, [*_refusing(missing, "return {!r}"), "return True"])
    told = parameters_of(supports)
    # One that does not tell is taken to be of the implementation's parameters.
    asked = _spread(told, wanted) if told is not None else wanted[: len(wanted) - len(missing)]
    is_any = told is not None and asked is not told
    if not (is_any or missing or shape(asked) != shape(wanted) or _has_keywords(asked)):
        return supports
    if not (
        _agree(wanted, asked, wanted[len(asked) :]) and _agree(wanted, asked, asked[len(wanted) :])
    ):
        return supports  # the registry says what is wrong with it
    lacking = {p.name: p for p in (*missing, *_missing(wanted, asked))}
    body = _refusing(list(lacking.values()), "return {!r}")
    given = ", ".join(_passed(asked, wanted))
    return _written(supports, wanted, [*body, f"return _fn({given})"])


def _refusing(missing: Parameters, how: str) -> list[str]:
    """Lines that refuse a call which gives one of `missing` another value than its default."""
    lines = []
    for p in missing:
        default = f"_default_{p.name}"
        condition = f"{p.name} is not {default}"
        if p.default is not None:
            same = f"{p.name}.__class__ is {default}.__class__ and {p.name} == {default}"
            condition += f" and not ({same}) and _differs({p.name}, {default})"
        lines += [f"if {condition}:", f"    {how.format(f'takes no {p.name}')}"]
    return lines


def _written(
    fn: Callable[..., Any], wanted: Parameters, body: list[str], *, layer: str | None = None
) -> Callable[..., Any]:
    """A function of `wanted`, written out, so that it costs a call and a compiler can trace it."""
    scope: dict[str, Any] = {"_fn": fn, "_differs": differs}
    heads = [layer] if layer is not None else []
    for p in wanted:
        scope[f"_default_{p.name}"] = p.default
        heads.append(p.name if p.default is p.empty else f"{p.name}=_default_{p.name}")
    lines = [f"def bridge({', '.join(heads)}):", *(f"    {line}" for line in body)]
    exec("\n".join(lines), scope)
    bridge: Callable[..., Any] = scope["bridge"]
    own = inspect.signature(bridge)
    bridge = functools.wraps(fn)(bridge)  # the digest and the log look at what is wrapped
    bridge.__signature__ = own  # type: ignore[attr-defined]
    return bridge


def nothing() -> None:
    """Stands for a `supports` that nobody gave."""
