"""Check the names in settings: ops, groups, vendors, layers and selectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, cast

from ..contracts.binding import Binding
from ..plugins.plugin import Plugin
from ..plugins.types import KERNEL_OPS, Impl
from ..text import closest
from .policy import DEFAULT_ORDER, GROUP_PREFIX, IMPL_KINDS, MODES, UNTOUCHED, OpOrder, Selector
from .schema import Setting, Settings
from .values import DEVICES, ORDER_PREFIX, PLATFORMS, wrong

Impls = Collection[Impl]

OURS = ("op", "group", "vendor", "layer", "setting")

OLDER_LAYERS = frozenset(
    (
        "deepseek_v4_multi_head_latent_attention",
        "gated_layer",
        "masked_fill",
        "unquantized_fused_moe_method",
    )
)
"""Layers in files of vllm-plugin-FL that some releases of vLLM lack, except the layers of ops,
which are in the bindings."""


class _Use(NamedTuple):
    """A name in a setting. `label` is its entry in `Settings.unchecked`."""

    space: str
    name: str
    label: str
    setting: Setting

    @property
    def is_users_order(self) -> bool:
        return isinstance(self.setting.value, OpOrder) and self.setting.value.pinned


def check_names(
    settings: Settings,
    *,
    impls: Mapping[str, Impls] | None = None,
    bindings: Mapping[str, Binding] = MappingProxyType({}),
    plugins: Sequence[Plugin] = (),
    **known: Collection[str],
) -> Settings:
    """Check the names in settings. Kinds that are missing in `known` are checked by a later call.
    An unknown op or vendor is kept, because its plugin may be installed later. If a known name is
    similar, a warning suggests it.

    Args:
        impls: op -> the installed implementations, to check the selectors in the user's orders;
            None to skip this check.
        bindings: the bindings of the ops, with their names in vllm-plugin-FL.
        plugins: as for `unmatched_orders`.
        known: the known names by kind: `op` (required) and `group` from contracts and plugins,
            `vendor` from plugins, `layer` from vLLM.

    Raises:
        SettingsError: vLLM has no such layer. A layer of vllm-plugin-FL only causes a warning.
    """
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
                problem = f"vLLM has no layer {name!r}.{closest(name, names)}"
                raise wrong(use.setting.key, use.setting.origin, problem)
            problem = f"the installed vLLM has no layer {name!r}; it has no effect."
        elif use.space == "op" and use.is_users_order and name in older_ops:
            problem = f"{name!r} is an op of vllm-plugin-FL, and has no effect. Use the "
            problem += f"equivalent op {older_ops[name]!r}."
        elif use.space == "op" and use.is_users_order and name in known.get("group", ()):
            problem = f"{name!r} is a group of ops, and has no effect here. Did you mean "
            problem += f"'{GROUP_PREFIX}{name}'?"
        elif names is not None and use.space == "group":
            groups_here = closest(name, names) or f" Known groups: {', '.join(sorted(names))}."
            problem = (
                f"no installed op belongs to the group {name!r}; it has no effect.{groups_here}"
            )
        elif not (use.space == "vendor" and use.is_users_order and impls is not None):
            near = names if use.space in OURS else known["op"]  # a plugin's list may contain ops
            if near is not None and name not in near and (meant := closest(name, near, 0.8)):
                problem = f"no {use.space} {name!r} is installed, so it selects nothing.{meant}"
        if problem:
            warnings.append(f"{use.setting.origin}: {use.setting.key}: {problem}")
    if impls is not None:
        warnings += [said for _, said in unmatched_orders(settings, impls, plugins)]
    return dataclasses.replace(
        settings,
        warnings=tuple(dict.fromkeys((*settings.warnings, *warnings))),
        unchecked=tuple(label for label in settings.unchecked if label not in checked),
    )


def uses(settings: Settings) -> Iterator[_Use]:
    unowned = settings.unowned
    for key, setting in settings.items():
        if isinstance(setting.value, OpOrder):
            name = key.removeprefix(ORDER_PREFIX)
            space = "group" if name.startswith(GROUP_PREFIX) else "op"
            if name != DEFAULT_ORDER:
                yield _Use(space, name.removeprefix(GROUP_PREFIX), key, setting)
            for selector in setting.value.every:
                if selector.kind == "vendor" and selector.name:
                    yield _Use("vendor", selector.name, f"{key}.{selector}", setting)
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


def unmatched_orders(
    settings: Settings, impls_by_op: Mapping[str, Impls], plugins: Sequence[Plugin] = ()
) -> Iterator[tuple[str, str]]:
    """Yield (op, a sentence) for each order of the user with selectors that match no usable
    implementation. A usable one is available and allowed by the vendor filters.

    One file may be used on several machines, so a selector of a different platform is reported only
    if no implementation in the order is usable. An id or vendor that a failed plugin of `plugins`
    may have provided is not reported, because a call of the op reports the plugin's error.
    """
    for key, setting in settings.items():
        op, order = key.removeprefix(ORDER_PREFIX), setting.value
        if isinstance(order, OpOrder) and order.pinned and not op.startswith(GROUP_PREFIX):
            ops: Collection[str] = impls_by_op if op == DEFAULT_ORDER else (op,)
            if order.group:
                listed = settings.policy.per_op_order
                ops = [each for each in listed if listed[each].group == order.group]
                op = f"{GROUP_PREFIX}{order.group}"
            impls = [impl for each in ops for impl in impls_by_op.get(each, ())]
            if said := _said(op, setting, settings, impls, plugins):
                yield op, said


def meant(selector: Selector, impls: Impls) -> str:
    known = {
        *(f"impl:{impl.impl_id}" for impl in impls),
        *(f"vendor:{impl.vendor}" for impl in impls if impl.vendor),
        *(impl.kind.value for impl in impls),
    }
    return closest(str(selector), known, 0.7)


def _said(
    op: str, setting: Setting, settings: Settings, impls: Impls, plugins: Sequence[Plugin]
) -> str:
    order = cast("OpOrder", setting.value)
    problems: dict[Selector, str] = {}
    failed = False
    for selector in order.every:
        matched = [impl for impl in impls if selector.matches(impl)]
        whys = [_obstacle(impl, settings) for impl in matched]
        is_vllms = selector.is_vllms and op in KERNEL_OPS  # known only with vLLM
        if selector.kind in UNTOUCHED or is_vllms or any(why is None for why in whys):
            continue
        if matched:
            each = (f"{impl.impl_id} ({why})" for impl, why in zip(matched, whys, strict=True))
            problems[selector] = f"{str(selector)!r} cannot run: {'; '.join(dict.fromkeys(each))}."
        elif selector.name and any(plugin.may_bring(selector.name, op) for plugin in plugins):
            failed = True
        else:
            slip = meant(selector, impls)
            problems[selector] = (
                f"no installed implementation of {op} matches {str(selector)!r}.{slip}"
            )
    rows = [selectors for mode in MODES for _, selectors in order.rows(mode)]
    is_lost = bool(impls) and not failed and any(problems.keys() >= {*row} for row in rows)
    if not is_lost:  # other machines may have this kind, or the vendor of a platform
        problems = {
            selector: why
            for selector, why in problems.items()
            if selector.kind not in IMPL_KINDS or selector.name not in (None, *PLATFORMS)
        }
    if not problems:
        return ""
    lost = ""
    if is_lost:
        engine = "no engine can start" if settings.policy.strict else "an engine runs vLLM's code"
        lost = (
            f" No implementation in the order of {op} can run: a call from a script fails, and "
            f"{engine}."
        )
    return f"{setting.origin}: {ORDER_PREFIX}{op}: {' '.join(problems.values())}{lost}"


def _obstacle(impl: Impl, settings: Settings) -> str | None:
    why = settings.policy.refuses(impl)
    if why is None and (verdict := impl.availability()) is not True:
        why = f"not available: {verdict}"
    return why
