"""Checks of the settings: which of them have no effect, and why."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from vllm_fl.plugins.discovery import unmatched
from vllm_fl.plugins.finding import Finding
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.settings.names import uses
from vllm_fl.settings.policy import MODES, OpOrder
from vllm_fl.settings.schema import CONFIG, Setting, Settings, overridden, undo
from vllm_fl.settings.values import OP_CONFIG, ORDER_PREFIX, PER_OP, PLATFORMS

CHECK = "settings"


def find_idle(
    settings: Settings, plugins: Sequence[Plugin], ops: Collection[str]
) -> Iterator[Finding]:
    """The settings that somebody set and that change nothing.

    Args:
        settings: the effective ones.
        plugins: what was found.
        ops: every op that has an implementation.
    """
    chosen = settings.chosen

    def idle(keys: Collection[str], why: str) -> Iterator[Finding]:
        for key in keys:
            if key in chosen:
                what = f"{chosen[key].named} has no effect."
                yield Finding(CHECK, what, why, chosen[key].undo)

    if not settings.enabled:
        rest = [key for key in chosen if key != "enabled"]
        if rest:
            names = ", ".join(chosen[key].named for key in rest)
            yield Finding(
                CHECK,
                f"Inside vLLM these have no effect: {names}.",
                f"{settings['enabled'].named} makes vllm-fl step aside entirely.",
                settings["enabled"].undo,
            )
    if settings.shadow is None:
        why = f"No step is compared: {Settings.shadow.variable} names no share of them."
        yield from idle(["shadow_file"], why)
    if not settings.oot_enabled:
        why = f"{settings['oot_enabled'].named} replaces no layer of vLLM's."
        yield from idle(["oot_whitelist", "oot_blacklist"], why)
    if settings.debug:
        yield from idle(["log_level"], f"{settings['debug'].named} logs everything.")
    if "prefer" in chosen and ops and all(_pinned(settings, op) for op in ops):
        yield from idle(
            ["prefer"],
            "Every op has a list that you wrote, and such a list is never re-sorted.",
        )
    both = set(settings.policy.allow_vendors or ()) & settings.policy.deny_vendors
    if both:
        allowed = settings["allow_vendors"]
        kept = ",".join(vendor for vendor in allowed.names if vendor not in both)
        is_variable = kept and allowed.origin.startswith("environment")
        yield Finding(
            CHECK,
            f"{settings['allow_vendors'].named} has no effect for {', '.join(sorted(both))}.",
            f"{settings['deny_vendors'].named} denies it too, and deny beats allow.",
            exported(Settings.allow_vendors.variable, kept) if is_variable else allowed.undo,
        )
    loaded = [plugin for plugin in plugins if plugin.status != "disabled"]
    if settings.strict_plugins and not loaded:
        yield from idle(["strict_plugins"], "No plugin is loaded.")
    for line in unmatched([plugin.owner for plugin in plugins], settings.plugins):
        yield Finding(
            CHECK,
            line,
            "The names are those of distributions. Without the variable all plugins are loaded.",
            undo(line),
        )
    for key in settings.unowned:
        yield from idle([key], "No loaded plugin has this setting.")


def warned(settings: Settings, env: Mapping[str, str]) -> Iterator[Finding]:
    """What reading the settings warned of."""
    has_others = any(env.get(name, "").strip() for name in overridden(settings.declared))
    for warning in settings.warnings:
        if warning.startswith(f"{CONFIG}=") and not has_others:
            continue  # it replaces what a plugin ships, which is what it is for
        yield Finding(CHECK, warning, "What is written there does not happen.", undo(warning))


def find_disagreements(settings: Settings) -> Iterator[Finding]:
    """Where the platform files of several distributions contradict each other.

    Orders of which the same files say the same make one finding, which names every op.
    """
    alike: dict[object, list[Setting]] = {}
    for setting in settings.values():
        if setting.disagreements and setting.key not in settings.unowned:
            listed = isinstance(setting.value, OpOrder)
            said = str([_shown(value) for value, _ in setting.merged])
            alike.setdefault(said if listed else setting.key, []).append(setting)
    for first, *others in alike.values():
        files = "; ".join(f"{_shown(value)} ({origin})" for value, origin in first.merged)
        ops = [each.key.removeprefix(ORDER_PREFIX) for each in (first, *others)]
        where = f", and in the same way about {', '.join(ops[1:])}" if others else ""
        yield Finding(
            CHECK,
            f"The installed backends disagree about {first.key}{where}.",
            f"{'. '.join(first.disagreements)}. They set: {files}. In force: "
            f"{_shown(first.value)}. You decide by setting it: this keeps what is in force.",
            _decided(first, ops),
        )


def _decided(setting: Setting, ops: Sequence[str]) -> str:
    """The command by which what is in force becomes the user's own."""
    order = setting.value
    if not isinstance(order, OpOrder):
        text = ",".join(order) if isinstance(order, tuple) else _shown(order)
        return exported(str(setting.variable), text)
    if order.eager == order.compiled:
        return exported(PER_OP, ";".join(f"{op}={order}" for op in ops))
    told = shlex.quote(json.dumps(dict.fromkeys(ops, order.written)))
    return f"echo {told} > ops.json; export {OP_CONFIG}=$PWD/ops.json"


def exported(variable: str, text: str) -> str:
    """The command that sets a variable, or takes it away where nothing is left of it."""
    return f"export {variable}={shlex.quote(text)}" if text else f"unset {variable}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def find_unknown(settings: Settings) -> Iterator[Finding]:
    """Ops and allowed vendors in the user's own settings that nobody installed brings.

    Those in a plugin's file are no finding: it speaks of vendors that this machine need not have.
    """
    told, chosen = " ".join(settings.warnings), settings.chosen
    for use in uses(settings):
        key, name, is_op = use.setting.key, use.name, use.space == "op"
        # A token that matches nothing is warned of. Layers and plugins' names have owners of their
        # own; denying harms nobody; and one file may serve several machines.
        if not is_op and (key != "allow_vendors" or name in PLATFORMS):
            continue
        if key in chosen and use.label in settings.unchecked and f"{name!r}" not in told:
            yield Finding(
                CHECK,
                f"{use.setting.origin}: {key} names the {use.space} {name!r}, which no loaded "
                "plugin brings.",
                "It has no effect until a plugin brings it; `vllm-fl ops` lists what there is.",
                use.setting.undo,
            )


def _pinned(settings: Settings, op: str) -> bool:
    lists = (settings.policy.listed(op, mode) for mode in MODES)
    return all(listed is not None and listed.pinned for listed in lists)
