"""Lists the parts of an engine of this environment, by loading its plugins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.errors import VllmFLError
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.plugins.types import NAMED_CLASSES
from vllm_fl.settings.policy import MODES, OpOrder
from vllm_fl.settings.schema import Settings
from vllm_fl.text import quote

from ._other_plugins import neighbours

ORDERING = frozenset({"config", "platform", "prefer", "table"})
"""Settings that are not parts; the ops that they affect are parts instead."""


def listing() -> dict[str, Any]:
    """Return the parts of an engine of this environment.

    Returns:
        `enabled`; `remarks` for the user; `plugins` {plugin: its `release`, whether it is a
        `module`}; `lists` {key of a setting that excludes names: its `variable`, its `names`, and
        whether the list `allows` names instead}; `parts`, each the fields of a `Part`.

    Raises:
        VllmFLError: a setting is invalid.
    """
    manager = get_default_manager()
    manager.ensure_initialized()
    startup = manager.startup
    assert startup is not None
    settings = startup.settings
    loaded = [p for p in startup.plugins if p.status != "disabled" and p.kind == "backend"]
    plugins: dict[str, dict[str, Any]] = {}
    owners: dict[str, str] = {}
    for plugin in loaded:
        is_module = plugin.owner.distribution is None
        plugins[plugin.owner.label] = {"release": plugin.owner.name, "module": is_module}
        owners |= {spec.key: plugin.owner.label for spec in plugin.settings}
    ops = manager.registry.snapshot().impls_by_op
    parts = [*_settings(settings, owners), *filter(None, (_op(manager, op) for op in ops))]
    for name, release in neighbours().items():
        parts.append(_part("neighbour", name, f"vLLM's plugin {name!r} of {release}", None))
    found: dict[str, Any] = {"enabled": settings.enabled, "remarks": []}
    found |= {"plugins": plugins, "lists": {}, "parts": parts}
    for plugin in loaded:
        _add_lists(found, plugin, settings, {*manager.registry.snapshot().ops})
    return found


def _settings(settings: Settings, owners: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the parts that are settings of the user."""
    for key, setting in settings.chosen.items():
        spec = settings.declared.get(key)
        if spec is None or key in ORDERING or isinstance(setting.value, OpOrder):
            continue
        if not spec.names and spec.default is not True:
            what = f"setting {setting.named}"
            yield _part("setting", key, what, owners.get(key), variable=spec.variable)


def _op(manager: OpManager, op: str) -> dict[str, Any] | None:
    """Return the part of an op; None if it runs vLLM's code in both modes and at all sizes."""
    owners = manager.registry.snapshot().owners
    found: dict[str, None] = {}
    is_stock = True
    for mode in MODES:
        try:
            traces = [trace for _, trace in manager.rows(op, mode=mode, engine=True)]
        except VllmFLError:  # this also fails the startup
            is_stock = False
            continue
        for trace in traces:
            found |= dict.fromkeys(impl.impl_id for impl in trace.before_stock)
            is_stock &= trace.selected is not None
    if is_stock and not found:
        return None
    of = next((owners[op, impl].label for impl in found), None)
    what = f"{' or '.join(found)} of op {op} ({of})" if found else f"the order of op {op}"
    order = ["stock"] if op in NAMED_CLASSES else ["foreign", "stock"]
    return _part("op", op, what, of, order=order)


def _add_lists(found: dict[str, Any], plugin: Plugin, settings: Settings, ops: set[str]) -> None:
    """Add the names that a plugin's lists can exclude but do not."""
    label = plugin.owner.label
    for spec in plugin.settings:
        if spec.known is None or not spec.in_file:
            continue
        try:
            known = {*map(str, spec.known())} - {*ops, *NAMED_CLASSES}
        except Exception as error:  # from the import of its library
            found["remarks"].append(
                f"{plugin.owner.name} cannot list the names of {spec.key}: {quote(error)}"
            )
            continue
        allowing = next((s for s in plugin.settings if s.excludes == spec.key), None)
        allows = allowing is not None and isinstance(settings[allowing.key].value, tuple)
        of = allowing if allowing is not None and allows else spec
        names = settings[of.key].names
        listed = {"variable": of.variable, "names": [*names], "allows": allows}
        found["lists"][of.key] = listed
        for name in sorted(known & {*names} if allows else known - {*names}):
            what = f"{spec.names} {name} ({label})"
            found["parts"].append(_part("name", name, what, label, setting=of.key))


def _part(kind: str, name: str, what: str, of: str | None, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "what": what, "of": of, **more}
