"""Compile the check of an implementation's calls: the contract and further rules."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .arguments import DIMENSION, FLOATING, Argument, Tensor
from .spec import OpSpec

Rule = str | Callable[..., object]
"""An expression of arguments and sizes, or a function of some of them that returns True or a
reason."""

BROKEN = "the arguments break the contract"


def supports_of(spec: OpSpec, rules: Iterable[Rule]) -> Callable[..., object]:
    """Compile a `supports` that returns True for a call that keeps the contract and every rule.

    It checks all declarations in the contract's `arguments`, except the values of tensors. For an
    op with one argument `x` of shape `tokens, hidden`, and the rule `hidden % 8 == 0`::

        def supports(x):
            tokens = None
            hidden = None
            if not (isinstance(x, torch.Tensor) and x.dtype in (torch.float32, )): return _broken
            _shape = x.shape
            if not (len(_shape) == 2): return _broken
            tokens = _shape[0]
            hidden = _shape[1]
            if not (hidden % 8 == 0): return _needs('hidden % 8 == 0', hidden=hidden)
            return True

    Args:
        rules: each may use the parameters, the sizes in the contract's shapes, and `torch`. If an
            argument is None, its sizes are None.

    Raises:
        SyntaxError: a rule is not an expression.
        ValueError: a rule uses another name.
    """
    import torch

    scope: dict[str, Any] = {"torch": torch, "_inf": math.inf}
    scope |= {"_broken": BROKEN, "_needs": _needs}
    sizes, checks = dict.fromkeys(spec.parameters, True), []
    for name, argument in spec.arguments.items():
        lines = _checks(name, argument, spec, sizes)
        checks += _block(f"if {name} is not None:", lines) if argument.may_be_none else lines
    for number, rule in enumerate(rules):
        where = f"{rule!r} in `takes` for {spec.name}"  # a SyntaxError contains it
        names = (
            {n.id for n in ast.walk(ast.parse(rule, where, "eval")) if isinstance(n, ast.Name)}
            if isinstance(rule, str)
            else {*inspect.signature(rule).parameters}
        )
        if unknown := names - {*sizes, *dir(builtins), "torch"}:
            raise ValueError(f"{spec.name}: {rule!r} uses unknown {', '.join(sorted(unknown))}")
        given = ", ".join(f"{name}={name}" for name in sorted(names & {*sizes}))
        if isinstance(rule, str):
            checks.append(f"if not ({rule}): return _needs({rule!r}, {given})")
        else:
            scope[f"_rule{number}"] = rule
            checks.append(f"if (_reason := _rule{number}({given})) is not True: return _reason")
    heads = []
    for p in spec.signature.parameters.values():
        scope[f"_default_{p.name}"] = p.default
        heads.append(p.name if p.default is p.empty else f"{p.name}=_default_{p.name}")
    unmet = [f"{size} = None" for size in sizes if size not in spec.parameters]
    code = _block(f"def supports({', '.join(heads)}):", [*unmet, *checks, "return True"])
    exec("\n".join(code), scope)
    supports: Callable[..., object] = scope["supports"]
    supports.__module__ = __name__
    return supports


def with_check(fn: Callable[..., Any], supports: Callable[..., object]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def check(*args: Any, **kwargs: Any) -> Any:
        if (reason := supports(*args, **kwargs)) is not True:
            raise NotImplementedError(reason)
        return fn(*args, **kwargs)

    return check


def _checks(name: str, argument: Argument, spec: OpSpec, sizes: dict[str, bool]) -> list[str]:
    """Return statements that check an argument that is not None. `sizes` maps each known name to
    True if it has a value in every call. New names are added."""
    where = [_unless(re.sub(r"\bvalue\b", name, argument.where))] if argument.where else []
    if not isinstance(argument, Tensor):
        classes = "".join(f"{each.__name__}, " for each in argument.classes)
        kept = f"isinstance({name}, ({classes}))"
        kept += f" and not isinstance({name}, bool)" * (bool not in argument.classes)
        kept += f" and -_inf < {name} < _inf" * (float in argument.classes)
        return [_unless(kept), *where]
    dtypes = "".join(f"{_dtype(each, spec)}, " for each in argument.dtypes or FLOATING)
    tensors = (n for n in spec.parameters if isinstance(spec.arguments[n], Tensor))
    first = next((n for n in tensors if not spec.arguments[n].may_be_none), name)
    kept = f"isinstance({name}, torch.Tensor) and {name}.dtype in ({dtypes})"
    kept += f" and {name}.device == {first}.device" * (name != first)
    lines = [_unless(kept)]
    one = _unless(f"{name}.numel() == 1")
    if argument.other:
        shape = [_unless(f"{name}.shape == {argument.other}.shape")]
    elif argument.shape:
        shape = [f"_shape = {name}.shape", *_sizes(argument, sizes)]
    else:
        shape = [one]
    if argument.may_be_one:
        shape = [*_block(f"if {name}.ndim < 2:", [one]), *_block("else:", shape)]
    return [*lines, *shape, *where]


def _sizes(argument: Tensor, sizes: dict[str, bool]) -> Iterator[str]:
    """Yield statements that compare `_shape` with the declared shape, and set new sizes."""
    texts = argument.shape.split(", ")
    leads = texts[0] == "..."
    yield _unless(f"len(_shape) {'>=' if leads else '=='} {len(texts) - leads}")
    for at, text in enumerate(texts):
        size = f"_shape[{at - len(texts) if leads else at}]"
        if leads and not at:
            size = f"_shape[:{1 - len(texts) or ''}]"
        source = text.replace("...", "_lead")
        match = DIMENSION(source)
        factor, base = match.groups() if match else (None, "")
        is_new = base and base not in sizes
        if is_new:
            yield f"{base} = {size}" + f" // {factor}" * bool(factor)
            sizes[base] = not argument.may_be_none
        elif base and not sizes[base]:
            yield f"{base} = {size} if {base} is None else {base}"
        if factor or not is_new:
            yield _unless(f"{size} == {source}")


def _dtype(name: str, spec: OpSpec) -> str:
    if name not in spec.parameters:
        return f"torch.{name}"
    return (
        f"{name}.dtype" if isinstance(spec.arguments[name], Tensor) else f"getattr(torch, {name})"
    )


def _unless(kept: str) -> str:
    return f"if not ({kept}): return _broken"


def _block(head: str, lines: Iterable[str]) -> list[str]:
    return [head, *(f"    {line}" for line in lines)]


def _needs(rule: str, **given: Any) -> str:
    """Return the reason for a call that breaks a rule, without tensor shapes, which vary with the
    batch."""
    got = []
    for name, value in given.items():
        is_tensor = hasattr(value, "stride")
        text = f"{value.dtype} {value.stride()} {value.device}" if is_tensor else repr(value)
        got.append(f"{name}={text}")
    return f"needs {rule}, got {', '.join(got)}"
