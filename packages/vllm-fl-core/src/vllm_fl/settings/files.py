"""Read settings files (YAML and JSON). The origin of each setting includes its line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from typing import Any

from ..plugins.registry import known_contracts
from ..plugins.setting import SettingSpec
from ..text import closest, kind_of
from .devices import DeviceOrder, Table
from .policy import DEFAULT_ORDER, MODES, OpOrder
from .schema import Declared, Setting, file_keys, is_absent
from .values import (
    DEVICES,
    EXTENDS,
    OP_CONFIG,
    ORDER_PREFIX,
    expected,
    is_ordered,
    name_of,
    read_text,
    read_value,
    value_of,
    wrong,
)

Entries = dict[str, Setting]

PLATFORM_FILES = "platform"
"""The only value of `extends`. Variables and platform files then apply as without the file."""

USERS_OWN = {
    EXTENDS: "only a user's file can extend other files",
    f"{ORDER_PREFIX}{DEFAULT_ORDER}": "it would apply to other backends' ops. Use prefer",
    "allow_vendors": "it would exclude the plugins of all other vendors. Use deny_vendors or "
    "op_backends",
    "table": "a tuning table is valid for one machine only. Set it in a user's file",
}
"""Key -> the reason why a plugin's file must not set it."""

BY_SIZE = (
    "a plugin's file must not have orders by size: they cannot be merged with other backends' "
    "files. Put results for one device model under devices, for one machine in a tuning table"
)


class Lines(dict[str, Any]):
    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


def read_settings_file(
    path: object,
    declared: Declared,
    *,
    key: str,
    distribution: str | None = None,
    asked_by: str | None = None,
) -> Entries:
    """Read a YAML file of settings. Raises SettingsError, with the line, if it has an error.

    Args:
        path: the file (text, bytes or `os.PathLike`).
        key: the setting that contains the path, for the error if the file cannot be read.
        distribution: the distribution that provides the file; None for a user's file. Its orders
            are pinned.
        asked_by: the origin of `path`, if a variable contains it.
    """
    name = _path_of(path, key, distribution)
    file = _File(name, key, f" ({distribution})" if distribution else "", distribution is None)
    root = file.load(asked_by or f"{name}{file.suffix}")
    return {setting.key: setting for setting in file.settings(root, declared)}


def read_orders(path: str) -> Entries:
    origin = f"environment {OP_CONFIG}"
    file = _File(path, "op_config", f" ({origin})", True)
    return {order.key: order for order in file.orders(file.load(origin), "")}


def read_table(path: str, origin: str) -> tuple[Table, Entries]:
    """Read a tuning table: its conditions under `holds`, and its orders under `devices`."""
    file = _File(path, "table", "", False)
    root = file.load(origin)
    parts = file.parts("table", root, f"{path}:1", ("holds", "devices"))
    at = file.at(root, "holds")
    known = ("vllm", "device", "distributions")
    holds = file.parts("holds", parts["holds"], at, (), known)
    vllm, device = (_scalar("holds", holds.get(name, ""), at) for name in known[:2])
    versions = file.mapping("holds", holds.get("distributions", {}), at, "versions")
    found = {name: _scalar("holds", version, at) for name, version in versions.items()}
    orders = file.devices(parts["devices"], file.at(root, "devices"), of_table=True)
    return Table(path, vllm, device, found), {setting.key: setting for setting in orders}


@dataclass(frozen=True)
class _File:
    """One file. `key` is the setting that contains the path. `suffix` is text after the line number
    in an origin. `users` is whether it is a user's file."""

    path: str
    key: str
    suffix: str
    users: bool

    def load(self, origin: str) -> Lines:
        import yaml  # takes 15 ms; many processes do not need it

        text = read_text(self.path, self.key, origin)
        if self.key == "op_config":
            text = text.replace("\t", " ")  # JSON is YAML, except for tabs between values
        line = 0
        try:
            root = yaml.load(text, Loader=_loader(self.users))
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line if mark else 0
            problem = ", ".join(filter(None, (error.context, error.problem)))
        except RecursionError:
            problem = "nested too deeply"
        except Exception as error:  # a value that contradicts its tag may raise anything
            problem = " ".join(str(error).split())
        else:
            return self.mapping(
                self.key, Lines() if root is None else root, self.line(1), "settings"
            )
        raise wrong(self.key, self.line(line + 1), f"invalid YAML or JSON: {problem}")

    def line(self, number: int) -> str:
        return f"{self.path}:{number}{self.suffix}"

    def at(self, mapping: Lines, name: str) -> str:
        return self.line(mapping.lines[name])

    def settings(self, root: Lines, declared: Declared) -> Iterator[Setting]:
        for key, value in root.items():
            origin = self.at(root, key)
            self.check_owner(key, origin)
            if key == EXTENDS:
                if value != PLATFORM_FILES:
                    problem = f"expected {PLATFORM_FILES}, got {kind_of(value)}"
                    raise wrong(key, origin, f"{problem}: a file cannot extend another file")
                yield Setting(key, value, origin)
            elif key == ORDER_PREFIX.rstrip("."):
                yield from self.orders(value, origin) if value is not None else ()
            elif key == DEVICES.rstrip("."):
                yield from self.devices(value, origin) if value is not None else ()
            elif (spec := declared.get(key)) is not None and spec.in_file:
                if value is not None:
                    read = _value(spec, value, origin)
                    if key == "table":  # relative to the file
                        read = os.path.join(os.path.dirname(os.path.abspath(self.path)), str(read))
                    yield Setting(key, read, origin)
            elif is_absent(key, declared) and (value is None or _plain(value) is not None):
                if value is not None:
                    yield Setting(key, _plain(value), origin)
            else:
                known = _meant(key, declared)
                raise wrong(key or self.key, origin, f"unknown key {key!r}.{known}")

    def check_owner(self, key: str, origin: str) -> None:
        if key in USERS_OWN and not self.users:
            raise wrong(key, origin, f"a plugin's file must not set it: {USERS_OWN[key]}")

    def orders(self, value: object, origin: str) -> Iterator[Setting]:
        ops = self.mapping(ORDER_PREFIX.rstrip("."), value, origin or self.line(1), "ops")
        for op, written in ops.items():
            key, origin = f"{ORDER_PREFIX}{op}", self.at(ops, op)
            if not is_ordered(op):
                raise wrong(key, origin, f"{op!r} is not a valid op name")
            self.check_owner(key, origin)
            if written is None:
                continue
            order = read_value(partial(OpOrder.of, pinned=self.users), written, key, origin)
            if any(len(rows) > 1 for rows in (order.eager, order.compiled)):
                if not self.users:
                    raise wrong(key, origin, BY_SIZE)
                if op == DEFAULT_ORDER:
                    problem = (
                        f"{DEFAULT_ORDER} must not depend on size: it covers attention and layers"
                    )
                    raise wrong(key, origin, problem)
            yield Setting(key, order, origin)

    def devices(self, value: object, origin: str, *, of_table: bool = False) -> Iterator[Setting]:
        key, found = DEVICES.rstrip("."), dict[str, list[DeviceOrder]]()
        if not isinstance(value, list):
            raise wrong(key, origin, f"expected a list of sections, got {kind_of(value)}")
        for section in value:
            parts = self.parts(key, section, origin, ("name", "op_backends"))
            at = self.at(parts, "name")
            name = _scalar(key, parts["name"], at)
            ops = self.mapping(key, parts["op_backends"], at, "ops")
            for op, written in ops.items():
                at = self.at(ops, op)
                if op == DEFAULT_ORDER or not op.isidentifier():
                    raise wrong(key, at, f"{op!r} is not a valid op name")
                order, measured = self.device_order(f"{DEVICES}{op}", written, at)
                made = DeviceOrder(order, at, name, measured, of_table)
                found.setdefault(f"{DEVICES}{op}", []).append(made)
        for key, orders in found.items():
            yield Setting(key, tuple(orders), orders[0].origin)

    def device_order(self, key: str, value: object, origin: str) -> tuple[OpOrder, str]:
        needed = () if self.users else ("measured",)
        parts = self.parts(key, value, origin, needed, (*MODES, "measured"))
        sides = {mode: parts[mode] for mode in MODES if mode in parts}
        order = read_value(partial(OpOrder.of, pinned=self.users), sides, key, origin)
        figure = parts.get("measured")
        if figure is None:
            return order, ""
        names = ("date", "device", "ratio", "what")
        figure_parts = self.parts(key, figure, origin, names)
        day, device, ratio, what = (_scalar(key, figure_parts[name], origin) for name in names)
        factor = f"{read_value(float, ratio, key, origin):g} times as fast"
        return order, f"measured {day} on {device}: {factor} in {what}"

    def mapping(self, key: str, value: object, origin: str, what: str) -> Lines:
        if value == {}:
            return Lines()
        if not isinstance(value, Lines):
            raise wrong(key, origin, f"expected a mapping of {what}, got {kind_of(value)}")
        return value

    def parts(
        self,
        key: str,
        value: object,
        origin: str,
        needed: tuple[str, ...],
        more: tuple[str, ...] = (),
    ) -> Lines:
        known = dict.fromkeys((*needed, *more))
        found = self.mapping(key, value, origin, ", ".join(known))
        for name in found:
            if name not in known:
                problem = f"unknown key {name!r}.{closest(name, known)} Known: {', '.join(known)}"
                raise wrong(key, self.at(found, name), problem)
        for name in needed:
            if name not in found:
                raise wrong(key, origin, f"{name} is missing")
        return found


@cache
def _loader(users: bool) -> Any:
    import yaml

    # The parser in C is ten times as fast, but its errors are less clear.
    fast: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    Loader: Any = type("Loader", (yaml.SafeLoader if users else fast,), {})

    def mapping(loader: Any, node: Any) -> Lines:
        found = Lines()
        for key_node, value in node.value:
            name = (
                "" if key_node.tag.endswith(":merge") else loader.construct_object(key_node, True)
            )
            if key_node.tag.endswith(":merge"):
                problem = "merge keys (<<) are not supported; write the keys out"
            elif not isinstance(name, str):
                problem = f"expected text as a key, got {kind_of(name)}"
            elif name in found:
                problem = f"{name!r} is set twice, first on line {found.lines[name]}"
            else:
                found.lines[name] = key_node.start_mark.line + 1
                found[name] = loader.construct_object(value, True)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        return found

    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    return Loader


def _value(spec: SettingSpec[Any], value: object, origin: str) -> object:
    if isinstance(spec.default, bool) or isinstance(value, bool):
        if isinstance(value, bool) and isinstance(spec.default, bool):
            return value
    elif spec.names and isinstance(value, list):
        for name in value:
            if not isinstance(name, str):
                raise wrong(spec.key, origin, f"expected a name, got {kind_of(name)}")
        names = (read_value(name_of, name, spec.key, origin) for name in value)
        return tuple(dict.fromkeys(names))
    elif isinstance(value, str):
        return read_value(partial(value_of, spec), value, spec.key, origin)
    raise wrong(spec.key, origin, f"expected {expected(spec)}, got {kind_of(value)}")


def _scalar(key: str, value: object, origin: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | date):
        raise wrong(key, origin, f"expected text, a number or a date, got {kind_of(value)}")
    return str(value)


def _plain(value: object) -> object:
    """Read a setting that no loaded plugin declares; None if the value is invalid."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value if isinstance(value, bool | str) else None


def _path_of(path: object, key: str, distribution: str | None) -> str:
    try:
        return os.fsdecode(path)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        who = distribution or "policy_from_config"
        raise wrong(key, who, f"expected a path, got {type(path).__name__}") from error


def _meant(key: str, declared: Declared) -> str:
    for spec in declared.values():
        if key in (spec.key, spec.variable):
            if spec.in_file:
                return f" In a file, use {spec.key}."
            return f" Only the variable {spec.variable} can set it."
    if key == "holds":
        return " To use a tuning table, set VLLM_FL_TABLE, or `table` in a file."
    if key in known_contracts().contracts:
        return " It is an op: write it under op_backends."
    known = file_keys(declared)
    return closest(key, known) or f" Known: {', '.join(known)}."
