"""Read and check what a plugin's module declares: hooks, versions, settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from inspect import getattr_static
from typing import Any

import pluggy

from . import hookspecs
from .discovery import BACKENDS, CONTRACTS
from .hookspecs import HOOK_API, PROJECT
from .plugin import Kind, Owner, Plugin
from .setting import PLUGIN_KEY, SettingSpec
from .types import (
    AttentionImpl,
    CommunicatorImpl,
    ExpertKernelImpl,
    LayerImpl,
    LinearKernelImpl,
    OpImpl,
)

IMPLS = {
    "register_ops": OpImpl,
    "attention_backend": AttentionImpl,
    "communicator": CommunicatorImpl,
    "layers": LayerImpl,
    "linear_kernels": LinearKernelImpl,
    "expert_kernels": ExpertKernelImpl,
}
"""Hook that returns implementations -> their type."""

PROVIDING = (*IMPLS, "contracts", "device", "policy")

OLD_FORM = "register_builtins"
OLD_NAMES = (OLD_FORM, "vllm_fl_register", "register")


def declare(plugin: Plugin, module: object) -> None:
    _check_api(module)
    plugin.hooks = _hooks_of(module)
    _check_kind(plugin.kind, plugin.hooks)
    plugin.verifies = _verifies_of(module, plugin.hooks)
    plugin.owner = replace(plugin.owner, kernels=_kernels_of(module))


def _hooks_of(plugin: object) -> Mapping[str, Callable[..., Any]]:
    """Return the hooks of a plugin, or its older `register_builtins(registry)`. Raises TypeError
    without hooks, PluginValidationError if a hook is unknown or has wrong parameters."""
    is_class = isinstance(plugin, type)
    if not is_class:
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(plugin)
        manager.check_pending()
        if callers := manager.get_hookcallers(plugin):
            return {caller.name: caller for caller in sorted(callers, key=lambda each: each.name)}
        if callable(plugin):
            return {OLD_FORM: plugin}
    for name in OLD_NAMES:
        function = getattr(plugin, name, None)
        is_bound = isinstance(getattr_static(plugin, name, None), classmethod | staticmethod)
        if callable(function) and (is_bound or not is_class):
            return {OLD_FORM: function}
    raise TypeError(
        f"its entry point {plugin!r} implements no hook; use a module with @hookimpl functions, or "
        "register_builtins(registry)"
    )


def _check_kind(kind: Kind, hooks: Collection[str]) -> None:
    if kind == "contracts" and {*hooks} != {"contracts"}:
        raise TypeError(
            f"the group {CONTRACTS} is only for contracts, but the plugin implements "
            f"{', '.join(hooks)}; use the group {BACKENDS}"
        )
    if kind == "extension" and (
        others := [hook for hook in hooks if hook in (OLD_FORM, *PROVIDING)]
    ):
        raise TypeError(f"an extension must not implement {others[0]}")
    if kind == "backend" and "process_start" in hooks:
        raise TypeError(
            "process_start is for extensions: a backend is not imported when a process starts"
        )


def _check_api(plugin: object) -> None:
    api = getattr(plugin, "HOOK_API", HOOK_API)
    if not isinstance(api, int):
        raise RuntimeError(f"its HOOK_API is {api!r}, expected the integer {HOOK_API}")
    if api != HOOK_API:
        raise RuntimeError(
            f"it needs HOOK_API {api}, but this vllm-fl-core has {HOOK_API}; install "
            f"{'an older' if api > HOOK_API else 'a newer'} release of the plugin"
        )


def _verifies_of(plugin: object, hooks: Collection[str]) -> bool:
    verifies = getattr(plugin, "VERIFIES", False)
    if not isinstance(verifies, bool):
        raise TypeError(f"its VERIFIES is {verifies!r}; expected True or False")
    if verifies and "inspect_plan" not in hooks:
        raise TypeError("its VERIFIES is True, but it does not implement inspect_plan")
    return verifies


def _kernels_of(plugin: object) -> tuple[str, ...]:
    names = getattr(plugin, "KERNEL_DISTRIBUTIONS", ())
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"its KERNEL_DISTRIBUTIONS is {names!r}; expected a tuple of names")
    return tuple(names)


def check_settings(specs: Sequence[Any], owner: Owner, holders: dict[str, str]) -> None:
    """Check the settings of a plugin. `holders` maps each key or variable to its distribution, and
    is extended."""
    names: dict[str, str] = {}
    for spec in specs:
        if not isinstance(spec, SettingSpec):
            raise TypeError(f"settings returned {spec!r}; expected SettingSpec")
        if spec.in_file and not re.fullmatch(PLUGIN_KEY, spec.key):
            raise ValueError(
                f"the key of its setting {spec.key!r} must begin with flagos_, reference_ or "
                "vendor_<vendor>_, because files may set it"
            )
        for name in dict.fromkeys((spec.key, spec.variable)):
            if name in names or name in holders:
                raise ValueError(
                    f"its setting {name!r} is already declared by {(names | holders)[name]}"
                )
            names[name] = str(owner)
    holders |= names
