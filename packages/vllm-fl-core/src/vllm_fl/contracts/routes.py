"""Declared routes: conversion between the arguments of a target in vLLM and of a contract.

A `Route` declares differences in names and order, constants, and tensors for the results. Its
functions are generated as source and compiled, so they are as fast as handwritten functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from .spec import OpSpec

if TYPE_CHECKING:
    import torch


Bound = Callable[..., Any]
"""An op as a function of the parameters of its contract or of a target."""

Selection = Callable[..., Any]
"""A function that receives only the parameters in its signature."""


@dataclass(frozen=True, eq=False)
class Route:
    """The conversion of arguments from a target to the contract, and of the op's results back.

    A contract's parameter that is not declared gets the target's parameter with the same name.
    Without such a parameter, it gets its default.

    Args:
        args: the contract's parameter -> a parameter of the target, such as `{"x": "input"}`, or a
            function of parameters of the target.
        constants: parameter -> value. A parameter of the contract always gets this value. A call
            with a different value for the target's parameter does not compute the op.
        only: parameters of the target -> whether a call computes the op. It is called only if all
            `constants` match.
        out: the target's parameters into which it writes the results, in order; a string for one
            result; empty if the target returns its results.
        results: (the op's results, parameters of the target) -> the results that are written to
            `out`, or returned.
        own_args: the target's parameter -> a function of parameters of the contract that returns
            the argument for vLLM's kernel. It is necessary for parameters that `args` and
            `constants` do not determine. A parameter of `out` that is not in the contract gets a
            new tensor from the contract's `fake`.
        own_results: (the results that vLLM's kernel returned or wrote to `out`, parameters of the
            contract) -> the op's results.
    """

    args: Mapping[str, str | Selection] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: Selection | None = None
    out: str | tuple[str, ...] = ()
    results: Selection | None = None
    own_args: Mapping[str, Selection] = field(default_factory=dict)
    own_results: Selection | None = None

    def __call__(self, bound: Bound) -> Bound:
        """Raise TypeError. The method exists only for type checks: `Binding.routed` replaces the
        route by functions."""
        raise TypeError("a declared route cannot be called; `Binding.routed` makes it a function")

    @property
    def targets(self) -> tuple[str, ...]:
        """The parameters of `out`."""
        return (self.out,) if isinstance(self.out, str) else self.out

    @property
    def renamed(self) -> dict[str, str]:
        """The target's parameter -> the contract's parameter, if their names differ."""
        return {theirs: name for name, theirs in self.args.items() if isinstance(theirs, str)}

    def written(self, spec: OpSpec) -> tuple[str, ...]:
        """Return the arguments of the contract that the target overwrites with results."""
        names = (self.renamed.get(name, name) for name in self.targets if name not in self.own_args)
        return tuple(name for name in names if name in spec.parameters)


def by_target(route: Route, parameters: tuple[str, ...], spec: OpSpec, op: Bound) -> Bound:
    """Return the op as a function of the target's `parameters`.

    For `silu_and_mul(x)` and the operator `_C::silu_and_mul(result, input)`::

        def place(result, input):
            return _put(result, _op(input))

    Raises TypeError if the route lacks a parameter of the contract or uses an unknown one.
    """
    source, defaults = _Source({"_op": op, "_put": put}, route.constants), _defaults(spec)
    checks = []
    for name in parameters:
        if name in route.constants:
            value = route.constants[name]
            checks.append(f"{name} {'is not' if value is None else '!='} {source.value(value)}")
    if route.only is not None:
        checks.append(f"not {source.call(route.only, parameters)}")
    if checks:
        source.lines += [f"if {' or '.join(checks)}:", "    return NotImplemented"]
    given = source.arguments(spec.parameters, parameters, route.args, defaults)
    result = f"_op({', '.join(given)})"
    if route.results is not None:
        source.lines.append(f"_result = {result}")
        result = source.call(route.results, parameters, "_result")
    if route.out:
        result = f"_put({_listed(route.out, route.targets)}, {result})"
    renamed, values = route.renamed, {**defaults, **route.constants}
    theirs = {p: values[renamed.get(p, p)] for p in parameters if renamed.get(p, p) in values}
    return source.compiled("place", parameters, theirs, result)


def by_contract(route: Route, parameters: tuple[str, ...], spec: OpSpec, own: Bound) -> Bound:
    """Return vLLM's kernel or function `own` as a function of the contract's parameters.

    For the op and operator of the example in `by_target`::

        def silu_and_mul(x):
            _to_result, = _parts(_fake(x), 1)
            _own(_to_result, x)
            return _to_result

    Raises TypeError if the route lacks a parameter of the target or uses an unknown one.
    """
    scope = {"_own": own, "_fake": spec.fake, "_parts": _parts}
    source = _Source(scope, route.constants)
    mapped: dict[str, str | Selection] = {**route.renamed, **route.own_args}
    new = {t: f"_to_{t}" for t in route.targets if t not in mapped and t not in spec.parameters}
    if new:
        made = f"_parts(_fake({', '.join(spec.parameters)}), {len(route.targets)})"
        source.lines.append(f"{', '.join(f'_to_{name}' for name in route.targets)}, = {made}")
    known = {*spec.parameters, *new.values()}
    given = source.arguments(parameters, known, mapped | new, {})
    arguments = dict(zip(parameters, given, strict=True))
    for name in route.targets:
        if name in route.own_args:
            source.lines.append(f"_to_{name} = {arguments[name]}")
            arguments[name] = f"_to_{name}"
    result = f"_own({', '.join(arguments.values())})"
    if route.out:
        source.lines.append(result)
        result = _listed(route.out, [arguments[name] for name in route.targets])
    if route.own_results is not None:
        source.lines.append(f"_result = {result}")
        result = source.call(route.own_results, spec.parameters, "_result")
    return source.compiled(spec.name, spec.parameters, _defaults(spec), result)


@dataclass
class _Source:
    """The source of a function that is being generated. `scope` has the values that the function
    uses, by name. `lines` is the body so far."""

    scope: dict[str, Any]
    constants: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)

    def arguments(
        self,
        wanted: Iterable[str],
        known: Collection[str],
        mapped: Mapping[str, str | Selection],
        defaults: Mapping[str, Any],
    ) -> list[str]:
        """Return the source of the arguments of a call with the parameters `wanted`. `known` are
        the parameters of the generated function. `mapped` maps a wanted parameter to a known one,
        or to a function that computes it."""
        found = []
        for name in wanted:
            argument = mapped.get(name, name)
            if not isinstance(argument, str):
                found.append(self.call(argument, known))
            elif name in self.constants:
                found.append(self.value(self.constants[name]))
            elif argument in known:
                found.append(argument)
            elif name in defaults:
                found.append(self.value(defaults[name]))
            else:
                raise TypeError(f"the route has no {argument!r} for parameter {name!r}")
        return found

    def call(self, selection: Selection, known: Collection[str], *first: str) -> str:
        """Return the source of a call of `selection` with `first` and the `known` parameters in its
        signature."""
        names = list(inspect.signature(selection).parameters)[len(first) :]
        if unknown := [name for name in names if name not in known]:
            raise TypeError(f"a function of the route has an unknown parameter {unknown[0]!r}")
        return f"{self.value(selection)}({', '.join([*first, *names])})"

    def value(self, value: Any) -> str:
        """Return the source of a value. The value is added to the scope, unless it is None or a
        bool."""
        if value is None or isinstance(value, bool):
            return str(value)
        name = f"_{len(self.scope)}"
        self.scope[name] = value
        return name

    def compiled(
        self, name: str, parameters: Sequence[str], values: Mapping[str, Any], result: str
    ) -> Bound:
        """Compile the function. Parameters at the end that are in `values` are optional, with these
        defaults. `result` is the source of the expression that it returns."""
        last = next((n for n, p in enumerate(reversed(parameters)) if p not in values), None)
        optional = parameters[len(parameters) - last :] if last is not None else parameters
        heads = (f"{p}={self.value(values[p])}" if p in optional else p for p in parameters)
        lines = [*self.lines, f"return {result}"]
        text = "\n    ".join([f"def {name}({', '.join(heads)}):", *lines])
        exec(_compiled(text), self.scope)
        function: Bound = self.scope[name]
        return function


@cache
def _compiled(source: str) -> CodeType:
    return compile(source, "<string>", "exec")  # vLLM does not look for a file of this name


def _defaults(spec: OpSpec) -> dict[str, Any]:
    of = spec.signature.parameters.values()
    return {p.name: p.default for p in of if p.default is not p.empty}


def _listed(out: str | tuple[str, ...], names: Sequence[str]) -> str:
    return names[0] if isinstance(out, str) else f"({', '.join(names)},)"


def _parts(made: Any, count: int) -> tuple[Any, ...]:
    parts = made if isinstance(made, tuple) else (made,)
    return (*parts, *[None] * count)[:count]


def put(
    target: torch.Tensor | tuple[torch.Tensor | None, ...] | None,
    result: torch.Tensor | tuple[torch.Tensor | None, ...] | None,
) -> None:
    """Write an op's results into the tensors of its operator, for `OperatorTarget.route`.

    A result that was computed in place is not copied. A result that shares memory with a target is
    cloned before the first target is written.

    Args:
        target: the tensor, or tensors, that the operator writes; None for a tensor that the call
            omits.
        result: the op's results, in the same order and with the same shapes and dtypes.
    """
    if result is target:
        return
    targets = target if isinstance(target, tuple) else (target,)
    results = result if isinstance(result, tuple) else (result,)
    pairs = [
        (to, part)
        for to, part in zip(targets, results, strict=False)
        if to is not None and part is not None and not _is_same(to, part)
    ]
    if not pairs:
        return
    written = [to for to in targets if to is not None]
    apart = [
        (to, part.clone() if any(aliases(part, other) for other in written) else part)
        for to, part in pairs
    ]
    for to, part in apart:
        to.copy_(part)


def aliases(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share memory."""
    import torch

    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of the same elements in the same order.

    Addresses cannot be compared: torch returns 0 for all traced tensors.
    """
    return one is other or (
        aliases(one, other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
