"""Read and check what a plugin's module declares: hooks, versions, settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from inspect import getattr_static
from typing import Any

from .discovery import CONTRACTS, GROUP
from .hookspecs import HOOK_API, PROJECT
from .plugin import Kind
from .types import PLUGIN_KEY, SettingSpec

OF_EXTENSIONS = (
    "communicator_checks",
    "doctor",
    "engine_session",
    "inspect_plan",
    "process_start",
    "rejections",
    "settings",
    "worker_report",
    "worker_start",
)
"""The hooks that an extension may implement."""

OLD_NAMES = ("register_builtins", "vllm_fl_register", "register")


def forms_of(plugin: object) -> tuple[tuple[str, ...], Callable[[Any], object] | None]:
    """The hooks that `plugin` implements, or its older `register_builtins(registry)`."""
    marked = tuple(
        name
        for name in sorted(dir(plugin))
        if getattr(getattr(plugin, name, None), f"{PROJECT}_impl", None)
    )
    if marked and not isinstance(plugin, type):
        return marked, None
    if callable(plugin) and not isinstance(plugin, type):
        return ("register_builtins",), plugin
    for name in OLD_NAMES:
        function = getattr(plugin, name, None)
        static = getattr_static(plugin, name, None)
        if callable(function) and (
            not isinstance(plugin, type) or isinstance(static, classmethod | staticmethod)
        ):
            return ("register_builtins",), function
    raise TypeError(
        f"it points at {plugin!r}, which implements no hook: point it at a module whose functions "
        "carry @hookimpl, or at register_builtins(registry)"
    )


def check_kind(kind: Kind, hooks: Sequence[str]) -> None:
    """Check that a plugin implements only hooks that the group of its entry point is for."""
    if kind == "contracts" and hooks != ("contracts",):
        raise TypeError(
            f"the group {CONTRACTS} is for plugins that bring contracts alone, and it "
            f"implements {', '.join(hooks)}: name it in the group {GROUP}"
        )
    others = [hook for hook in hooks if hook not in OF_EXTENSIONS]
    if kind == "extension" and others:
        raise TypeError(
            f"an extension implements only {', '.join(OF_EXTENSIONS)}, and it implements "
            f"{', '.join(others)}"
        )
    if kind == "backend" and "process_start" in hooks:
        raise TypeError(
            "process_start is for extensions: a backend is not imported when a process starts"
        )


def verifies_of(plugin: object, hooks: Sequence[str]) -> bool:
    """Whether the plugin declares itself a verifier."""
    verifies = getattr(plugin, "VERIFIES", False)
    if not isinstance(verifies, bool):
        raise TypeError(f"its VERIFIES is {verifies!r}; expected True or False")
    if verifies and "inspect_plan" not in hooks:
        raise TypeError("its VERIFIES is True, and it does not implement inspect_plan")
    return verifies


def check_api(plugin: object) -> None:
    wanted = getattr(plugin, "HOOK_API", HOOK_API)
    if wanted != HOOK_API:
        raise RuntimeError(
            f"it is written for HOOK_API {wanted}, this vllm-fl-core has {HOOK_API}; "
            f"install the {'older' if wanted > HOOK_API else 'newer'} release of it"
            if isinstance(wanted, int)
            else f"its HOOK_API is {wanted!r}, expected the integer {HOOK_API}"
        )


def kernels_of(plugin: object) -> tuple[str, ...]:
    """The distributions that the plugin declares its implementations to run the code of."""
    names = getattr(plugin, "KERNEL_DISTRIBUTIONS", ())
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"its KERNEL_DISTRIBUTIONS is {names!r}; expected a tuple of distributions' names"
        )
    return tuple(names)


def check_settings(specs: Sequence[Any]) -> None:
    """Check what one plugin declares; what it shares with others is checked when all are known."""
    for spec in specs:
        if not isinstance(spec, SettingSpec):
            raise TypeError(f"settings returned {spec!r}; expected SettingSpec")
        if spec.in_file and not re.fullmatch(PLUGIN_KEY, spec.key):
            raise ValueError(
                f"a file may have its setting {spec.key!r}, whose key must then begin with "
                "flagos_, reference_ or vendor_<vendor>_"
            )
    settings = Counter(spec.key for spec in specs)
    variables = Counter(name for spec in specs for name in spec.variables)
    for name in (name for counts in (settings, variables) for name, n in counts.items() if n > 1):
        raise ValueError(f"it declares {name!r} twice")
    blacklists = {spec.key: spec for spec in specs if spec.names and spec.default is not None}
    for spec in specs:
        if not spec.excludes:
            continue
        if spec.excludes not in blacklists:
            raise ValueError(
                f"its setting {spec.key!r} excludes {spec.excludes!r}, which is no list of its own "
                "with a tuple as its default"
            )
        if blacklists[spec.excludes].in_file is not spec.in_file:
            raise ValueError(
                f"its settings {spec.key!r} and {spec.excludes!r} exclude each other: a file may "
                "have both or neither"
            )
