"""Declarations of a contract's arguments. The contract's check, fake and schema are derived from
them.

Shapes are written as in docstrings: `tokens, hidden` or `..., 2 * d`. A name in a shape is an
argument or a size. The first occurrence of a size sets its value. Conditions are Python expressions
with these names, such as `2 * half <= head_size`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from .spec import BadInput, OpSpec, Variant, unserved

if TYPE_CHECKING:
    import torch


Problem = tuple[str, str] | None
"""The parameter and its problem; None for a valid argument."""

FLOATING = ("float32", "float16", "bfloat16")

CallArguments = dict[str, Any]
"""The arguments and the known sizes of a call, by name. The size `...` is a tuple."""

DIMENSION = cache(re.compile(r"(?:(\d+) \* )?([^\W\d]\w*|\.\.\.)").fullmatch)
"""Matches a named size or its multiple, with the groups (factor, name)."""

_compiled = cache(lambda expression: compile(expression, f"<{expression}>", "eval"))


def _value(expression: str, call: Mapping[str, Any]) -> Any:
    if expression in call:
        return call[expression]
    return eval(_compiled(expression), {}, call)


@dataclass(frozen=True, kw_only=True)
class Argument:
    """The declaration of an argument that is not a tensor.

    Args:
        kind: its type in a torch schema.
        classes: the Python classes that its value may have. A float must be finite.
        where: a condition on the call, in which `value` is this argument; empty for no condition.
        may_be_none: whether None is also valid.
    """

    kind: str
    classes: tuple[type, ...] = ()
    where: str = ""
    may_be_none: bool = False

    def optional(self) -> Self:
        return replace(self, may_be_none=True)

    def problem(self, name: str, value: Any, call: CallArguments) -> Problem:
        is_flag = isinstance(value, bool)
        if not isinstance(value, self.classes) or (is_flag and bool not in self.classes):
            wanted = " or ".join(each.__name__ for each in self.classes)
            return name, f"must be {wanted}, got {type(value).__name__}"
        if isinstance(value, float) and not math.isfinite(value):
            return name, f"must be finite, got {value}"
        return _broken(name, self.where, value, call | {"value": value})


def _broken(name: str, rule: str, got: object, call: Mapping[str, Any]) -> Problem:
    return (name, f"must satisfy {rule}, got {got}") if rule and not _value(rule, call) else None


@dataclass(frozen=True, kw_only=True)
class Tensor(Argument):
    shape: str
    dtypes: tuple[str, ...] = ()
    values: str = ""
    other: str = ""
    may_be_one: bool = False

    def or_one(self) -> Self:
        """Return a declaration that also allows a tensor of at most one dimension with a single
        number for all rows."""
        return replace(self, may_be_one=True)

    def is_one(self, value: torch.Tensor) -> bool:
        return self.may_be_one and value.ndim < 2

    def meet(self, x: torch.Tensor, call: CallArguments) -> list[tuple[str, Any]]:
        """Return (declared dimension, size) for each dimension, and add new sizes to the call. The
        list is empty if the number of dimensions differs."""
        shape = "" if self.is_one(x) else self.shape
        names = (shape or "1").split(", ")
        sizes: tuple[Any, ...] = tuple(x.shape) if shape else (x.numel(),)
        if names[0] == "..." and (lead := len(sizes) - len(names) + 1) >= 0:
            sizes = (sizes[:lead], *sizes[lead:])
        found = [*zip(names, sizes, strict=False)] if len(names) == len(sizes) else []
        for text, size in found:
            if text not in call and (match := DIMENSION(text)):
                call.setdefault(match[2], size // int(match[1]) if match[1] else size)
        return found

    def problem(self, name: str, value: Any, call: CallArguments) -> Problem:
        import torch

        if not isinstance(value, torch.Tensor):
            return name, f"must be a torch.Tensor, got {type(value).__name__}"
        dtypes = [_dtype(each, call) for each in self.dtypes or FLOATING]
        if value.dtype not in dtypes:
            return name, f"must be {' or '.join(map(str, dtypes))}, got {value.dtype}"
        shape, found = tuple(value.shape), self.meet(value, call)
        wanted = [(text, _value(text, call)) for text, _ in found]
        if found != wanted or not found:
            sizes = "".join(f", {text} = {size}" for text, size in wanted)
            return name, f"must have the shape ({self.shape}){sizes}, got {shape}"
        other_name, other = _first(call)
        if value.device != other.device:
            return name, f"must be on {other_name}'s device {other.device}, got {value.device}"
        problem = _broken(name, self.where, shape, call)
        if problem or not self.values or value.is_meta or not value.numel():
            return problem
        low, high = (int(bound) for bound in value.aminmax())
        return _broken(name, self.values, (low, high), call | {"low": low, "high": high})

    def empty(self, call: CallArguments) -> torch.Tensor | None:
        """Return an uninitialised tensor for the contract's `fake`, or None if `other` is None in
        the call."""
        if self.other and call[self.other] is None:
            return None
        shape: list[Any] = []
        for text in self.shape.split(", "):
            shape += _value(text, call) if text == "..." else [_value(text, call)]
        x = _first(call)[1]
        return x.new_empty(shape, dtype=_dtype(self.dtypes[0], call) if self.dtypes else x.dtype)


def _settled(argument: Any, arguments: Mapping[str, Any]) -> Any:
    if getattr(argument, "other", ""):
        return replace(argument, shape=arguments[argument.other].shape)
    return argument


def has_rows(x: torch.Tensor) -> bool:
    """Whether a tensor has elements and several rows. Bad inputs are made only from such
    tensors."""
    return x.shape[:1] > (1,) and x.numel() > 0


def _first(call: CallArguments) -> tuple[str, torch.Tensor]:
    return next((name, x) for name, x in call.items() if hasattr(x, "device"))


def _dtype(name: str, call: CallArguments) -> torch.dtype:
    """Return the dtype `name`, or the dtype that the argument `name` has (tensor) or spells
    (string)."""
    import torch

    named = call.get(name, name)
    dtype: torch.dtype = getattr(torch, named) if isinstance(named, str) else named.dtype
    return dtype


def scalar(where: str = "") -> Argument:
    """Declare a finite int or float."""
    return Argument(kind="float", classes=(int, float), where=where)


def integer(where: str = "", kind: str = "SymInt") -> Argument:
    return Argument(kind=kind, classes=(int,), where=where)


def word(*words: str) -> Argument:
    """Declare a string that is one of `words`."""
    return Argument(kind="str", classes=(str,), where=f"value in {words}")


def flag(where: str = "") -> Argument:
    return Argument(kind="bool", classes=(bool,), where=where)


def tensor(shape: str, *dtypes: str, where: str = "", values: str = "") -> Tensor:
    """Declare a tensor on the device of the call's first tensor. A result must also be contiguous.

    Args:
        shape: an expression for each dimension. It may begin with `...` for any leading dimensions,
            or be empty for one number in any shape.
        dtypes: each is a dtype, a tensor with the same dtype, or a string argument that contains
            the dtype's name. By default an argument may be float32, float16 or bfloat16, and a
            result has the dtype of the first tensor.
        where: a further condition on the sizes; empty for none.
        values: a condition on `low` and `high`, the smallest and the largest integer. It is not
            checked on the meta device.
    """
    return Tensor(kind="Tensor", shape=shape, dtypes=dtypes, where=where, values=values)


def integers(shape: str, values: str = "", where: str = "") -> Tensor:
    return tensor(shape, "int32", "int64", where=where, values=values)


def like(other: str) -> Tensor:
    """Declare a tensor with the shape and dtype of an argument. A result is None if the argument is
    None."""
    return Tensor(kind="Tensor", shape="", dtypes=(other,), other=other)


def declared(
    oracle: Callable[..., Any],
    arguments: Mapping[str, Argument],
    results: tuple[Tensor, ...] | Callable[..., Any],
    *,
    also: Callable[..., Problem] = lambda *_: None,
    bad: Callable[[CallArguments], Iterable[tuple[str, Mapping[str, Any]]]] = lambda good: (),
    overwrites: tuple[str, ...] = (),
    **more: Any,
) -> OpSpec:
    """Make the contract of an op from declarations of its arguments.

    Args:
        oracle: see `OpSpec`.
        arguments: parameter -> its declaration, in the order of the checks.
        results: the declarations of the results; or `fake`, if the results depend on more than
            sizes.
        also: the parameters -> a problem of the whole call, or None. It is called if every argument
            is valid.
        bad: the arguments of a sample by name -> further calls that `check` must refuse, each as
            (name, changed arguments). The conformance kit derives other bad calls from the
            declarations.
        overwrites: see `Variant`. These arguments are `consumable`.
        more: other fields of `OpSpec`. By default, `variants` is one variant with all parameters,
            and `by_token` contains the tensors with the first dimension `tokens` or `...`. Only an
            op with a target in vLLM needs `served`.

    Raises:
        ValueError: a parameter is not declared, or `OpSpec` raised it.
    """
    parameters = inspect.signature(oracle).parameters
    if missing := [name for name in parameters if name not in arguments]:
        raise ValueError(f"declared({oracle.__name__}): no declaration for {', '.join(missing)}")
    arguments = {name: _settled(argument, arguments) for name, argument in arguments.items()}
    made = results if callable(results) else [_settled(each, arguments) for each in results]

    defaults = {name: parameter.default for name, parameter in parameters.items()}

    def called(args: Iterable[Any]) -> CallArguments:
        return defaults | dict(zip(parameters, args, strict=False))

    @wraps(oracle)
    def check(*args: Any) -> Problem:
        call = called(args)
        for name, argument in arguments.items():
            if call[name] is None and argument.may_be_none:
                continue
            if problem := argument.problem(name, call[name], call):
                return problem
        return also(*called(args).values())

    @wraps(oracle)
    def fake(*args: Any) -> Any:
        call = called(args)
        if callable(made):
            return made(*call.values())
        for name, argument in arguments.items():
            if isinstance(argument, Tensor) and call[name] is not None:
                argument.meet(call[name], call)
        found = tuple(each.empty(call) for each in made)
        return found if len(found) > 1 else found[0]

    def bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
        calls = (called(sample.args) for sample in more["samples"](dtype, device))
        for good in islice((call for call in calls if has_rows(_first(call)[1])), 1):
            for what, change in bad(good):
                args = tuple({**good, **change}.values())
                if problem := check(*args):
                    yield BadInput(what, args, problem[0])

    def written(name: str) -> str:
        argument, default = arguments[name], parameters[name].default
        text = f"{argument.kind}{'?' * argument.may_be_none} {name}"
        if default is inspect.Parameter.empty:
            return text
        return f'{text}="{default}"' if isinstance(default, str) else f"{text}={default!r}"

    given = more.get("outputs", ()) if callable(results) else results
    many = sum(getattr(each, "results", 1) for each in given) or 1
    returns = "Tensor" if many == 1 else f"({', '.join(['Tensor'] * many)})"
    schema = f"({', '.join(map(written, parameters))}) -> {returns}"
    variants = more.setdefault("variants", (Variant("", schema, overwrites=overwrites),))
    consumable = frozenset(name for variant in variants for name in variant.overwrites if name)
    more = {"consumable": consumable, "fake": fake, "arguments": arguments, **more}
    more.setdefault("served", unserved)
    tensors = {n: a.shape for n, a in arguments.items() if isinstance(a, Tensor)}
    by_token = (n for n, shape in tensors.items() if shape.split(", ")[0] in ("tokens", "..."))
    more.setdefault("by_token", frozenset(by_token))
    return OpSpec(oracle=oracle, check=check, bad_inputs=bad_inputs, **more)
