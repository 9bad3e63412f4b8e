"""Checking the names in settings: each namespace by its owner, when the owner is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, cast

from ..contracts.binding import Binding
from ..plugins.types import Impl
from ..text import closest
from .policy import DEFAULT, GROUP, OpOrder
from .schema import Setting, Settings
from .unmatched import unmatched
from .values import DEVICES, ORDER_PREFIX, wrong

OLDER_LAYERS = frozenset(
    (
        "deepseek_v4_multi_head_latent_attention",
        "gated_layer",
        "masked_fill",
        "unquantized_fused_moe_method",
    )
)
"""What vllm-plugin-FL's lists of layers and its platform files name, and no op here has; not every
vLLM has them. Those of ops are in their bindings."""


class _Use(NamedTuple):
    """A name in a setting; `label` is its entry in `Settings.unchecked`."""

    space: str
    name: str
    label: str
    setting: Setting

    @property
    def is_users_order(self) -> bool:
        """Whether an order of the user has it."""
        return isinstance(self.setting.value, OpOrder) and self.setting.value.pinned


def check_names(
    settings: Settings,
    *,
    ops: Collection[str],
    groups: Collection[str] | None = None,
    vendors: Collection[str] | None = None,
    layers: Collection[str] | None = None,
    impls: Mapping[str, Collection[Impl]] | None = None,
    bindings: Mapping[str, Binding] = MappingProxyType({}),
    has_failed: Callable[[str, str], bool] = lambda name, op: False,
) -> Settings:
    """Check the names whose owner is here; the others stay as they are, and stay unchecked.

    An op or vendor that nobody knows is kept, since a plugin may bring it another day, and warned
    of when it is close to a known one. May be called again when another owner is there.

    Args:
        settings: what `load_settings` gave.
        ops: the ops of contracts and plugins.
        groups: the groups that they belong to, or None.
        vendors: the vendors of plugins, or None.
        layers: the names of vLLM's layers, or None where vLLM is not loaded.
        impls: op -> what is installed for it, which the tokens of the user's orders should match;
            or None.
        bindings: those of the ops, which know what vllm-plugin-FL called them and their layers.
        has_failed: as for `unmatched`.

    Raises:
        SettingsError: a layer that vLLM does not know. One that vllm-plugin-FL has is kept and
            warned of.
    """
    known: dict[str, Collection[str] | None] = {
        "op": ops,
        "group": groups,
        "vendor": vendors,
        "layer": layers,
        "setting": None,
    }
    older_ops = {name: op for op, binding in bindings.items() for name in binding.formerly}
    older_layers = OLDER_LAYERS.union(*(binding.former_layers for binding in bindings.values()))
    checked = set()
    warnings = []
    for use in uses(settings):
        names, name = known.get(use.space), use.name
        problem = ""
        if names is not None and name in names:
            checked.add(use.label)
        elif names is not None and use.space == "layer":
            if name not in older_layers:
                problem = f"there is no layer {name!r}.{closest(name, names)}"
                raise wrong(use.setting.key, use.setting.origin, problem)
            problem = f"the installed vLLM has no layer {name!r}, so that it has no effect."
        elif use.space == "op" and use.is_users_order and name in older_ops:
            problem = f"{name!r} is vllm-plugin-FL's op, and has no effect. Name "
            problem += f"{older_ops[name]!r} instead, which computes it."
        elif names is not None and use.space == "group":
            groups_here = closest(name, names) or f" Groups here: {', '.join(sorted(names))}."
            problem = (
                f"no installed op belongs to the group {name!r}: it has no effect.{groups_here}"
            )
        elif not (use.space == "vendor" and use.is_users_order and impls is not None):
            near = names if use.space in known else ops  # a plugin's lists may name ops
            if near is not None and name not in near and (meant := closest(name, near, 0.8)):
                problem = f"no {use.space} {name!r} is installed, so that it has no effect.{meant}"
        if problem:
            warnings.append(f"{use.setting.origin}: {use.setting.key}: {problem}")
    if impls is not None:
        warnings += [said for _, said in unmatched(settings, impls, has_failed)]
    return dataclasses.replace(
        settings,
        warnings=tuple(dict.fromkeys((*settings.warnings, *warnings))),
        unchecked=tuple(label for label in settings.unchecked if label not in checked),
    )


def uses(settings: Settings) -> Iterator[_Use]:
    """The names that stand in settings, each with its setting; one may stand in several places."""
    unowned = settings.unowned
    for key, setting in settings.items():
        if isinstance(setting.value, OpOrder):
            name = key.removeprefix(ORDER_PREFIX)
            space = "group" if name.startswith(GROUP) else "op"
            if name != DEFAULT:
                yield _Use(space, name.removeprefix(GROUP), key, setting)
            for token in setting.value.every:
                if token.kind == "vendor" and token.name:
                    yield _Use("vendor", token.name, f"{key}.{token}", setting)
            continue
        if key.startswith(DEVICES):
            yield _Use("op", key.removeprefix(DEVICES), key, setting)
            continue
        spec = settings.declared.get(key)
        if key in unowned:
            yield _Use("setting", key, key, setting)
        elif spec is not None and spec.names and spec.in_file:
            for name in cast("tuple[str, ...] | None", setting.value) or ():
                yield _Use(spec.names, name, f"{key}.{name}", setting)
