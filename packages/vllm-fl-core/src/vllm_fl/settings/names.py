"""Checking the names in settings: each namespace by its owner, when the owner is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, cast

from ..contracts.binding import Binding
from ..plugins.types import Impl
from .policy import DEFAULT, GROUP, OpOrder, closest
from .schema import Setting, Settings
from .unmatched import unmatched
from .values import DEVICES, ORDER_PREFIX, near, wrong

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
    """A name that stands in a setting; `label` is what `Settings.unchecked` calls it."""

    space: str
    name: str
    label: str
    setting: Setting

    def is_users(self, space: str) -> bool:
        """Whether it is such a name and an order of the user's has it."""
        order = self.setting.value
        return self.space == space and isinstance(order, OpOrder) and order.pinned


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
        # What a plugin's lists name it checks itself; ops of contracts may be among it.
        names = known.get(use.space)
        if names is not None and use.name in names:
            checked.add(use.label)
        elif names is not None and use.space == "layer" and use.name in older_layers:
            warnings.append(
                f"{use.setting.origin}: {use.setting.key}: the installed vLLM has no layer "
                f"{use.name!r}, so that it has no effect."
            )
        elif names is not None and use.is_users("op") and use.name in older_ops:
            warnings.append(
                f"{use.setting.origin}: {use.setting.key}: {use.name!r} is vllm-plugin-FL's op, "
                f"and has no effect. What it computes is part of {older_ops[use.name]!r} here: "
                "name that instead."
            )
        elif names is not None and use.space == "group":
            known_groups = f" Groups here: {', '.join(sorted(names)) or 'none'}."
            warnings.append(
                f"{use.setting.origin}: {use.setting.key}: no op that is installed belongs to the "
                f"group {use.name!r}, so that it has no effect."
                + (closest(use.name, names) or known_groups)
            )
        elif names is not None and use.space == "layer":
            raise wrong(
                use.setting.key,
                use.setting.origin,
                f"there is no {use.space} {use.name!r}.{closest(use.name, names)}",
            )
        else:
            near_to = names if use.space in known else ops
            slip = near(use.name, near_to) if near_to and use.name not in near_to else None
            if slip and (impls is None or not use.is_users("vendor")):  # `unmatched` says it
                warnings.append(
                    f"{use.setting.origin}: {use.setting.key}: no {use.space} {use.name!r} is "
                    f"installed, so that it has no effect. Did you mean {slip!r}?"
                )
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
