"""Settings files: YAML and JSON, read into settings that know their line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import SettingsError
from ..plugins.registry import known_contracts
from ..plugins.types import SettingSpec
from .devices import DeviceOrder, Measured, Table, capability_of
from .policy import (
    DEFAULT,
    MAX_ROWS,
    MAX_TOKENS,
    MODES,
    REST,
    OpOrder,
    Token,
    ceiling_of,
    closest,
    is_by_size,
)
from .schema import Declared, Setting, file_keys, is_absent
from .values import (
    BOOLEANS,
    DEVICES,
    EXTENDS,
    OP_CONFIG,
    ORDER_PREFIX,
    PER_OP,
    checked,
    expected,
    is_ordered,
    name_of,
    read_text,
    value_of,
    wrong,
)

if TYPE_CHECKING:
    from yaml import Node

Layer = dict[str, Setting]
"""What one source sets, by key."""

PLATFORM_FILES = "platform"
"""The one thing that it may say: variables and platform files, as without the file."""

TAG = "tag:yaml.org,2002:"

USERS_OWN = {
    EXTENDS: "it is one of the files that a file of a user's extends",
    f"{ORDER_PREFIX}{DEFAULT}": "it would order other backends' ops. Use prefer",
    "allow_vendors": "it would shut out every other vendor's plugin. Use deny_vendors or "
    "op_backends",
    "table": "a table holds for one machine. Name it in a file of your own",
}
"""Key -> why no plugin's file may set it."""

T = TypeVar("T")


def read_settings_file(
    path: object,
    declared: Declared,
    *,
    key: str,
    distribution: str | None = None,
    asked_by: str | None = None,
) -> Layer:
    """Read a YAML file of settings.

    Args:
        path: the file, as `os.fspath` takes it.
        declared: the settings that there are.
        key: the setting that names the file, for the error of a file that cannot be read.
        distribution: the one that ships it, or None for a user's own file. The orders of a
            user's file are pinned; a shipped one may not set `allow_vendors`.
        asked_by: the origin of `path`, where a variable names it.

    Raises:
        SettingsError: the file cannot be read, or something in it is wrong; its line is named.
    """
    name = _path_of(path, key, distribution)
    suffix = f" ({distribution})" if distribution else ""
    file = _File(name, declared, key, suffix, distribution is None)
    root = file.compose(read_text(name, key, asked_by or f"{name}{suffix}"))
    return {} if root is None else {setting.key: setting for setting in file.settings(root)}


def read_orders(path: str) -> Layer:
    """Read the JSON file that VLLM_FL_OP_CONFIG names: op -> what `OpOrder.of` reads.

    JSON is YAML, but for tabs between its parts.

    Raises:
        SettingsError: the file cannot be read, or something in it is wrong; its line is named.
    """
    origin = f"environment {OP_CONFIG}"
    file = _File(path, {}, "op_config", f" ({origin})", True)
    root = file.compose(read_text(path, "op_config", origin).replace("\t", " "))
    orders = () if root is None else file.orders(root)
    return {order.key: replace(order, variable=OP_CONFIG) for order in orders}


def read_table(path: str, origin: str) -> tuple[Table, Layer]:
    """Read the file that the setting `table` names: `holds`, and orders under `devices`.

    Raises:
        SettingsError: the file cannot be read, or something in it is wrong; its line is named.
    """
    file = _File(path, {}, "table", "", False)
    root = file.compose(read_text(path, "table", origin))
    if root is None:
        raise wrong("table", f"{path}:1", "the file is empty")
    parts = file.parts("table", root, ("holds", "devices"))
    return file.table(parts["holds"]), {
        setting.key: replace(
            setting,
            value=tuple(replace(order, of_table=True) for order in setting.value),  # type: ignore[attr-defined]
        )
        for setting in file.devices(parts["devices"])
    }


@dataclass(frozen=True)
class _File:
    """One YAML file. Nodes, not objects: they know their line, and an alias costs nothing."""

    path: str
    declared: Declared
    key: str
    suffix: str
    users: bool

    def compose(self, text: str) -> Node | None:
        import yaml  # 15 ms, and many processes read no file at all

        try:
            root: Node | None = yaml.SafeLoader(text).get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            problem = ", ".join(filter(None, (error.context, error.problem)))
            raise self.broken(mark.line if mark else 0, problem) from error
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position)
            raise self.broken(line, f"character {error.character!r}: {error.reason}") from error
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise self.broken(0, _reason(error)) from error
        if root is not None and root.tag == f"{TAG}null" and not root.value:
            return None  # nothing but comments
        return root

    def settings(self, root: Node) -> Iterator[Setting]:
        for key, key_node, node in self.pairs(root, self.key, "settings"):
            origin = self.at(key_node)
            self.check_owner(key, origin)
            if key == EXTENDS:
                yield Setting(key, self.extended(node), origin)
                continue
            if key == ORDER_PREFIX.rstrip("."):
                yield from () if node.tag == f"{TAG}null" else self.orders(node)
                continue
            if key == DEVICES.rstrip("."):
                yield from () if node.tag == f"{TAG}null" else self.devices(node)
                continue
            spec = self.declared.get(key)
            if spec is None and is_absent(key, self.declared):
                plain = _plain(node)
                if plain is not None:
                    yield Setting(key, plain, origin)
                if plain is not None or node.tag == f"{TAG}null":
                    continue
            if spec is None or not spec.in_file:
                known = _meant(key, self.declared)
                raise wrong(key or self.key, origin, f"unknown key {key!r}.{known}")
            if node.tag != f"{TAG}null":  # a key without a value sets nothing
                value = self.value(spec, node)
                if key == "table":  # beside the file that names it, wherever the process runs
                    value = os.path.join(os.path.dirname(os.path.abspath(self.path)), str(value))
                yield Setting(key, value, origin, variable=spec.variable)

    def check_owner(self, key: str, origin: str) -> None:
        if key in USERS_OWN and not self.users:
            raise wrong(key, origin, f"a plugin's file may not set it: {USERS_OWN[key]}")

    def extended(self, node: Node) -> str:
        text = self.text(EXTENDS, node, PLATFORM_FILES)
        if text != PLATFORM_FILES:
            problem = f"expected {PLATFORM_FILES}, got {text!r}: a file extends no other file"
            raise wrong(EXTENDS, self.at(node), problem)
        return text

    def orders(self, node: Node) -> Iterator[Setting]:
        for op, key_node, value in self.pairs(node, ORDER_PREFIX.rstrip("."), "ops"):
            key = f"{ORDER_PREFIX}{op}"
            if not is_ordered(op):
                raise wrong(key, self.at(key_node), f"{op!r} is not a valid op name")
            self.check_owner(key, self.at(key_node))
            if value.tag == f"{TAG}null":
                continue
            order = self.order(key, value)
            if op == DEFAULT and any(len(rows) > 1 for rows in (order.eager, order.compiled)):
                problem = f"{DEFAULT} has no rows by size: it orders attention and layers, too"
                raise wrong(key, self.at(key_node), problem)
            yield Setting(key, order, self.at(key_node), variable=PER_OP)

    def devices(self, node: Node) -> Iterator[Setting]:
        """What each op's orders are on the devices of each section."""
        import yaml

        key, found = DEVICES.rstrip("."), dict[str, list[DeviceOrder]]()
        if not isinstance(node, yaml.SequenceNode):
            raise self.mistyped(key, node, "a list of sections")
        for section in node.value:
            parts = self.parts(key, section, ("op_backends",), ("capability", "name"))
            capability, name = (
                self.scalar(key, parts[part], read) if part in parts else ""
                for part, read in (("capability", capability_of), ("name", str))
            )
            if not (capability or name):
                problem = "a section names its devices: by capability, as 9.0, or by name, as 'H*'"
                raise wrong(key, self.at(section), problem)
            for op, op_node, value in self.pairs(parts["op_backends"], key, "ops"):
                if op == DEFAULT or not op.isidentifier():
                    raise wrong(key, self.at(op_node), f"{op!r} is not the name of an op")
                order, measured = self.device_order(f"{DEVICES}{op}", value)
                made = DeviceOrder(order, self.at(op_node), capability, name, measured)
                found.setdefault(f"{DEVICES}{op}", []).append(made)
        for key, orders in found.items():
            yield Setting(key, tuple(orders), orders[0].origin)

    def device_order(self, key: str, node: Node) -> tuple[OpOrder, Measured | None]:
        """One op's order by mode, and the figure that it was written for."""
        needed = () if self.users else ("measured",)
        parts = self.parts(key, node, needed, (*MODES, "measured"))
        figure = parts.pop("measured", None)
        sides = {mode: self.side(key, side, by_size=True) for mode, side in parts.items()}
        order = self.checked(key, node, partial(OpOrder.of, pinned=self.users), sides)
        if figure is None:
            return order, None
        told = self.parts(key, figure, ("date", "device", "ratio", "what"))
        return order, Measured(
            self.scalar(key, told["date"], date.fromisoformat),
            self.text(key, told["device"], "a device's name"),
            self.scalar(key, told["ratio"], float),
            self.text(key, told["what"], "what was measured"),
        )

    def table(self, node: Node) -> Table:
        """What the orders of the file hold for."""
        parts = self.parts("holds", node, (), ("vllm", "device", "distributions"))
        found = {
            name: self.scalar("holds", parts[name], str)
            for name in ("vllm", "device")
            if name in parts
        }
        versions = (
            self.pairs(parts["distributions"], "holds", "versions")
            if "distributions" in parts
            else ()
        )
        distributions = {name: self.scalar("holds", value, str) for name, _, value in versions}
        return Table(self.path, distributions=distributions, **found)

    def parts(
        self, key: str, node: Node, needed: tuple[str, ...], more: tuple[str, ...] = ()
    ) -> dict[str, Node]:
        """A mapping of these keys, of which some are needed."""
        known = dict.fromkeys((*needed, *more))
        found = {}
        for name, key_node, value in self.pairs(node, key, ", ".join(known)):
            if name not in known:
                problem = f"unknown key {name!r}.{closest(name, known)} Known: {', '.join(known)}"
                raise wrong(key, self.at(key_node), problem)
            found[name] = value
        for name in needed:
            if name not in found:
                raise wrong(key, self.at(node), f"{name} is missing")
        return found

    def scalar(self, key: str, node: Node, read: Callable[[str], T]) -> T:
        """What is read of a text, a number or a date, as it is written."""
        import yaml

        if not isinstance(node, yaml.ScalarNode) or node.tag == f"{TAG}null":
            raise self.mistyped(key, node, "a text, a number or a date")
        return self.checked(key, node, read, node.value)

    def order(self, key: str, node: Node) -> OpOrder:
        import yaml

        plain: object
        pairs = self.pairs(node, key, "") if isinstance(node, yaml.MappingNode) else ()
        entries = {name: (key_node, value) for name, key_node, value in islice(pairs, MAX_ROWS + 2)}
        if not entries or is_by_size(entries):
            plain = self.side(key, node, by_size=self.users)
        else:
            sides = ((mode, side) for mode, (_, side) in entries.items())
            plain = {mode: self.side(key, side, by_size=self.users) for mode, side in sides}
        return self.checked(key, node, partial(OpOrder.of, pinned=self.users), plain)

    def side(self, key: str, node: Node, *, by_size: bool) -> object:
        """One mode's order: a token, a list of tokens, or rows of such by the size of a call."""
        import yaml

        if not isinstance(node, yaml.MappingNode):
            return self.tokens(key, node)
        rows: dict[str, object] = {}
        before = 0
        for name, key_node, value in islice(self.pairs(node, key, ""), MAX_ROWS + 2):
            if not by_size:
                raise wrong(
                    key,
                    self.at(key_node),
                    "a plugin's file may not order by size: the files of several backends are "
                    "merged, and rows are not. What was measured on a class of devices belongs "
                    "under devices, and what was on one machine into a file of its user",
                )
            if name != REST:
                before = self.checked(key, key_node, partial(ceiling_of, before=before), name)
            rows[name] = self.tokens(key, value)
        return rows

    def tokens(self, key: str, node: Node) -> str | list[str]:
        import yaml

        wanted = "a token, a list of tokens, the lists eager and compiled, or rows by size"
        if not isinstance(node, yaml.SequenceNode):
            return [token.strip() for token in self.text(key, node, wanted).split("|")]
        if any(isinstance(child, yaml.MappingNode) for child in node.value):
            wanted = "a token (vendor:NAME has no space after its colon)"
        return [
            str(self.checked(key, child, Token.parse, self.text(key, child, wanted)))
            for child in node.value[: MAX_TOKENS + 1]
        ]

    def value(self, spec: SettingSpec[Any], node: Node) -> object:
        import yaml

        if isinstance(spec.default, bool):
            scalar = isinstance(node, yaml.ScalarNode) and node.tag == f"{TAG}bool"
            if not scalar or node.value.lower() not in BOOLEANS:
                raise self.mistyped(spec.key, node, expected(spec))
            return BOOLEANS[node.value.lower()]
        if not spec.names or not isinstance(node, yaml.SequenceNode):
            text = self.text(spec.key, node, expected(spec))
            return self.checked(spec.key, node, partial(value_of, spec), text)
        names = (
            self.checked(spec.key, child, name_of, self.text(spec.key, child, "a name"))
            for child in node.value
        )
        return tuple(dict.fromkeys(names))

    def pairs(self, node: Node, key: str, what: str) -> Iterator[tuple[str, Node, Node]]:
        """The entries of a mapping: its keys are text, and none is set twice."""
        import yaml

        if not isinstance(node, yaml.MappingNode):
            raise self.mistyped(key, node, f"a mapping of {what}")
        lines: dict[str, int] = {}
        for key_node, value in node.value:
            if key_node.tag == f"{TAG}merge":
                raise wrong(key, self.at(key_node), "merge keys (<<) are not read; write it out")
            name = self.text(key, key_node, "text as a key")
            if name in lines:
                raise wrong(
                    name if key == self.key else f"{key}.{name}",
                    self.at(key_node),
                    f"is set twice, first in line {lines[name]}",
                )
            lines[name] = key_node.start_mark.line + 1
            yield name, key_node, value

    def text(self, key: str, node: Node, wanted: str) -> str:
        import yaml

        if not isinstance(node, yaml.ScalarNode) or node.tag != f"{TAG}str":
            raise self.mistyped(key, node, wanted)
        return str(node.value)

    def checked(self, key: str, node: Node, read: Callable[[Any], T], value: object) -> T:
        return checked(read, value, key, self.at(node))

    def mistyped(self, key: str, node: Node, wanted: str) -> SettingsError:
        kind = node.tag.removeprefix(TAG)
        if not isinstance(node.value, str):  # never print nodes: aliases make them endless
            found = {"seq": "a list", "map": "a mapping"}.get(kind, kind)
        elif kind == "null":
            found = "nothing (leave the key out, or write [] for an empty list)"
        elif kind == "str":
            found = f"the text {node.value!r}"
        else:
            found = f"{node.value} ({kind}; in quotes it is text)"
        return wrong(key, self.at(node), f"expected {wanted}, got {found}")

    def broken(self, line: int, problem: str) -> SettingsError:
        origin = f"{self.path}:{line + 1}{self.suffix}"
        return wrong(self.key, origin, f"invalid YAML or JSON: {problem}")

    def at(self, node: Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}{self.suffix}"


def _plain(node: Node) -> object:
    """The value of a setting that nobody here has declared; None for what none can be."""
    if isinstance(node.value, str):
        is_boolean = node.tag == f"{TAG}bool"
        return BOOLEANS.get(node.value.lower()) if is_boolean else node.value or None
    names = [_plain(child) for child in node.value] if node.tag == f"{TAG}seq" else [None]
    return None if None in names else tuple(map(str, names))


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
                return f" In a file it is {spec.key}."
            return f" It is set by the variable {spec.variable}, not in a file."
    if key in known_contracts().contracts:
        return " It is an op: write it under op_backends."
    known = file_keys(declared)
    return closest(key, known) or f" Known are {', '.join(known)}."


def _reason(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
