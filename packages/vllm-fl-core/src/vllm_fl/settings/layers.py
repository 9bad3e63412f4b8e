"""Reading the settings: four layers, of which the highest that sets an item wins.

VLLM_FL_CONFIG's file, which overrides every item a file can set; the environment; the files that
plugins ship for the platform; the defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

from ..errors import SettingsError
from .files import Layer, read_orders, read_settings_file
from .names import check_names, labels
from .policy import OpOrder, SelectionPolicy, closest
from .schema import (
    APPEND,
    CONFIG,
    ITEMS,
    OP_CONFIG,
    ORDER_PREFIX,
    OVERRIDDEN,
    PER_OP,
    PLATFORMS,
    VARIABLES,
    near,
    normalise_platform,
    order_of,
    wrong,
)
from .uniting import PAIRS, Brought, close_pairs, unite
from .values import Setting, Settings

__all__ = [
    "Setting",
    "Settings",
    "check_names",
    "load_settings",
    "load_startup",
    "normalise_platform",
    "policy_from_config",
]

STARTUP = (
    "enabled",
    "platform",
    "plugins",
    "plugin_modules",
    "strict_plugins",
    "log_level",
    "debug",
)
PREFIX = "VLLM_FL_"

PlatformFiles = Sequence[tuple[str, str | os.PathLike[str]]]

NOTHING: Brought = MappingProxyType({})


def load_startup(env: Mapping[str, str] | None = None) -> Settings:
    """What a process needs before its plugins are known, from the environment alone.

    Returns:
        `enabled`, `platform`, `plugins`, `plugin_modules`, `strict_plugins`, `log_level`, `debug`.

    Raises:
        SettingsError: one of them is wrong.
    """
    env = os.environ if env is None else env
    layer = _environment(env, STARTUP)
    return Settings(tuple(_stacked([layer, _defaults(STARTUP)]).values()))


def load_settings(
    env: Mapping[str, str] | None = None,
    *,
    platform: str | None = None,
    platform_files: PlatformFiles = (),
    brought: Brought = NOTHING,
) -> Settings:
    """The effective settings. Names are not checked yet; see `check_names`.

    Args:
        env: the environment; None is the process's own.
        platform: the platform that was detected; VLLM_FL_PLATFORM beats it.
        platform_files: (distribution, YAML file) of what plugins bring for the platform. They
            unite, whatever their order; see `uniting`.
        brought: what is installed: where platform files unite, who brings a thing counts.

    Raises:
        SettingsError: something is wrong with a variable or a file.
    """
    env = os.environ if env is None else env
    fixed = _environment(env, [key for key, item in ITEMS.items() if not item.in_file])
    if platform is not None:
        detected = Setting("platform", normalise_platform(platform), "detected")
        fixed = _stacked([fixed, {"platform": detected}])
    if "config" in fixed:
        entries, warnings = _overridden(env, fixed, platform_files, brought)
    else:
        entries, warnings = _layered(env, fixed, platform_files, brought), []
    warnings += [*_unknown_variables(env), *_unknown_platform(entries["platform"], platform_files)]
    order = list(ITEMS)
    entries = dict(
        sorted(entries.items(), key=lambda e: order.index(e[0]) if e[0] in ITEMS else 99)
    )
    settings = Settings(tuple(entries.values()), tuple(warnings))
    return dataclasses.replace(settings, unchecked=tuple(labels(settings)))


def policy_from_config(path: str | os.PathLike[str]) -> SelectionPolicy:
    """The policy of a user's YAML file alone, as VLLM_FL_CONFIG would give it.

    Raises:
        SettingsError: the file cannot be read, or something in it is wrong.
    """
    own = read_settings_file(path, key="config")
    close_pairs(own)
    return Settings(tuple(_stacked([own, _defaults(ITEMS)]).values())).policy


def _layered(
    env: Mapping[str, str], fixed: Layer, platform_files: PlatformFiles, brought: Brought
) -> Layer:
    variables = _environment(env, [key for key, item in ITEMS.items() if item.in_file])
    close_pairs(variables)
    orders = [read_orders(path)] if (path := _text(env, OP_CONFIG)) else []
    plugins = _united(platform_files, brought)
    entries = _stacked([variables, *orders, _per_op(env), fixed, plugins, _defaults(ITEMS)])
    _append(env, entries)
    _resort(entries)
    entries["platform_files"] = Setting("platform_files", _shown(platform_files), "plugins")
    return entries


def _overridden(
    env: Mapping[str, str], fixed: Layer, platform_files: PlatformFiles, brought: Brought
) -> tuple[Layer, list[str]]:
    config = fixed["config"]
    own = read_settings_file(config.value, key="config", asked_by=config.origin)
    close_pairs(own)
    variables = [name for name in OVERRIDDEN if env.get(name, "").strip()]
    unread = {
        key: Setting(key, ascii(env[item.variable])[1:-1], f"environment {item.variable}")
        for key, item in ITEMS.items()
        if item.variable in variables
    }
    try:
        plugins, remark = _united(platform_files, brought), ""
    except SettingsError as error:  # overridden, so that it harms nobody
        plugins, remark = {}, f" (unreadable: {error})"
    entries = _stacked([own, fixed, _defaults(ITEMS)], ignored=[unread, plugins])
    files = _shown(platform_files)
    entries["platform_files"] = Setting("platform_files", (), config.origin, ((files, "plugins"),))
    ignored = [*variables, *files]
    if not ignored:
        return entries, []
    lost = [
        f"{len(names)} of {key}" for key, names in _lost(env, plugins, entries).items() if names
    ]
    return entries, [
        f"{CONFIG}={config.value} is a complete override; ignored: {', '.join(ignored)}{remark}. "
        f"Blacklist entries lost: {', '.join(lost) or 'none'}."
    ]


def _lost(env: Mapping[str, str], plugins: Layer, entries: Layer) -> dict[str, list[str]]:
    """The blacklist entries that held without VLLM_FL_CONFIG and do not hold with it."""
    lost = {}
    for white, black in PAIRS:
        texts = [env.get(ITEMS[black].variable, ""), env.get(APPEND, "") * (black == PAIRS[0][1])]
        names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
        if not texts[0].strip() and black in plugins:
            names += _names(plugins[black])
        kept = entries[white].value
        now = set(_names(entries[black]))
        lost[black] = [
            name
            for name in dict.fromkeys(names)
            if name not in now and (kept is None or name in _names(entries[white]))
        ]
    return lost


def _environment(env: Mapping[str, str], keys: Iterable[str]) -> Layer:
    layer = {}
    for item in map(ITEMS.__getitem__, keys):
        text = _text(env, item.variable)
        if text is None:
            continue
        origin = f"environment {item.variable}"
        try:
            value = item.values.of_text(text)
        except ValueError as error:
            raise wrong(item.key, origin, str(error)) from error
        layer[item.key] = Setting(item.key, value, origin, variable=item.variable)
    return layer


def _text(env: Mapping[str, str], variable: str) -> str | None:
    """A variable's text. An empty one is unset; only VLLM_FL_PLUGINS may name none."""
    text = env.get(variable)
    if text is None:
        return None
    text = text.strip()
    if not text.isprintable():  # no control characters, and no bytes that are not UTF-8
        key = next((key for key, item in ITEMS.items() if item.variable == variable), variable)
        raise wrong(key, f"environment {variable}", f"{text!r} is no printable text")
    return text if text or variable == ITEMS["plugins"].variable else None


def _per_op(env: Mapping[str, str]) -> Layer:
    origin = f"environment {PER_OP}"
    layer: Layer = {}
    for part in (_text(env, PER_OP) or "").split(";"):
        if not part.strip():
            continue
        op, equals, tokens = (piece.strip() for piece in part.partition("="))
        if not equals or not op.isidentifier():
            raise wrong("per_op", origin, f"expected op1=a|b;op2=x, got {part.strip()!r}")
        key = f"{ORDER_PREFIX}{op}"
        if key in layer:
            raise wrong(key, origin, "stands twice")
        try:
            order = order_of([token.strip() for token in tokens.split("|")])
        except ValueError as error:
            raise wrong(key, origin, str(error)) from error
        layer[key] = Setting(key, order, origin, variable=PER_OP)
    return layer


def _defaults(keys: Iterable[str]) -> Layer:
    items = map(ITEMS.__getitem__, keys)
    return {item.key: Setting(item.key, item.default, variable=item.variable) for item in items}


def _stacked(layers: Sequence[Layer], *, ignored: Sequence[Layer] = ()) -> Layer:
    """Per item the highest layer's value, which remembers those of the others."""
    stacked: Layer = {}
    for layer in layers:
        for key, setting in layer.items():
            if key in stacked:
                continue
            below = [
                other[key]
                for other in (*ignored, *layers)
                if key in other and other[key] is not setting
            ]
            overrides = [*setting.overrides]
            for other in below:
                if other.value not in (None, ()) or other.value != ITEMS[key].default:
                    overrides += [(other.value, other.origin), *other.overrides]
            stacked[key] = dataclasses.replace(
                setting, overrides=tuple(overrides), variable=setting.variable or _variable(key)
            )
    return stacked


def _variable(key: str) -> str | None:
    return ITEMS[key].variable if key in ITEMS else None


def _united(platform_files: PlatformFiles, brought: Brought) -> Layer:
    return unite(
        [
            (name, read_settings_file(path, key="platform_files", distribution=name))
            for name, path in platform_files
        ],
        brought,
    )


def _append(env: Mapping[str, str], entries: Layer) -> None:
    text = _text(env, APPEND)
    if text is None:
        return
    origin = f"environment {APPEND}"
    white, black = (entries[key] for key in PAIRS[0])
    try:
        names = cast("tuple[str, ...]", ITEMS[black.key].values.of_text(text))
    except ValueError as error:
        raise wrong(black.key, origin, str(error)) from error
    if white.value is not None:
        raise wrong(
            black.key, origin, f"has no effect beside {white.key} ({white.origin}); unset one"
        )
    value = tuple(dict.fromkeys((*_names(black), *names)))
    if _names(black):
        origin = f"{black.origin} and {origin}"
    entries[black.key] = dataclasses.replace(black, value=value, origin=origin)


def _resort(entries: Layer) -> None:
    """Let a `prefer` of the environment re-sort the orders of the platform's files."""
    prefer = entries["prefer"]
    if prefer.origin != f"environment {prefer.variable}":
        return
    for key, setting in entries.items():
        if isinstance(setting.value, OpOrder):
            order = setting.value.preferring(str(prefer.value))
            if order != setting.value:
                entries[key] = dataclasses.replace(
                    setting,
                    value=order,
                    origin=f"{setting.origin}, re-sorted by {prefer.origin}",
                    overrides=((setting.value, setting.origin), *setting.overrides),
                )


def _unknown_variables(env: Mapping[str, str]) -> list[str]:
    """A warning for each variable that is no setting and was likely meant for one."""
    known = {name.removeprefix(PREFIX): name for name in VARIABLES}
    warnings = []
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in VARIABLES and env[name]:
            slip = near(name.removeprefix(PREFIX), known)
            meant = f" Did you mean {known[slip]!r}?" if slip else ""
            warnings.append(f"{name} is no setting of this vllm-fl-core: it has no effect.{meant}")
        elif env[name] and not name.startswith(PREFIX) and (slip := _misspelt(name)):
            warnings.append(f"{name} has no effect. Did you mean {slip!r}?")
    return warnings


def _misspelt(name: str) -> str | None:
    """The setting that a variable without our prefix is a slip of: `vllm_fl_prefer`, `USE_FLAGGEM`.

    Ours are told by their first letters; the others are names of their own, and must be close.
    """
    if name in VARIABLES:
        return None
    letters = name.upper().replace("_", "").replace("-", "")
    if re.match(r"(?i)vllm[_-]?fl[_-]", name):
        spelt = {v.replace("_", ""): v for v in VARIABLES if v.startswith(PREFIX)}
        found = difflib.get_close_matches(letters, spelt, n=1, cutoff=0.0)
        return spelt[found[0]]
    spelt = {v.replace("_", ""): v for v in VARIABLES if not v.startswith(PREFIX)}
    found = difflib.get_close_matches(letters, spelt, n=1, cutoff=0.92)
    return spelt[found[0]] if found else None


def _unknown_platform(platform: Setting, platform_files: PlatformFiles) -> list[str]:
    name = platform.value
    if not isinstance(name, str) or name in PLATFORMS or platform_files:
        return []
    if platform.origin != f"environment {platform.variable}":
        return []
    return [
        f"{platform.variable}={name}: no installed plugin has settings for this platform."
        + closest(name, PLATFORMS)
    ]


def _names(setting: Setting) -> tuple[str, ...]:
    return cast("tuple[str, ...]", setting.value)


def _shown(platform_files: PlatformFiles) -> tuple[str, ...]:
    return tuple(f"{path} ({distribution})" for distribution, path in platform_files)
