"""Declared routes: from the arguments of a target in vLLM to a contract's, and back.

Most targets have an op's arguments under other names, in another order, with constants, or with
tensors of the caller's for the results. A `Route` says which. The functions that follow from it are
written out as source and compiled, so that a call costs what one written by hand does.
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

__all__ = ["Bound", "Route", "Selection", "by_contract", "by_target", "put"]

Bound = Callable[..., Any]
"""An op as something calls it: by the contract's parameters, or by those of its target."""

Selection = Callable[..., Any]
"""A function of some parameters, which it names as its own."""


@dataclass(frozen=True, eq=False)
class Route:
    """How a target's arguments are the contract's, and how its results are the op's.

    A parameter of the contract that is not told is the target's of the same name. Where the target
    has none, it has the contract's default.

    Args:
        args: the contract's parameter -> the target's that it is, or a function of those that it
            names. `{"x": "input"}`.
        constants: parameter -> value. With one of the contract's the op is called. Of the target's,
            a call with another value is not the op.
        only: the parameters of the target that it names -> whether a call is the op. Not asked
            where a constant has another value.
        out: the target's parameters that it leaves the results in, in their order; a string for
            one. Empty where the target returns them.
        results: (the op's results, the parameters of the target that it names) -> what is left in
            `out`, or else returned.
        own_args: the target's parameter -> a function of the contract's that it names: what vLLM's
            own kernel is called with, where that does not follow from the others. A parameter of
            `out` that is none of the contract's is a new tensor, as the contract's `fake` has it.
        own_results: (what vLLM's own has returned, or the tensors of `out` that it has written, the
            contract's parameters that it names) -> the op's results.
    """

    args: Mapping[str, str | Selection] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    only: Selection | None = None
    out: str | tuple[str, ...] = ()
    results: Selection | None = None
    own_args: Mapping[str, Selection] = field(default_factory=dict)
    own_results: Selection | None = None

    def __call__(self, bound: Bound) -> Bound:
        """A target's route or native, which only the target of a loaded contract's binding has.

        Raises:
            TypeError: always.
        """
        raise TypeError("a declared route is called by the bindings of the registry alone")

    @property
    def targets(self) -> tuple[str, ...]:
        """The parameters of `out`."""
        return (self.out,) if isinstance(self.out, str) else self.out

    @property
    def renamed(self) -> dict[str, str]:
        """The target's parameter -> the contract's that it is, of those under another name."""
        return {theirs: name for name, theirs in self.args.items() if isinstance(theirs, str)}

    def written(self, spec: OpSpec) -> tuple[str, ...]:
        """The contract's arguments that the target leaves results in."""
        names = (self.renamed.get(name, name) for name in self.targets if name not in self.own_args)
        return tuple(name for name in names if name in spec.parameters)


def by_target(route: Route, parameters: tuple[str, ...], spec: OpSpec, op: Bound) -> Bound:
    """The op as its target calls it: a function of the target's `parameters`.

    Of `silu_and_mul(x)` at the operator `_C::silu_and_mul(result, input)`::

        def place(result, input):
            return _put(result, _op(input))

    Raises:
        TypeError: the route does not tell one of the contract's arguments, or names a parameter
            that there is not.
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
    """vLLM's own kernel or function of a target as the op: a function of the contract's parameters.

    Of the same op and operator::

        def silu_and_mul(x):
            _to_result, = _parts(_fake(x), 1)
            _own(_to_result, x)
            return _to_result

    Raises:
        TypeError: the route does not tell one of the target's arguments, or names a parameter that
            there is not.
    """
    scope = {"_own": own, "_fake": spec.fake, "_parts": _parts}
    source = _Source(scope, route.constants)
    told: dict[str, str | Selection] = {**route.renamed, **route.own_args}
    new = {t: f"_to_{t}" for t in route.targets if t not in told and t not in spec.parameters}
    if new:
        made = f"_parts(_fake({', '.join(spec.parameters)}), {len(route.targets)})"
        source.lines.append(f"{', '.join(f'_to_{name}' for name in route.targets)}, = {made}")
    known = {*spec.parameters, *new.values()}
    given = source.arguments(parameters, known, told | new, {})
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
    """A function in the making.

    Args:
        scope: the values that it uses, by name.
        constants: the route's.
        lines: its body.
    """

    scope: dict[str, Any]
    constants: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)

    def arguments(
        self,
        wanted: Iterable[str],
        known: Collection[str],
        told: Mapping[str, str | Selection],
        defaults: Mapping[str, Any],
    ) -> list[str]:
        """The `wanted` arguments of a call, as source.

        Args:
            wanted: parameters of what is called.
            known: those of the function.
            told: a wanted one -> the known one that it is, or what it is computed by.
            defaults: the values of others.
        """
        found = []
        for name in wanted:
            argument = told.get(name, name)
            if not isinstance(argument, str):
                found.append(self.call(argument, known))
            elif name in self.constants:
                found.append(self.value(self.constants[name]))
            elif argument in known:
                found.append(argument)
            elif name in defaults:
                found.append(self.value(defaults[name]))
            else:
                raise TypeError(f"the route does not tell {name!r}, and has {argument!r} nowhere")
        return found

    def call(self, selection: Selection, known: Collection[str], *first: str) -> str:
        """A call with `first` and with those of the `known` parameters that it names, as source."""
        names = list(inspect.signature(selection).parameters)[len(first) :]
        if unknown := [name for name in names if name not in known]:
            raise TypeError(f"a function of the route takes {unknown[0]!r}, which is no parameter")
        return f"{self.value(selection)}({', '.join([*first, *names])})"

    def value(self, value: Any) -> str:
        """The name under which the function has a value."""
        if value is None or isinstance(value, bool):
            return str(value)
        name = f"_{len(self.scope)}"
        self.scope[name] = value
        return name

    def compiled(
        self, name: str, parameters: Sequence[str], values: Mapping[str, Any], result: str
    ) -> Bound:
        """The function of these lines.

        Args:
            name: its name.
            parameters: its own; the last ones that have values need not be given.
            values: these values.
            result: what it returns, as source.
        """
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
    return compile(source, "<string>", "exec")  # a name that vLLM looks for no file of


def _defaults(spec: OpSpec) -> dict[str, Any]:
    of = spec.signature.parameters.values()
    return {p.name: p.default for p in of if p.default is not p.empty}


def _listed(out: str | tuple[str, ...], names: Sequence[str]) -> str:
    """One tensor, or a tuple of them, as source."""
    return names[0] if isinstance(out, str) else f"({', '.join(names)},)"


def _parts(made: Any, count: int) -> tuple[Any, ...]:
    """So many results; None for those that a call has not."""
    parts = made if isinstance(made, tuple) else (made,)
    return (*parts, *[None] * count)[:count]


def put(
    target: torch.Tensor | tuple[torch.Tensor | None, ...] | None,
    result: torch.Tensor | tuple[torch.Tensor | None, ...] | None,
) -> None:
    """Leave an op's results where its operator leaves them: for `OperatorTarget.route`.

    What an implementation has computed in place is not copied. Everything that must be copied is
    apart from all targets before the first one is written.

    Args:
        target: the operator's tensor, or several; None for one that this call has not.
        result: what the op returned, in the targets' order, of their shapes and dtypes.
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
    import torch

    aliases: Callable[[Any, Any], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
    written = [to for to in targets if to is not None]
    apart = [
        (to, part.clone() if any(aliases(part, other) for other in written) else part)
        for to, part in pairs
    ]
    for to, part in apart:
        to.copy_(part)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two are one tensor, or two views of the same elements in the same order.

    Tensors that are traced have no memory to compare: to all of them torch gives the address 0.
    """
    if one is other:
        return True
    import torch

    aliases: Callable[[Any, Any], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
    return (
        aliases(one, other)
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )
