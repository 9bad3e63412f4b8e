"""Adapt implementations with fewer or more trailing parameters than their contract.

New parameters of a contract are always trailing and have defaults. At registration each
implementation gets the parameters of its contract. If it lacks a parameter, calls that set this
parameter are unsupported. Its additional parameters are not passed. `*args` receives the remaining
parameters of the contract.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..contracts import OpSpec
from ..contracts.call_checks import supports_of, with_check
from ..contracts.spec import differs
from .answers import older_probe, parameters_of
from .types import AttentionImpl, AttentionRequest, OpImpl

Parameters = Sequence[inspect.Parameter]

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

RAISES, RETURNS = "raise NotImplementedError({!r})", "return {!r}"
"""Statements for an unsupported call, in an implementation and in `supports`."""

INPLACE = "inplace"
"""The older form's flag: whether an implementation may overwrite its arguments."""


def asked_for(impl: OpImpl, spec: OpSpec) -> Callable[..., object] | None:
    """Return the function that decides whether `impl` supports a call; None if it supports all
    calls. An implementation that needs the layer supports only layers that are plain according to
    the contract."""
    return spec.plain if impl.needs_layer else impl.supports


def verdict_of(impl: OpImpl, spec: OpSpec, args: Sequence[Any]) -> object:
    """Return True if `impl` supports the call, otherwise the reason."""
    asked = asked_for(impl, spec)
    return True if asked is None else asked(*args)


def fitted(impl: OpImpl, spec: OpSpec) -> OpImpl:
    """Return `impl` with the contract's parameters if only trailing optional ones differ, and with
    its `takes` compiled. Other differences are kept, and cause an error later.

    If `consumes` is empty and `fn` has a parameter `inplace`, it gets `inplace=False`. An
    implementation that needs the layer then consumes everything that the contract allows.
    """
    fn, supports, available = impl.fn, impl.supports, impl.available
    if impl.takes is not None:
        rules: Any = supports_of(spec, impl.takes)
        if impl.traceable and not impl.takes:  # with `supports` it would be opaque
            fn = with_check(fn, rules)
        else:
            supports = rules
    consumes = impl.consumes or (spec.consumable if impl.needs_layer else frozenset())
    wanted: Parameters = tuple(spec.signature.parameters.values())
    own = parameters_of(fn)
    if own is not None and impl.needs_layer:  # the layer provides some of the parameters
        wanted = [p for p in wanted if p.name not in spec.from_layer]
        defaults = {p.name: p.default for p in wanted}
        rest = [p.replace(default=defaults.get(p.name, p.default)) for p in own[1:]]
        fn = _bridged(fn, wanted, rest, RAISES, layer=own[0].name, intact=not consumes)
    elif own is not None:
        fn = _bridged(fn, wanted, own, RAISES, intact=not consumes)
        missing, further = _rest(wanted, _without_inplace(_spread(own, wanted), wanted)) or ((), ())
        if supports is not None:
            asked = parameters_of(supports) or wanted[: len(wanted) - len(missing)]
            supports = _bridged(supports, wanted, asked, RETURNS, lacking=missing)
        elif missing:
            supports = _written(nothing, wanted, [*_refusing(missing, RETURNS), "return True"])
        # The additional parameters are never passed, so they are not overwritten.
        consumes -= {p.name for p in further}
    if fn is not impl.fn:  # the older form's probe is an attribute of the wrapped function
        available = available or older_probe(impl.fn)
    if (fn, supports, consumes) == (impl.fn, impl.supports, impl.consumes):
        return impl
    return dataclasses.replace(
        impl, fn=fn, supports=supports, takes=None, available=available, consumes=consumes
    )


def shape(parameters: Parameters) -> list[tuple[object, ...]]:
    """Return the part of a signature that must be equal: names and defaults, in order."""
    return [(p.name, p.default) for p in parameters]


def _spread(own: Parameters, wanted: Parameters) -> Parameters:
    """Return `own`, with the rest of `wanted` instead of `*args` and `**kwargs`."""
    plain = [p for p in own if p.kind in NAMED]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in own)
    return [*plain, *wanted[len(plain) :]] if takes_any else own


def _without_inplace(own: Parameters, wanted: Parameters) -> Parameters:
    """Return `own` without the flag `inplace`, unless the contract has that parameter."""
    if any(p.name == INPLACE for p in wanted):
        return own
    return [p for p in own if p.name != INPLACE or p.default is p.empty]


def _rest(wanted: Parameters, own: Parameters) -> tuple[Parameters, Parameters] | None:
    """Return the optional parameters that `own` lacks and its additional parameters, or None if the
    parameters differ in other ways."""
    common = min(len(wanted), len(own))
    missing, further = wanted[common:], own[common:]
    optional = all(p.default is not p.empty and p.kind in NAMED for p in (*missing, *further))
    agrees = optional and shape(wanted[:common]) == shape(own[:common])
    return (missing, further) if agrees else None


def _bridged(
    fn: Callable[..., Any],
    wanted: Parameters,
    own: Parameters,
    refuse: str,
    *,
    lacking: Parameters = (),
    layer: str | None = None,
    intact: bool = False,
) -> Callable[..., Any]:
    """Return `fn` as a function of `wanted`, or `fn` itself if nothing differs.

    For an implementation `fn(x, inplace=True)` of the contract `(x, weight=None)`::

        def bridge(x, weight=_default_weight):
            if weight is not _default_weight:
                raise NotImplementedError('has no parameter weight')
            return _fn(x, inplace=False)

    `fn` is the implementation or its `supports`. It has the parameters `own` and, before them,
    `layer` if that is set. The parameters in `lacking` must also have their default. `intact`:
    whether `fn` must leave its arguments unchanged.
    """
    spread = _spread(own, wanted)
    plain = _without_inplace(spread, wanted)
    rest = _rest(wanted, plain)
    if rest is None:
        return fn  # the registry reports what differs
    flagged = len(plain) < len(spread)
    missing = list({p.name: p for p in (*lacking, *rest[0])}.values())
    is_other = spread is not own or any(p.kind is p.KEYWORD_ONLY for p in own)
    if not (missing or rest[1] or flagged or is_other):
        return fn
    given = [] if layer is None else [layer]
    names = {p.name for p in wanted}
    by_name = False
    for p in spread:
        by_name |= p.kind is p.KEYWORD_ONLY or p.name not in names  # positions shift
        if p.name in names:
            given.append(f"{p.name}={p.name}" if by_name else p.name)
    if intact and flagged:
        given.append(f"{INPLACE}=False")
    body = [*_refusing(missing, refuse), f"return _fn({', '.join(given)})"]
    return _written(fn, wanted, body, layer=layer)


def _refusing(missing: Parameters, how: str) -> list[str]:
    """Generate code that refuses a call if a `missing` parameter is not its default."""
    lines = []
    for p in missing:
        default = f"_default_{p.name}"
        condition = f"{p.name} is not {default}"
        if p.default is not None:
            same = f"{p.name}.__class__ is {default}.__class__ and {p.name} == {default}"
            condition += f" and not ({same}) and _differs({p.name}, {default})"
        lines += [f"if {condition}:", f"    {how.format(f'has no parameter {p.name}')}"]
    return lines


def _written(
    fn: Callable[..., Any], wanted: Parameters, body: list[str], *, layer: str | None = None
) -> Callable[..., Any]:
    """Generate a function with the parameters `wanted`. It costs one additional call, and a
    compiler can trace it."""
    scope: dict[str, Any] = {"_fn": fn, "_differs": differs}
    heads = [layer] if layer is not None else []
    for p in wanted:
        scope[f"_default_{p.name}"] = p.default
        heads.append(p.name if p.default is p.empty else f"{p.name}=_default_{p.name}")
    lines = [f"def bridge({', '.join(heads)}):", *(f"    {line}" for line in body)]
    exec("\n".join(lines), scope)
    bridge: Callable[..., Any] = scope["bridge"]
    own = inspect.signature(bridge)
    bridge = functools.wraps(fn)(bridge)  # the digest and the log inspect the wrapped function
    bridge.__signature__ = own  # type: ignore[attr-defined]
    return bridge


def nothing() -> None:
    """A stand-in for a missing `supports`."""


def from_older_form(impl: OpImpl) -> AttentionImpl:
    """Convert the older form: an OpImpl with `fn(use_mla, use_sparse) -> class path`."""
    parameters = parameters_of(impl.fn) or ()
    names = {p.name for p in parameters}
    takes_all = not parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def class_path(request: AttentionRequest) -> str:
        asked = {"use_mla": request.use_mla, "use_sparse": request.use_sparse}
        path: Any = impl.fn(**{k: v for k, v in asked.items() if takes_all or k in names})
        return str(path)

    def available() -> Any:
        if impl.needs_layer:
            return "it needs a layer (self), but backends are chosen before layers exist"
        return impl.availability()

    return AttentionImpl(
        impl.impl_id, class_path, impl.kind, impl.vendor, impl.priority, available=available
    )
