"""What an argument of a contract is, said once: check, fake and schema follow from it.

Shapes are written as in docstrings: `tokens, hidden` or `..., 2 * d`. A name stands for the size
where it is first met, or for an argument. What must hold of these is an expression in Python's
syntax: `2 * half <= head_size`.
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

__all__ = ["FLOATING", "Argument", "Problem", "Tensor", "declared", "flag", "has_rows"]
__all__ += ["integer", "integers", "like", "scalar", "tensor", "word"]

Problem = tuple[str, str] | None
"""None, or (parameter, what is wrong with it)."""

FLOATING = ("float32", "float16", "bfloat16")

Call = dict[str, Any]
"""The arguments of a call by name, and beside them the sizes that were met, as far as it was read.
The size `...` is that of the leading dimensions, a tuple."""

DIMENSION = cache(re.compile(r"(?:(\d+) \* )?([^\W\d]\w*|\.\.\.)").fullmatch)
"""A dimension that is a size, or a multiple of one."""

_compiled = cache(lambda expression: compile(expression, f"<{expression}>", "eval"))


def _value(expression: str, call: Mapping[str, Any]) -> Any:
    if expression in call:
        return call[expression]
    return eval(_compiled(expression), {}, call)


@dataclass(frozen=True, kw_only=True)
class Argument:
    """What an argument must be that is no tensor.

    Args:
        kind: how torch's schemas write it.
        classes: of which of these classes it is; a float is finite.
        where: what must hold of it, under the name `value`, and of the call; empty: nothing.
        may_be_none: None is another legal value.
    """

    kind: str
    classes: tuple[type, ...] = ()
    where: str = ""
    may_be_none: bool = False

    def optional(self) -> Self:
        """The same, or None."""
        return replace(self, may_be_none=True)

    def problem(self, name: str, value: Any, call: Call) -> Problem:
        """(name, what is wrong with a value that is not None), or None."""
        is_flag = isinstance(value, bool)
        if not isinstance(value, self.classes) or (is_flag and bool not in self.classes):
            wanted = " or ".join(each.__name__ for each in self.classes)
            return name, f"must be {wanted}, got {type(value).__name__}"
        if isinstance(value, float) and not math.isfinite(value):
            return name, f"must be finite, got {value}"
        return _broken(name, self.where, value, call | {"value": value})


def _broken(name: str, rule: str, got: object, call: Mapping[str, Any]) -> Problem:
    return (name, f"must have {rule}, got {got}") if rule and not _value(rule, call) else None


@dataclass(frozen=True, kw_only=True)
class Tensor(Argument):
    """See `tensor` and `like`."""

    shape: str
    dtypes: tuple[str, ...] = ()
    values: str = ""
    other: str = ""
    may_be_one: bool = False

    def or_one(self) -> Self:
        """The same, or one number for all rows, in at most one dimension."""
        return replace(self, may_be_one=True)

    def is_one(self, value: torch.Tensor) -> bool:
        """Whether a value is that one number: it has no rows then."""
        return self.may_be_one and value.ndim < 2

    def meet(self, x: torch.Tensor, call: Call) -> list[tuple[str, Any]]:
        """(what is declared of a dimension, its size), new sizes put into the call.

        Empty for a tensor of another number of dimensions.
        """
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

    def problem(self, name: str, value: Any, call: Call) -> Problem:
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

    def empty(self, call: Call) -> torch.Tensor | None:
        """A result of this kind, without values."""
        if self.other and call[self.other] is None:
            return None
        shape: list[Any] = []
        for text in self.shape.split(", "):
            shape += _value(text, call) if text == "..." else [_value(text, call)]
        x = _first(call)[1]
        return x.new_empty(shape, dtype=_dtype(self.dtypes[0], call) if self.dtypes else x.dtype)


def _settled(argument: Any, arguments: Mapping[str, Any]) -> Any:
    """With the shape that it has from another argument."""
    if getattr(argument, "other", ""):
        return replace(argument, shape=arguments[argument.other].shape)
    return argument


def has_rows(x: torch.Tensor) -> bool:
    """Whether a tensor has several rows with something in them: of such a call others are made."""
    return x.shape[:1] > (1,) and x.numel() > 0


def _first(call: Call) -> tuple[str, torch.Tensor]:
    return next((name, x) for name, x in call.items() if hasattr(x, "device"))


def _dtype(name: str, call: Call) -> torch.dtype:
    """That of an argument, or the one of this name, which a word may be."""
    import torch

    named = call.get(name, name)
    dtype: torch.dtype = getattr(torch, named) if isinstance(named, str) else named.dtype
    return dtype


def scalar(where: str = "") -> Argument:
    """A finite number."""
    return Argument(kind="float", classes=(int, float), where=where)


def integer(where: str = "", kind: str = "SymInt") -> Argument:
    """An integer."""
    return Argument(kind=kind, classes=(int,), where=where)


def word(*words: str) -> Argument:
    """One of these."""
    return Argument(kind="str", classes=(str,), where=f"value in {words}")


def flag(where: str = "") -> Argument:
    """True or False."""
    return Argument(kind="bool", classes=(bool,), where=where)


def tensor(shape: str, *dtypes: str, where: str = "", values: str = "") -> Tensor:
    """A tensor on the first one's device; as a result a contiguous one.

    Args:
        shape: an expression for each dimension, `...` in front for further ones; empty: one number
            in any shape.
        dtypes: names of dtypes, or of arguments whose dtype it may have, or which name it. None:
            float32, float16 or bfloat16, and of a result the first tensor's.
        where: what must hold of the sizes besides; empty: nothing.
        values: what must hold of its integers, from `low` to `high`. On the device meta there are
            none to look at.
    """
    return Tensor(kind="Tensor", shape=shape, dtypes=dtypes, where=where, values=values)


def integers(shape: str, values: str = "", where: str = "") -> Tensor:
    """A tensor of int32 or int64; see `tensor`."""
    return tensor(shape, "int32", "int64", where=where, values=values)


def like(other: str) -> Tensor:
    """A tensor of an argument's shape and dtype; as a result None where that one is None."""
    return Tensor(kind="Tensor", shape="", dtypes=(other,), other=other)


def declared(
    oracle: Callable[..., Any],
    arguments: Mapping[str, Argument],
    results: tuple[Tensor, ...] | Callable[..., Any],
    *,
    also: Callable[..., Problem] = lambda *_: None,
    bad: Callable[[Call], Iterable[tuple[str, Mapping[str, Any]]]] = lambda good: (),
    overwrites: tuple[str, ...] = (),
    **more: Any,
) -> OpSpec:
    """The contract of an op whose arguments say what they are.

    Args:
        oracle: as of `OpSpec`.
        arguments: parameter -> what it must be, in the order in which they are looked at.
        results: what they are; or `fake`, where they depend on more than sizes.
        also: the parameters -> what else is wrong with arguments that are sound by themselves.
        bad: the arguments of a sample by name -> (name, changes) of calls that must be refused,
            beyond those that follow from the declarations, which the conformance kit makes.
        overwrites: as of `Variant`. These arguments are `consumable`.
        more: what else `OpSpec` takes; without `variants` there is one, of all parameters. Without
            `by_token`, tensors whose first dimension is `tokens` or `...` have a row per token. An
            op without a target in vLLM needs no `served`.

    Raises:
        ValueError: a parameter is not declared; or as of `OpSpec`.
    """
    parameters = inspect.signature(oracle).parameters
    if missing := [name for name in parameters if name not in arguments]:
        raise ValueError(f"declared({oracle.__name__}): say what {', '.join(missing)} must be")
    arguments = {name: _settled(argument, arguments) for name, argument in arguments.items()}
    made = results if callable(results) else [_settled(each, arguments) for each in results]

    defaults = {name: parameter.default for name, parameter in parameters.items()}

    def called(args: Iterable[Any]) -> Call:
        """A call of which nothing is read yet."""
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
        """A parameter as a schema has it."""
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
