"""What an engine could be started without: asked in a process of its own, since plugins load in it.

    python -m vllm_fl_tools.cli._listing FILE [PLUGIN…]

Plugins that are named ended a process before, and are not loaded. It writes the answer to the file
as JSON, as `listing` gives it, or `{"problem": …, "code": …}` where a setting is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.errors import VllmFLError
from vllm_fl.plugins.calling import ENDED
from vllm_fl.plugins.communicator import NAMED_CLASSES
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.plugins.types import SettingSpec
from vllm_fl.settings.policy import MODES, OpOrder
from vllm_fl.settings.schema import Setting, Settings, overridden
from vllm_fl.text import quote

from ..operate.identity import identity
from ._environment import distributions
from ._options import device_of
from .policy import text_of as settings_text

__all__ = ["listing"]

ORDERING = frozenset({"config", "platform", "prefer", "table"})
"""Settings that no start leaves out: an op that they order badly is named itself."""


def listing() -> dict[str, Any]:
    """What an engine of this environment is made of.

    Returns:
        `plugins`: name -> whether it is a module that the user named, its release, and the keys of
        its settings. `ops`: those that do not run as stock, each with the implementations that come
        before it and the plugin of the first. `lists`: of settings that list what is left out, the
        names that could stand there and do not, with the whitelist that is closed instead. And
        `settings` that the user set, `file` what a settings file for all of it has, `covered` the
        variables that such a file overrides, `environment` what it runs on, `remarks` for people.

    Raises:
        VllmFLError: the settings are wrong, or cannot be said by a file.
    """
    import yaml

    manager = get_default_manager()
    manager.ensure_initialized()
    startup = manager.startup
    assert startup is not None
    settings = startup.settings
    plugins = [p for p in startup.plugins if p.status != "disabled" and p.kind == "backend"]
    remarks: list[str] = []
    snapshot = manager.registry.snapshot()
    owners = (*snapshot.owners.values(), *snapshot.authors.values())
    versions = distributions([kernel for p in plugins for kernel in p.owner.kernels])
    return {
        "enabled": settings.enabled,
        "plugins": _plugins(plugins),
        "ops": [told for op in snapshot.impls_by_op if (told := _op(manager, op))],
        "lists": [
            told
            for plugin in plugins
            for spec in plugin.settings
            if (told := _list(plugin, spec, settings, snapshot.ops, remarks))
        ],
        "settings": _chosen(settings),
        "file": yaml.safe_load(settings_text(settings)) or {},
        "covered": [*overridden(settings.declared)],
        "environment": identity(device_of(None), owners) | versions,
        "remarks": remarks,
    }


def _plugins(plugins: Iterable[Plugin]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for plugin in plugins:
        of = found.setdefault(plugin.owner.label, {"release": plugin.owner.name, "keys": []})
        of["module"] = plugin.owner.distribution is None
        of["keys"] += [spec.key for spec in plugin.settings]
    return found


def _op(manager: OpManager, op: str) -> dict[str, Any] | None:
    """What runs an op in an engine; None where that is stock, in both modes and at all sizes."""
    owners = manager.registry.snapshot().owners
    found: dict[str, None] = {}
    is_left = True
    for mode in MODES:
        try:
            traces = [trace for _, trace in manager.rows(op, mode=mode, engine=True)]
        except VllmFLError:  # which ends the start, too
            is_left = False
            continue
        for trace in traces:
            found |= dict.fromkeys(impl.impl_id for impl in trace.before_stock)
            is_left &= trace.selected is not None
    if is_left and not found:
        return None
    owner = next((owners[op, impl].label for impl in found), None)
    without = ["stock"] if op in NAMED_CLASSES else ["foreign", "stock"]
    return {"op": op, "impls": [*found], "plugin": owner, "without": without}


def _list(
    plugin: Plugin,
    spec: SettingSpec[Any],
    settings: Settings,
    ops: Iterable[str],
    remarks: list[str],
) -> dict[str, Any] | None:
    if spec.known is None or not spec.in_file:
        return None
    try:
        known = {*spec.known()} - {*ops, *NAMED_CLASSES}
    except Exception as error:  # whatever the import of its library raises
        remarks.append(f"{plugin.owner.name} cannot say what {spec.key} takes: {quote(error)}")
        return None
    closed = next((each.key for each in plugin.settings if each.excludes == spec.key), None)
    white = None if closed is None else settings[closed].value
    names = known - {*settings[spec.key].names} if white is None else known & {*_words(white)}
    return {
        "plugin": plugin.owner.label,
        "key": spec.key,
        "what": spec.names,
        "whitelist": closed,
        "variable": None if closed is None else settings.declared[closed].variable,
        "whitelisted": None if white is None else list(_words(white)),
        "names": sorted(names),
    }


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


def _chosen(settings: Settings) -> list[dict[str, Any]]:
    """The user's settings whose default asks for no more than they do."""
    return [
        {"key": key, "named": setting.named, "variable": spec.variable, "value": _text(setting)}
        for key, setting in settings.chosen.items()
        if (spec := settings.declared.get(key)) is not None
        and key not in ORDERING
        and not (spec.names or spec.default is True or isinstance(setting.value, OpOrder))
    ]


def _text(setting: Setting) -> str:
    """A value as a variable has it."""
    value = setting.value
    return str(value).lower() if isinstance(value, bool) else str(value)


def _main(path: str, *ended: str) -> None:
    ENDED.update(dict.fromkeys(ended, "it ended a process before"))
    try:
        told = listing()
    except VllmFLError as error:
        told = {"problem": error.message, "code": error.code}
    Path(path).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
