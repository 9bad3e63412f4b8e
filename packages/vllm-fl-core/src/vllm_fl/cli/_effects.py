"""Checks of the settings: which of them have no effect, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import cast

from ..contracts import contracts
from ..plugins.loading import unmatched
from ..plugins.plugin import Plugin
from ..settings.policy import OpOrder
from ..settings.schema import CONFIG, ITEMS, Setting, Settings, overridden
from ..settings.values import OP_CONFIG, ORDER_PREFIX, PER_OP, PLATFORMS
from ._finding import Finding

__all__ = ["find_disagreements", "find_idle", "find_unknown", "warned"]

CHECK = "settings"
APPEND = "VLLM_FL_FLAGOS_BLACKLIST_APPEND"
FLAGGEMS_LISTS = ("flagos_whitelist", "flagos_blacklist")
OOT_LISTS = ("oot_whitelist", "oot_blacklist")


def find_idle(
    settings: Settings, env: Mapping[str, str], plugins: Sequence[Plugin], flag_gems: str | None
) -> Iterator[Finding]:
    """The settings that somebody set and that change nothing.

    Args:
        settings: the effective ones.
        env: the environment that they were read from.
        plugins: what was found.
        flag_gems: the installed version of flag-gems, or None.
    """
    chosen = {key: setting for key, setting in settings.items() if _by_user(setting, settings)}

    def idle(keys: Collection[str], why: str, todo: str) -> Iterator[Finding]:
        for key in keys:
            if key in chosen:
                yield Finding(CHECK, f"{_named(chosen[key])} has no effect.", why, todo)

    if not settings.enabled:
        rest = [key for key in chosen if key != "enabled"]
        if rest:
            names = ", ".join(_named(chosen[key]) for key in rest)
            yield Finding(
                CHECK,
                f"Inside vLLM these have no effect: {names}.",
                f"{_named(settings['enabled'])} makes vllm-fl step aside entirely.",
                f"unset {ITEMS['enabled'].variable}, or the others",
            )
    yield from idle(
        ["flagcx_path"],
        "No part of this release uses FlagCX; collectives are vLLM's own.",
        "unset FLAGCX_PATH",
    )
    gems = ["use_flaggems"] if settings.use_flaggems else []
    if not settings.use_flaggems:
        yield from idle(
            [*FLAGGEMS_LISTS, "oplist_path"],
            f"{_named(settings['use_flaggems'])} leaves FlagGems out.",
            "unset one of the two",
        )
    elif flag_gems is None:
        yield from idle(
            [*gems, *FLAGGEMS_LISTS, "oplist_path"],
            "flag-gems is not installed.",
            "Install FlagGems with its backend vllm-fl-flaggems, or unset it.",
        )
    if not settings.oot_enabled:
        yield from idle(
            OOT_LISTS,
            f"{_named(settings['oot_enabled'])} replaces no layer of vLLM's.",
            "unset one of the two",
        )
    if settings.debug:
        yield from idle(
            ["log_level"],
            f"{_named(settings['debug'])} logs everything.",
            "unset one of the two",
        )
    if "prefer" in chosen and all(_pinned(settings, op) for op in contracts()):
        yield from idle(
            ["prefer"],
            "Every op has a list of its own that you wrote, and such a list is never re-sorted.",
            f"unset it, or leave ops out of {PER_OP}, {OP_CONFIG} and op_backends",
        )
    both = set(settings.policy.allow_vendors or ()) & settings.policy.deny_vendors
    if both:
        yield Finding(
            CHECK,
            f"{_named(settings['allow_vendors'])} has no effect for {', '.join(sorted(both))}.",
            f"{_named(settings['deny_vendors'])} denies it too, and deny beats allow.",
            "Take the vendor out of one of the two.",
        )
    loaded = [plugin for plugin in plugins if plugin.status != "disabled"]
    if settings.strict_plugins and not loaded:
        yield from idle(["strict_plugins"], "No plugin is loaded.", "unset it, or install one")
    yield from _absent_plugins(settings, plugins)
    if env.get(APPEND, "").strip() and settings["config"].value is None:
        names = f"{APPEND}={env[APPEND]}"
        if not settings.use_flaggems or flag_gems is None:
            why = "flag-gems is not installed" if settings.use_flaggems else "USE_FLAGGEMS is off"
            yield Finding(CHECK, f"{names} has no effect.", f"{why}.", f"unset {APPEND}")


def _absent_plugins(settings: Settings, plugins: Sequence[Plugin]) -> Iterator[Finding]:
    for line in unmatched([plugin.owner for plugin in plugins], settings.plugins):
        yield Finding(
            CHECK,
            line,
            "The names are those of distributions; what nobody has is not loaded.",
            "Correct the name, or install it.",
        )


def warned(settings: Settings, env: Mapping[str, str]) -> Iterator[Finding]:
    """What reading the settings warned of."""
    has_others = any(env.get(name, "").strip() for name in overridden(ITEMS))
    for warning in settings.warnings:
        if warning.startswith(f"{CONFIG}=") and not has_others:
            continue  # it replaces what a plugin ships, which is what it is for
        yield Finding(
            CHECK,
            warning,
            "What is written there does not happen.",
            "Correct it, or unset it.",
        )


def find_disagreements(settings: Settings) -> Iterator[Finding]:
    """Where the platform files of several distributions contradict each other."""
    for setting in settings.values():
        if setting.disagreements:
            files = "; ".join(f"{_shown(value)} ({origin})" for value, origin in setting.merged)
            op = setting.key.removeprefix(ORDER_PREFIX)
            listed = isinstance(setting.value, OpOrder)
            yield Finding(
                CHECK,
                f"The installed backends disagree about {setting.key}.",
                f"{'. '.join(setting.disagreements)}. They set: {files}. In force: "
                f"{_shown(setting.value)}.",
                f"Decide it: {setting.variable}={f'{op}=…' if listed else '…'}",
            )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_unknown(settings: Settings) -> Iterator[Finding]:
    """Ops and allowed vendors in the user's own settings that nobody installed brings.

    Those in a plugin's file are no finding: it speaks of vendors that this machine need not have.
    """
    told = " ".join(settings.warnings)
    for label in settings.unchecked:
        key = next((k for k in settings if f"{label}.".startswith(f"{k}.")), "")
        setting = settings.get(key)
        if setting is None or not _by_user(setting, settings):
            continue
        is_op, name = label == key, label.removeprefix(f"{key}.")
        if is_op:
            name = label.removeprefix(ORDER_PREFIX)
        elif key != "allow_vendors":
            # A token that matches nothing is warned of. Layers and FlagGems's ops have owners of
            # their own; denying harms nobody.
            continue
        elif name in PLATFORMS:
            continue  # one file may serve several machines
        if f"{name!r}" not in told:
            yield Finding(
                CHECK,
                f"{setting.origin}: {key} names the {'op' if is_op else 'vendor'} {name!r}, which "
                "no loaded plugin brings.",
                "It has no effect until a plugin brings it.",
                "Correct the name, or install its plugin; `vllm-fl ops` lists what there is.",
            )


def _by_user(setting: Setting, settings: Settings) -> bool:
    """Whether the user set it, by a variable or in a file of theirs."""
    if setting.key in (*FLAGGEMS_LISTS, *OOT_LISTS) and not setting.value:
        return False  # a list closes the other one of its pair, and then has its origin
    config = settings["config"].value
    return bool(
        re.match("environment ", setting.origin)
        or f"(environment {OP_CONFIG})" in setting.origin
        or f" and environment {APPEND}" in setting.origin
        or (config is not None and setting.origin.startswith(f"{config}:"))
    )


def _named(setting: Setting) -> str:
    """The setting as the user wrote it: `VLLM_FL_STRICT=1`, or `strict` with its file."""
    value = setting.value
    text = ",".join(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else str(value)
    if isinstance(value, OpOrder):
        return f"{setting.key} ({setting.origin})"
    if setting.origin == f"environment {setting.variable}":
        return f"{setting.variable}={text.lower() if isinstance(value, bool) else text}"
    return f"{setting.key}={text} ({setting.origin})"


def _pinned(settings: Settings, op: str) -> bool:
    listed = settings.get(f"{ORDER_PREFIX}{op}")
    return listed is not None and isinstance(listed.value, OpOrder) and listed.value.pinned
