"""The effective settings as the text of a file that VLLM_FL_CONFIG reads to the same effect."""

from __future__ import annotations

import os
from typing import Any

from ..settings.policy import OpOrder
from ..settings.schema import CONFIG, Setting, Settings
from ..settings.values import ORDER_PREFIX
from ..text import clean, is_secret
from ._show import UsageError

__all__ = ["in_environment", "text_of"]


def text_of(settings: Settings) -> str:
    """YAML of every setting that a file can hold and that is not the default.

    Raises:
        UsageError: a setting that holds here cannot be said by a file of the user's.
    """
    import yaml

    said: dict[str, Any] = {}
    orders: dict[str, Any] = {}
    for key, setting in settings.items():
        spec = settings.declared.get(key)
        if isinstance(setting.value, OpOrder):
            op = key.removeprefix(ORDER_PREFIX)
            orders[op] = _order(setting, setting.value, settings)
        elif spec is not None and spec.in_file and setting.value != spec.default:
            if is_secret(key):
                raise UsageError(f"--write: {key} looks like a secret, which no file is given")
            value = setting.value
            said[key] = list(value) if isinstance(value, tuple) else value
        elif key in settings.unowned and not setting.origin.startswith("environment "):
            raise UsageError(f"--write: no loaded plugin owns {key} ({setting.origin})")
    if settings.table is not None:
        said["table"] = os.path.abspath(settings.table)  # a file's own is relative to its folder
    if orders:
        said["op_backends"] = orders
    lines = [
        "# Written by `vllm-fl policy --write`: what held then, wherever it came from.",
        f"# {CONFIG} names this file, which then replaces variables and platform files.",
        "# Settings that are not here have their defaults.",
    ]
    if variables := in_environment(settings):
        lines += [
            "# A file cannot hold these: set them beside it.",
            *(f"#   {v}" for v in variables),
        ]
    body = yaml.safe_dump(said, sort_keys=False, allow_unicode=True) if said else ""
    return "\n".join([*lines, "", body])


def in_environment(settings: Settings) -> list[str]:
    """The variables that count beside a file, as `NAME=value`; of a secret the name alone."""
    found = []
    for setting in settings.values():
        spec = settings.declared.get(setting.key)
        variable = setting.origin.removeprefix("environment ")
        if setting.key == Settings.config.key or (spec is not None and spec.in_file):
            continue
        if variable != setting.origin and not isinstance(setting.value, OpOrder):
            found.append(variable if is_secret(variable) else clean(setting.named))
    return found


def _order(setting: Setting, order: OpOrder, settings: Settings) -> Any:
    """An order as a file has it; a file's lists are the user's, which win over much."""
    op = setting.key.removeprefix(ORDER_PREFIX)
    if not order.pinned and settings.pinned is not None and op in settings.pinned.table.ops:
        raise UsageError(
            f"--write: the table {settings.table} orders {op}, over {setting.origin}; in a file of "
            "yours that list would win over the table"
        )
    return order.written
