"""Read the settings from four layers. The highest layer that sets an item is used.

The layers are, highest first: the file of VLLM_FL_CONFIG, the environment, the platform files of
plugins, and the defaults. A file without `extends: platform` overrides every item that a file can
set.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, methodcaller
from types import MappingProxyType
from typing import Any, cast

from ..errors import IdleSwitchError
from ..plugins.registry import known_contracts
from ..plugins.setting import SettingSpec
from ..text import closest, nearest
from .devices import DeviceOrder, Table
from .files import Entries, read_orders, read_settings_file, read_table
from .lock import read_lock
from .names import uses
from .platform_files import Brought, close_pairs, unite
from .policy import GROUP_PREFIX, OpOrder, SelectionPolicy
from .schema import (
    COMMAND_LINE,
    CONFIG,
    ITEMS,
    Declared,
    Setting,
    Settings,
    is_absent,
    overridden,
    variables,
    variables_of,
)
from .values import (
    EXTENDS,
    GROUP_ORDER_PREFIX,
    IN_TREE,
    OP_CONFIG,
    ORDER_PREFIX,
    PER_OP,
    PLATFORMS,
    is_ordered,
    normalise_platform,
    read_value,
    value_of,
    wrong,
)

STARTUP: Declared = {
    key: ITEMS[key]
    for key in ("enabled", "platform", "plugins", "plugin_modules", "log_level", "debug")
}
PREFIX = "VLLM_FL_"

PlatformFiles = Sequence[tuple[str, str | os.PathLike[str]]]

OpGroups = Mapping[str, Collection[str]]

NOTHING: Mapping[str, Any] = MappingProxyType({})

SWITCHES: Declared = {"strict": Settings.strict, "deny_vendors": Settings.deny_vendors}
"""The safety switches. If a file overrides their variables, an error is raised."""


def load_startup(env: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings that a process needs before its plugins are known, from the environment."""
    return Settings(tuple(_stacked([_environment(env, STARTUP)], STARTUP).values()))


def load_settings(
    env: Mapping[str, str] = os.environ,
    *,
    platform: str | None = None,
    platform_files: PlatformFiles = (),
    brought: Brought = NOTHING,
    groups: OpGroups = NOTHING,
    plugins: Iterable[SettingSpec[Any]] = (),
    platforms: Sequence[str] = (),
    foreign: bool = False,
    orders: Mapping[str, object] = NOTHING,
) -> Settings:
    """Read the effective settings. `check_names` checks the names in them later.

    Args:
        platform: the detected platform; VLLM_FL_PLATFORM overrides it.
        platform_files: (distribution, YAML file) of each plugin's file for the platform.
        brought: the installed implementations. The file of a distribution sorts only its own
            implementations.
        platforms: further known platforms, in addition to `PLATFORMS`.
        foreign: whether another plugin provides the platform. Without a platform file, `prefer` is
            then `stock` by default.
        orders: op or group -> its order on vLLM's command line, with the highest priority.

    Raises:
        SettingsError: a variable, a file or an order has an error.
        IdleSwitchError: a file overrides VLLM_FL_STRICT or VLLM_FL_DENY_VENDORS.
    """
    declared = {**ITEMS, **{spec.key: spec for spec in plugins}}
    fixed = _environment(env, _of(declared, in_file=False))
    close_pairs(fixed, declared)
    if platform is not None:
        detected = Setting("platform", normalise_platform(platform), "detected")
        fixed = _stacked([fixed, {"platform": detected}], {})
    config = fixed.get("config")
    for key in declared.keys() & orders.keys():
        problem = f"only orders of ops can be set here; set {declared[key].variable}"
        raise wrong(key, COMMAND_LINE, problem)
    given = _spread(_layer_of(orders.items(), COMMAND_LINE), groups)
    own: Entries = {}
    if config is not None:
        own = read_settings_file(config.value, declared, key="config", asked_by=config.origin)
        close_pairs(own, declared)
        own = _spread(own, groups)
    is_whole = config is not None and own.pop(EXTENDS, None) is None
    if foreign and (is_whole or not platform_files):
        origin = "another plugin's platform, without a policy file"
        fixed["prefer"] = Setting("prefer", "stock", origin)
    shown = tuple(f"{path} ({distribution})" for distribution, path in platform_files)
    files = Setting("platform_files", shown, "plugins")
    warnings: list[str] = []
    if config is not None and is_whole:
        users = [given, own]
        ignored = [name for name in overridden(declared) if env.get(name, "").strip()]
        entries = _stacked([*users, fixed], declared, ignored=_unread(env, declared, ignored))
        if ignored or shown:
            names = ", ".join((*ignored, *shown))
            warnings.append(f"{CONFIG}={config.value} is a complete override; ignored: {names}.")
        files = Setting(files.key, (), config.origin, ((shown, files.origin),))
    else:
        users = [given, own, *_variables(env, groups, declared)]
        has_stock = foreign or ("platform" in fixed and fixed["platform"].value in IN_TREE)
        shipped = _united(platform_files, brought, groups, declared, has_stock=has_stock)
        entries = _stacked([*users, fixed, shipped], declared)
    if any("prefer" in layer for layer in users):
        prefer = entries["prefer"]
        preferring = methodcaller("preferring", str(prefer.value))
        _reorder(entries, preferring, f"re-sorted by {prefer.origin}")
    entries["platform_files"] = files
    if config is not None:
        _refuse_idle(env, entries)
    absent = [
        name
        for name in sorted(env)
        if name.startswith((PREFIX, "USE_")) and is_absent(name, declared)
    ]
    for name in absent:
        if text := _text(env, name, name):
            entries[name] = Setting(name, text, f"environment {name}")
    warnings += _unknown_variables(env, (*variables(declared), *absent))
    forced, known = entries["platform"], {*PLATFORMS, *platforms}
    is_forced = forced.origin.startswith("environment ")
    if is_forced and not platform_files and forced.value not in known:
        problem = "no installed plugin has settings for this platform."
        warnings.append(f"{forced.named}: {problem}{closest(str(forced.value), known)}")
    tuned = _add_table(entries)
    ordered = {key: entries[key] for key in declared} | entries
    lock = entries["lock"]
    settings = Settings(
        tuple(ordered.values()),
        tuple(warnings),
        declared=declared,
        tuned=tuned,
        locked=read_lock(str(lock.value), origin=lock.origin) if lock.value else None,
    )
    labels = dict.fromkeys(use.label for use in uses(settings))
    return dataclasses.replace(settings, unchecked=tuple(labels))


def _add_table(entries: Entries) -> Table | None:
    """Read the tuning table. Insert its orders after the user's orders and before the orders of
    backends."""
    named = entries["table"]
    if named.value is None:
        return None
    table, layer = read_table(str(named.value), named.origin)
    for key, setting in layer.items():
        below = entries[key].value if key in entries else ()
        orders = cast("tuple[DeviceOrder, ...]", (*setting.value, *below))  # type: ignore[misc]
        orders = tuple(sorted(orders, key=lambda each: not each.order.pinned))
        entries[key] = dataclasses.replace(setting, value=orders, origin=orders[0].origin)
    return table


def policy_from_config(path: str | os.PathLike[str]) -> SelectionPolicy:
    """Return the policy of a YAML file. `extends` is ignored. Raises SettingsError."""
    own = read_settings_file(path, ITEMS, key="config")
    own.pop(EXTENDS, None)
    if any(key.startswith(GROUP_ORDER_PREFIX) for key in own):
        own = _spread(own, known_contracts().groups)
    close_pairs(own, ITEMS)
    return Settings(tuple(_stacked([own], ITEMS).values())).policy


def _of(declared: Declared, *, in_file: bool) -> Declared:
    return {key: spec for key, spec in declared.items() if spec.in_file is in_file}


def _variables(env: Mapping[str, str], groups: OpGroups, declared: Declared) -> list[Entries]:
    """Return the layers of the environment for settings that a file may also set, highest first."""
    own = _environment(env, _of(declared, in_file=True))
    close_pairs(own, declared)
    orders = [read_orders(path)] if (path := _text(env, OP_CONFIG, "op_config")) else []
    return [own, *(_spread(layer, groups) for layer in (*orders, _per_op(env)))]


def _unread(env: Mapping[str, str], declared: Declared, ignored: Collection[str]) -> Entries:
    """Return the variables that have no effect because a file overrides them. Their text is not
    parsed."""
    return {
        key: Setting(key, ascii(env[spec.variable])[1:-1], f"environment {spec.variable}")
        for key, spec in declared.items()
        if spec.variable in ignored
    }


def _refuse_idle(env: Mapping[str, str], entries: Entries) -> None:
    """Raise IdleSwitchError if a file overrides a safety switch of the environment."""
    for key, asked in _environment(env, SWITCHES).items():
        held, allowed = entries[key], entries["allow_vendors"]
        if isinstance(asked.value, tuple):
            let_in = (v for v in asked.value if allowed.value is None or v in allowed.names)
            lost = [vendor for vendor in let_in if vendor not in held.names]
        else:
            lost = [] if held.value or not asked.value else ["true"]
        if lost:
            file = entries["config"].value
            where = held.origin if held.origin.startswith(f"{file}:") else file
            wanted = ", ".join((*(held.value or ()), *lost))  # type: ignore[misc]
            problem = (
                f"{where} overrides it, because a file and its defaults have priority over "
                f"variables. Write `{key}: {wanted}` into that file, or unset "
                f"{SWITCHES[key].variable}"
            )
            raise wrong(key, asked.origin, problem, kind=IdleSwitchError)


def _spread(layer: Entries, groups: OpGroups) -> Entries:
    """Replace the orders of groups by orders of their ops. An op's own order has priority. The
    order of a group without ops is kept."""
    orders = {key: s.value for key, s in layer.items() if isinstance(s.value, OpOrder)}
    spread = dict(layer)
    for key, whole in orders.items():
        group = key.removeprefix(GROUP_ORDER_PREFIX)
        for op in groups.get(group, ()) if group != key else ():
            spread.pop(key, None)
            order = dataclasses.replace(whole, group=group)
            of_op, origin = f"{ORDER_PREFIX}{op}", f"{layer[key].origin} ({GROUP_PREFIX}{group})"
            found = dataclasses.replace(layer[key], key=of_op, value=order, origin=origin)
            own = orders.get(of_op)
            if own is not None:  # the group's order applies to open modes
                value = dataclasses.replace(
                    own, eager=own.eager or order.eager, compiled=own.compiled or order.compiled
                )
                beneath = ((order, origin),)
                found = dataclasses.replace(layer[of_op], value=value, overrides=beneath)
            spread[of_op] = found
    return spread


def _environment(env: Mapping[str, str], declared: Declared) -> Entries:
    layer: Entries = {}
    for key, spec in declared.items():
        for variable in variables_of(spec):
            text = _text(env, variable, key)
            if text is None:
                continue
            origin = f"environment {variable}"
            value = read_value(partial(value_of, spec), text, key, origin)
            if key not in layer or value is False:  # if both variables are set, false has priority
                layer[key] = Setting(key, value, origin)
    return layer


def _text(env: Mapping[str, str], variable: str, key: str) -> str | None:
    """Return a variable's text, or None if it is empty. Only VLLM_FL_PLUGINS may be empty."""
    text = env.get(variable)
    if text is None:
        return None
    text = text.strip()
    if not text.isprintable():  # also rejects invalid UTF-8
        problem = f"{text!r} contains unprintable characters"
        raise wrong(key, f"environment {variable}", problem)
    return text if text or variable == Settings.plugins.variable else None


def _per_op(env: Mapping[str, str]) -> Entries:
    origin, pairs = f"environment {PER_OP}", []
    for part in filter(str.strip, (_text(env, PER_OP, "per_op") or "").split(";")):
        op, equals, selectors = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise wrong("per_op", origin, f"expected op1=a|b;op2=x, got {part.strip()!r}")
        pairs.append((op, selectors))
    return _layer_of(pairs, origin)


def _layer_of(pairs: Iterable[tuple[str, object]], origin: str) -> Entries:
    layer: Entries = {}
    for op, selectors in pairs:
        key = f"{ORDER_PREFIX}{op}"
        if not is_ordered(op):
            raise wrong("per_op", origin, f"expected op1=a|b;op2=x, got {op!r}")
        if key in layer:
            raise wrong(key, origin, "is set twice")
        layer[key] = Setting(key, read_value(OpOrder.of, selectors, key, origin), origin)
    return layer


def _stacked(
    layers: Sequence[Entries], declared: Declared, *, ignored: Mapping[str, Setting] = NOTHING
) -> Entries:
    """Return each key's highest setting or its default, with the settings that it overrides."""
    defaults = {key: Setting(key, spec.default) for key, spec in declared.items()}
    layers = [*layers, defaults]
    stacked: Entries = {}
    for key in dict.fromkeys(key for layer in layers for key in layer):
        top, *below = (layer[key] for layer in layers if key in layer)
        overrides, spec = [*top.overrides], declared.get(key)
        for other in (*([ignored[key]] if key in ignored else ()), *below):
            if other.value not in (None, ()) or (spec and other.value != spec.default):
                overrides += [(other.value, other.origin), *other.overrides]
        stacked[key] = dataclasses.replace(top, overrides=tuple(overrides))
    return stacked


def _united(
    platform_files: PlatformFiles,
    brought: Brought,
    groups: OpGroups,
    declared: Declared,
    *,
    has_stock: bool,
) -> Entries:
    """Merge the platform files into one layer. If vLLM has kernels for the device (`has_stock`),
    `stock` precedes a fallback to `reference`."""
    files = [
        (name, read_settings_file(path, declared, key="platform_files", distribution=name))
        for name, path in platform_files
    ]
    united = unite([(name, _spread(layer, groups)) for name, layer in files], brought, declared)
    if has_stock:
        _reorder(united, attrgetter("above_plain"), "stock put before reference")
    return united


def _reorder(entries: Entries, change: Callable[[OpOrder], OpOrder], how: str) -> None:
    for key, setting in entries.items():
        if isinstance(setting.value, OpOrder):
            order = change(setting.value)
            if order != setting.value:
                entries[key] = setting.replaced(order, f"{setting.origin}, {how}")


def _unknown_variables(env: Mapping[str, str], known: Sequence[str]) -> list[str]:
    """Return a warning for each variable that resembles a setting."""
    letters = {v.removeprefix(PREFIX).replace("_", ""): v for v in known}
    ours = [short for short, v in letters.items() if v.startswith(PREFIX)]
    others = letters.keys() - {*ours}
    warnings = []
    for name in sorted(env):
        if name in known or not env[name]:
            continue
        rest = re.sub(r"(?i)^vllm[_-]?fl[_-]", "", name)
        is_ours = rest != name
        short = rest.upper().replace("_", "").replace("-", "")
        slip = nearest(short, ours, 0.8) if is_ours else nearest(short, others, 0.92)
        meant = f" Did you mean {letters[slip]!r}?" if slip else ""
        if is_ours:
            problem = "is not a setting of vllm-fl-core or of a loaded plugin: it has no effect."
            warnings.append(f"{name} {problem}{meant}")
        elif slip:
            warnings.append(f"{name} has no effect.{meant}")
    return warnings
