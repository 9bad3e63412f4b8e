"""Checks of the settings: which of them have no effect, and why."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from vllm_fl.plugins.discovery import unmatched
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.settings.schema import CONFIG, Settings, overridden, undo

from ._installed import Problem


def find_idle(settings: Settings, plugins: Sequence[Plugin]) -> Iterator[Problem]:
    """Find settings of the user without effect.

    Args:
        settings: the effective settings.
        plugins: the plugins that were found.
    """
    chosen = settings.chosen

    def idle(keys: Collection[str], why: str) -> Iterator[Problem]:
        for key in keys:
            if key in chosen:
                what = f"{chosen[key].named} has no effect."
                yield what, why, chosen[key].undo

    if not settings.enabled:
        rest = [key for key in chosen if key != "enabled"]
        if rest:
            names = ", ".join(chosen[key].named for key in rest)
            yield (
                f"Inside vLLM these have no effect: {names}.",
                f"{settings['enabled'].named} makes vllm-fl step aside entirely.",
                settings["enabled"].undo,
            )
    if not settings.oot_enabled:
        why = f"{settings['oot_enabled'].named} replaces no layer of vLLM's."
        yield from idle(["oot_whitelist", "oot_blacklist"], why)
    both = set(settings.policy.allow_vendors or ()) & settings.policy.deny_vendors
    if both:
        allowed = settings["allow_vendors"]
        kept = ",".join(vendor for vendor in allowed.names if vendor not in both)
        is_variable = kept and allowed.origin.startswith("environment")
        yield (
            f"{settings['allow_vendors'].named} has no effect for {', '.join(sorted(both))}.",
            f"{settings['deny_vendors'].named} denies it too, and deny beats allow.",
            exported(Settings.allow_vendors.variable, kept) if is_variable else allowed.undo,
        )
    for line in unmatched([plugin.owner for plugin in plugins], settings.plugins):
        yield (
            line,
            "The names are those of distributions. Without the variable all plugins are loaded.",
            undo(line),
        )
    for key in settings.unowned:
        yield from idle([key], "No loaded plugin has this setting.")


def warned(settings: Settings, env: Mapping[str, str]) -> Iterator[Problem]:
    """Return the warnings that reading the settings gave."""
    has_others = any(env.get(name, "").strip() for name in overridden(settings.declared))
    for warning in settings.warnings:
        if warning.startswith(f"{CONFIG}=") and not has_others:
            continue  # it replaces what a plugin ships, which is what it is for
        yield warning, "This setting has no effect.", undo(warning)


def find_disagreements(settings: Settings) -> Iterator[Problem]:
    """Find settings that the policy files of several backends set differently."""
    for setting in settings.values():
        if setting.disagreements and setting.key not in settings.unowned:
            files = "; ".join(f"{_shown(value)} ({origin})" for value, origin in setting.merged)
            yield (
                f"The installed backends disagree about {setting.key}.",
                f"{'. '.join(setting.disagreements)}. They set: {files}. In force: "
                f"{_shown(setting.value)}. You decide by setting it: this keeps what is in force.",
                exported(str(setting.variable), _shown(setting.value)),
            )


def exported(variable: str, text: str) -> str:
    """The command that sets a variable, or takes it away where nothing is left of it."""
    return f"export {variable}={shlex.quote(text)}" if text else f"unset {variable}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
