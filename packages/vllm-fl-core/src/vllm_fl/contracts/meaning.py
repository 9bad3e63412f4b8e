"""The identity of a contract: a hash of what it means, however and wherever it is written."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from types import CodeType, EllipsisType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from .spec import OpSpec, differs

__all__ = ["contract_digest"]

LIBRARIES = frozenset({*sys.stdlib_module_names, "numpy", "torch", "triton", "vllm"})
"""Packages that count by the names of what a contract uses of them. All else counts by its code."""

WORDS = (f"{__package__}.outputs", f"{__package__}.spec")
"""In what words a contract is written. They gain fields in time, and count by their names, too."""

LEFT_OUT = ("annotation", "ctx", "kind", "returns", "type_comment", "type_params")
"""Fields of Python's syntax that compute nothing. Some Pythons have them, and others do not."""


def contract_digest(spec: OpSpec) -> str:
    """A hash of what an op must compute, 16 hexadecimal digits; two equal ones mean the same.

    What counts: name, schemas, dtypes, outputs, tolerances, `consumable`, and the oracle's code
    with all that it reaches. Not what only tries it: samples, bad inputs, the second form.

    Code counts as Python's syntax without comments, docstrings, annotations and positions, which
    is equal on every supported Python. No name of a module counts, but for those of `LIBRARIES`.
    Code without source counts as byte code: then each minor version of Python has another digest.
    Data that code reads counts by its content. Data that it writes is its memory, and does not.
    """
    text = json.dumps(_Reader().read(spec), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Reader:
    """Says what values mean, as JSON-able data; of code and objects that is their number.

    Numbers follow the order in which they are reached, and code may reach itself.
    """

    def __init__(self) -> None:
        self._reached: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._definitions = functools.cache(_definitions)  # forgotten with it: syntax is large

    def read(self, spec: OpSpec) -> list[Any]:
        """What a contract means: itself first, then all that it reaches."""
        self._number(spec)
        return [self._meaning(thing) for thing in self._reached]  # it grows meanwhile

    def _number(self, thing: Any) -> list[Any]:
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._reached)
            self._reached.append(thing)
        return ["number", self._numbers[id(thing)]]

    def _value(self, value: Any) -> Any:
        """What a value means, in short."""
        kind = type(value)
        if value is None or isinstance(
            value, bool | int | float | complex | str | bytes | EllipsisType
        ):
            return [kind.__name__, repr(value)]
        if isinstance(value, tuple | list):
            return [kind.__name__, *map(self._value, value)]
        if isinstance(value, set | frozenset):
            return ["set", *map(self._value, sorted(value, key=_order))]
        if isinstance(value, dict | MappingProxyType):
            items = sorted(value.items(), key=lambda item: _order(item[0]))
            return ["mapping", *([self._value(key), self._value(of)] for key, of in items)]
        if isinstance(value, ModuleType):
            return ["module", value.__name__ if _is_library(value) else ""]
        if isinstance(value, MethodType):
            return ["method", self._value(value.__func__), self._value(value.__self__)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self._value, (value.func, value.args, value.keywords))]
        if callable(value) and not isinstance(value, type):
            value = inspect.unwrap(value)  # the code behind a cache or a decorator
        if isinstance(value, FunctionType | type):
            return ["name", _name(value)] if _is_library(value) else self._number(value)
        if isinstance(value, Enum):
            return ["member", self._value(kind), value.name]
        if dataclasses.is_dataclass(value) or not _is_library(kind):
            return self._number(value)
        if hasattr(value, "__qualname__"):  # a function in C
            return ["name", _name(value)]
        compares = getattr(kind, "__eq__", None) is not object.__eq__ or _home(kind) == "torch"
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)) if compares else ""
        return ["value", _name(kind), text]

    def _meaning(self, thing: Any) -> Any:
        """What a contract, code or an object means, in full."""
        if isinstance(thing, OpSpec):
            told = {name: getattr(thing, name) for name in ("name", "variants", "tolerances")}
            told |= {"dtypes": frozenset(thing.dtypes), "outputs": thing.outputs}
            told |= {"consumable": thing.consumable, "oracle": thing.oracle}
            return ["contract", self._value(told)]
        if isinstance(thing, FunctionType):
            defaults = [self._value(thing.__defaults__), self._value(thing.__kwdefaults__)]
            return ["function", *defaults, *self._code(thing, _scope(thing))]
        if isinstance(thing, type):
            scope = vars(sys.modules[thing.__module__]) if thing.__module__ in sys.modules else {}
            return ["class", *self._code(thing, scope)]
        kind = type(thing)
        state = _state(thing)
        return ["object", ["name", _name(kind)] if _is_library(kind) else self._value(kind)] + [
            [name, self._value(state[name])] for name in sorted(state)
        ]

    def _code(self, thing: Any, scope: Mapping[str, Any]) -> list[Any]:
        """The code of a function or class; and by name what it reaches of its scope."""
        nodes = self._nodes(thing)
        if nodes:
            told: Any = [_shape(node) for node in nodes]
            found = _of_source(nodes, scope)
        elif isinstance(thing, FunctionType):
            told = _byte_code(thing.__code__, thing.__doc__)
            found = _of_paths(_paths_of_byte_code(thing.__code__, scope), scope)
        else:
            told = thing.__name__
            found = {name: of for name, of in vars(thing).items() if isinstance(of, FunctionType)}
            found |= {f"base {number}": of for number, of in enumerate(thing.__bases__)}
        return [told, [[name, self._value(found[name])] for name in sorted(found)]]

    def _nodes(self, thing: Any) -> list[ast.AST]:
        """The definition of a function or class in its module; empty without source.

        Of definitions that cannot be told apart (two lambdas of a line) all.
        """
        is_class = isinstance(thing, type)
        try:
            lines, _ = inspect.findsource(sys.modules[thing.__module__] if is_class else thing)
            definitions = self._definitions("".join(lines))
        except (OSError, TypeError, KeyError, SyntaxError, ValueError):
            return []
        if is_class:
            return definitions.get((thing.__name__, 0), [])
        return definitions.get((thing.__code__.co_name, thing.__code__.co_firstlineno), [])


# ---------------------------------------------------------------------------------------------
# Names and objects


def _is_library(thing: Any) -> bool:
    home = _home(thing)
    return home.partition(".")[0] in LIBRARIES or home in WORDS


def _home(thing: Any) -> str:
    own = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return own if isinstance(own, str) else ""


def _name(thing: Any) -> str:
    """Package and name. Libraries move things between their modules from release to release."""
    return f"{_home(thing).partition('.')[0]}.{thing.__qualname__}"


def _order(key: Any) -> str:
    return getattr(key, "__qualname__", None) or repr(key)


def _state(thing: Any) -> Mapping[str, Any]:
    """An object's attributes; of a data class those that are not at their defaults."""
    if not dataclasses.is_dataclass(thing):
        return vars(thing) if hasattr(thing, "__dict__") else {}
    found = {}
    for entry in dataclasses.fields(thing):
        value, default = getattr(thing, entry.name), entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        if entry.compare and differs(value, default):
            found[entry.name] = value
    return found


def _scope(function: FunctionType) -> Mapping[str, Any]:
    """What a function's names stand for: globals, and what its closure holds."""
    found = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not there yet
            found.pop(name, None)
    return found


# ---------------------------------------------------------------------------------------------
# Source


def _definitions(source: str) -> Mapping[tuple[str, int], list[ast.AST]]:
    """(name, first line) -> those that begin there; classes, which do not know it, at line 0."""
    found: dict[tuple[str, int], list[ast.AST]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found.setdefault((node.name, 0), []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = [*node.decorator_list, node][0]
            found.setdefault((node.name, first.lineno), []).append(node)
    return found


def _shape(node: Any) -> Any:
    """Syntax as JSON-able data, without what computes nothing."""
    if isinstance(node, list):
        return [_shape(item) for item in node if not _is_idle(item)]
    if not isinstance(node, ast.AST):
        return None if node is None else repr(node)
    told = []
    for name, of in ast.iter_fields(node):
        # Pythons differ in which fields they leave empty, and in empty pieces of f-strings.
        if name in LEFT_OUT or of in (None, []):
            continue
        is_text = isinstance(node, ast.JoinedStr)
        told.append(
            [
                name,
                _shape([part for part in of if getattr(part, "value", 0) != ""] if is_text else of),
            ]
        )
    return [type(node).__name__, *told]


def _is_idle(node: Any) -> bool:
    """Whether a statement does nothing: a docstring, `pass`, or an import of what is no library.

    Such an import only gives a name to code that counts by itself.
    """
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.ImportFrom):
        return bool(node.level) or str(node.module).partition(".")[0] not in LIBRARIES
    if isinstance(node, ast.Import):
        return not any(alias.name.partition(".")[0] in LIBRARIES for alias in node.names)
    return isinstance(node, ast.Pass)


def _of_source(nodes: Iterable[ast.AST], scope: Mapping[str, Any]) -> dict[str, Any]:
    """What code uses of its scope, by dotted name, but for what it writes into."""
    nodes = [*nodes]
    parts = [part for node in nodes for part in ast.walk(node)]
    scope = {**scope, **{name: of for part in parts for name, of in _imported(part, scope)}}
    written = {name for part in parts for name in _written(part)}
    found = _of_paths((path for node in nodes for path in _paths(node)), scope)
    code = FunctionType | type | ModuleType
    return {name: of for name, of in found.items() if name not in written or isinstance(of, code)}


def _imported(part: ast.AST, scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of what code itself imports that is no library."""
    if not isinstance(part, ast.Import | ast.ImportFrom) or not _is_idle(part):
        return
    package = scope.get("__package__")
    for alias in part.names:
        try:
            if isinstance(part, ast.Import):
                module = import_module(alias.name)
                top = alias.name.partition(".")[0]
                yield alias.asname or top, module if alias.asname else sys.modules[top]
                continue
            name = "." * part.level + (part.module or "")
            module = import_module(name, package)
            if not hasattr(module, alias.name):
                separator = "" if name.endswith(".") else "."
                import_module(f"{name}{separator}{alias.name}", package)
            yield alias.asname or alias.name, getattr(module, alias.name)
        except (ImportError, AttributeError):  # the call that gets there will say so
            continue


def _written(part: ast.AST) -> Iterator[str]:
    """The names into whose values a statement writes."""
    if isinstance(part, ast.Global):
        yield from part.names
    if isinstance(part, ast.Subscript | ast.Attribute) and not isinstance(part.ctx, ast.Load):
        target: ast.AST = part
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id


def _paths(node: ast.AST) -> Iterator[list[str]]:
    """The names that code uses, each with the attributes that follow: `a.b(c)` is a.b and c."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        yield [node.id, *attributes]
        return
    for name, of in ast.iter_fields(node):
        if name not in LEFT_OUT:
            for child in of if isinstance(of, list) else [of]:
                if isinstance(child, ast.AST):
                    yield from _paths(child)


def _of_paths(paths: Iterable[list[str]], scope: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted name -> its value in a scope. Of a module or a contract only what is used counts."""
    found = {}
    for name, *attributes in paths:
        if name not in scope or name.startswith("__"):
            continue
        value, path = scope[name], name
        for attribute in attributes:
            is_module = isinstance(value, ModuleType) and not _is_library(value)
            if not (is_module or isinstance(value, OpSpec)) or not hasattr(value, attribute):
                break
            value, path = getattr(value, attribute), f"{path}.{attribute}"
        found[path] = value
    return found


# ---------------------------------------------------------------------------------------------
# Byte code


def _byte_code(code: CodeType, docstring: str | None = None) -> list[Any]:
    """Byte code as JSON-able data, without lines and files."""
    constants = [*code.co_consts]
    if docstring is not None and constants[:1] == [docstring]:
        del constants[0]
    return [
        sys.implementation.cache_tag,
        code.co_code.hex(),
        code.co_exceptiontable.hex(),
        [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags],
        [code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars],
        [_byte_code(of) if isinstance(of, CodeType) else _constant(of) for of in constants],
    ]


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _paths_of_byte_code(code: CodeType, scope: Mapping[str, Any]) -> Iterator[list[str]]:
    """The names in byte code, and any of them as an attribute of modules and contracts."""
    names = {*code.co_names, *code.co_freevars}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= {name for path in _paths_of_byte_code(inner, {}) for name in path}
    for name in sorted(names):
        if not isinstance(scope.get(name), OpSpec | ModuleType):
            yield [name]
            continue
        for attribute in sorted(names):
            yield [name, attribute]
