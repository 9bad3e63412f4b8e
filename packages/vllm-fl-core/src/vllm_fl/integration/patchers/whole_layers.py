"""Whole layers: a plugin's own class in the place of a layer class of vLLM's.

vLLM's table of replacements is one per process and keyed by class name. What a plan chose stands in
it while the plan's model is being built, LoRA's checks of classes included, and at no other time:
the next engine of the process may have another plan.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from vllm.model_executor import custom_op
from vllm.model_executor.custom_op import CustomOp, PluggableLayer

from ...dispatch import get_default_manager
from ...engine.facts import EngineFacts
from ...engine.plan import Plan
from ...errors import TargetError
from ...logs import get_logger
from ...plugins.types import LayerImpl, LayerRequest
from ...settings.policy import closest
from ..compat import declared_layers, vllm_folders, vllm_version
from . import classes
from .layers import OURS, layer_table, owner_of, taken_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ASKED_OF_THE_CLASS = {
    "MMEncoderAttention": ("maybe_compute_seq_lens", "maybe_recompute_cu_seqlens")
}
"""Class methods for which vLLM looks into its table at every step, when it holds none of ours."""

log = get_logger("engine")

_one_at_a_time = threading.RLock()
"""vLLM's table is one per process, and so is the configuration that it builds a model by."""


def request_of(vllm_config: VllmConfig, *, compiled: bool) -> LayerRequest:
    """What every whole layer of an engine is asked with; `layer` is still open."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    return LayerRequest(
        layer="",
        dtype=model.dtype,
        quantization=model.quantization,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=data,
        expert_parallel_size=tensor * data if parallel.enable_expert_parallel else 1,
        lora=vllm_config.lora_config is not None,
        compiled=compiled,
    )


def refusals(facts: EngineFacts) -> dict[tuple[str, str], str]:
    """(layer, impl id) -> why an installed class does not stand for a whole layer here."""
    if facts.layers is None:
        return {}
    ops = {layer.cls: layer.op for layer in layer_table()}
    found: dict[tuple[str, str], str] = {}
    for name in get_default_manager().registry.snapshot().layers:
        ask = partial(_reached_by, ops[name]) if name in ops else _asked_once
        found |= classes.refusals(name, replace(facts.layers, layer=name), "this engine", ask)
    return found


_asked_once = cache(classes.refusal_of)


def _reached_by(op: str, impl: classes.ClassImpl, layer: str, request: object) -> str:
    return (
        f"vllm-fl reaches {layer} by the op {op}, whose implementations are verified: bring an "
        "OpImpl for it"
    )


def known() -> dict[str, str]:
    """The whole layers that plugins bring: by class -> vLLM's registered name of the class.

    A subclass has its parent's. Where vLLM has not imported the class yet, its source tells.
    """
    vllms = _vllms_classes()
    return {
        name: getattr(vllms.get(name), "name", None) or _declared().get(name, name)
        for name in get_default_manager().registry.snapshot().layers
    }


def names() -> frozenset[str]:
    """What a list of layers may hold beside what is imported: names of classes, and registered."""
    brought = get_default_manager().registry.snapshot().layers
    return frozenset({*brought, *_declared(), *_declared().values()})


@cache
def _declared() -> dict[str, str]:
    """The classes that this vLLM's source registers as layers -> the names."""
    return {layer.cls: layer.registered for layer in declared_layers(vllm_folders())}


def note(name: str, registered: str, facts: EngineFacts) -> str:
    """What leaves the layer as it is, beside our own settings; or empty."""
    cls = _vllms_classes().get(name)
    if cls is None or not issubclass(cls, CustomOp):
        return ""  # `custom_ops` speaks of CustomOps alone
    return facts.custom_op_note(registered)


def faults(plan: Plan) -> dict[tuple[str, str], str]:
    """(layer, impl id) -> why a class that the plan chose cannot be used in this process.

    The classes are imported here, before a layer is built.
    """
    return {
        (name, impl.impl_id): problem
        for name, impl in plan.layers.items()
        if (problem := _chosen(impl)[2])
    }


def custom_ops(plan: Plan) -> list[str]:
    """The registered names of those of the plan's whole layers that `custom_ops` turns on and off.

    A name that layers of an op of ours have too is left out: turning it on would change those.
    """
    ops = {layer.registered for layer in layer_table()}
    vllms = _vllms_classes()
    bases = (vllms.get(name) for name in plan.layers)
    return [
        base.name
        for base in bases
        if base is not None and issubclass(base, CustomOp) and base.name not in ops
    ]


@contextmanager
def in_place(plan: Plan) -> Iterator[None]:
    """While the block runs, vLLM builds the plan's classes: for whole layers, and for layers of ops
    that another plugin has replaced and the plan takes.

    Raises:
        TargetError: another plugin has replaced one of the layers since the plan was made.
    """
    whole = {name: _chosen(impl)[0] for name, impl in plan.layers.items()}
    table: dict[str, Any] = custom_op.op_registry_oot
    with _one_at_a_time:
        for name in whole:
            if name in table and not plan.entries[name].is_foreign:
                raise TargetError(
                    f"vllm-fl: layer {name} was replaced by {owner_of(table[name])} after the plan "
                    f"chose '{plan.layers[name].impl_id}'. Leave one of the two out.",
                    op=name,
                    impl=plan.layers[name].impl_id,
                )
        OURS.update(whole.values())
        chosen = taken_layers(plan) | whole
        before = {name: table.pop(name) for name in chosen if name in table}
        table |= {name: cls for name, cls in chosen.items() if cls is not None}
        try:
            yield
        finally:
            for name, cls in chosen.items():
                if table.get(name) is cls:
                    table.pop(name, None)
                    table |= {name: before[name]} if name in before else {}


@dataclass(frozen=True)
class Served:
    """What became of one whole layer in a model.

    Args:
        ours: how many layers of the model are the plan's class.
        stock: the names of those that are vLLM's class all the same.
        wrapped: how many of ours LoRA has wrapped.
    """

    ours: int
    stock: tuple[str, ...]
    wrapped: int


def served(plan: Plan, model: Any) -> dict[str, Served]:
    """Look for the plan's whole layers in the model that was built, and count their calls.

    vLLM matches exact names of classes and says nothing about one that no layer has.

    Args:
        plan: the engine's.
        model: the model, a `torch.nn.Module`.

    Raises:
        TargetError: strict mode, and a layer is vLLM's own.
    """
    found = {}
    for name, impl in plan.layers.items():
        cls, base, _ = _chosen(impl)
        modules = dict(model.named_modules())
        ours = [module for module in modules.values() if type(module) is cls]
        stock = tuple(path for path, module in modules.items() if type(module) is base)
        wrapped = sum(
            type(getattr(module, "base_layer", None)) is cls for module in modules.values()
        )
        for module in ours if plan.counts_calls else ():
            module.forward = plan.record.counting(module.forward, name, impl.impl_id)
        found[name] = Served(len(ours), stock, wrapped)
        if stock:
            text = (
                f"Implementation '{impl.impl_id}' was not taken for layer '{name}' in "
                f"{len(stock)} places, which are vLLM's own: {', '.join(stock[:3])}"
            )
            if plan.strict:
                raise TargetError(
                    f"{text}. Strict mode tries nothing else; set VLLM_FL_STRICT=0 to fall back.",
                    op=name,
                    impl=impl.impl_id,
                )
            plan.fallbacks[name, "stock.vllm"] += len(stock)
            log.warning("%s", text)
    return found


def _vllms_classes() -> dict[str, type[Any]]:
    """The classes that vLLM's table can replace, by name, as far as they are imported."""
    found: dict[str, type[Any]] = {}
    below: list[type[Any]] = [CustomOp, PluggableLayer]
    for cls in below:  # grows while it is walked
        below += cls.__subclasses__()
        if cls.__module__.startswith("vllm."):
            found.setdefault(cls.__name__, cls)
    del found["CustomOp"], found["PluggableLayer"]
    return found


@cache
def _chosen(impl: LayerImpl) -> tuple[type[Any], type[Any], str]:
    """(the class, vLLM's class that it is made of, why it cannot be used or empty)."""
    before = dict(custom_op.op_registry_oot)
    path, cls, problem = classes.class_of(impl, impl.layer, None, lambda path, cls: "")
    if not problem and not isinstance(cls, type):
        problem = f"{path} is no class"
    if problem:
        return object, object, problem
    if custom_op.op_registry_oot.get(impl.layer) is cls and impl.layer not in before:
        del custom_op.op_registry_oot[impl.layer]
        log.warning(
            "%s registers itself with vLLM for every engine of the process (register_oot); that "
            "was undone: the policy decides. Leave it to the layers hook.",
            path,
        )
    is_base = (
        base
        for base in cls.__mro__[1:]
        if base.__name__ == impl.layer
        and base.__module__.startswith("vllm.")
        and issubclass(base, (CustomOp, PluggableLayer))
        and base not in (CustomOp, PluggableLayer)
    )
    base = next(is_base, None)
    if base is None:
        return object, object, _why_not(impl)
    for method in ASKED_OF_THE_CLASS.get(impl.layer, ()):
        if getattr(cls, method).__func__ is not getattr(base, method).__func__:
            problem = (
                f"{path}.{method} would not be called: vLLM looks for it in its table "
                "at every step, where a plan's class stands only while the model is being built"
            )
    return cls, base, problem


def _why_not(impl: LayerImpl) -> str:
    """Why a class that is made of no class of vLLM's of that name cannot be used."""
    vllms = _vllms_classes()
    if theirs := vllms.get(impl.layer):
        return (
            f"{impl.class_path} is no subclass of vLLM's {theirs.__module__}.{theirs.__qualname__}"
        )
    registered = custom_op.op_registry.get(impl.layer)
    meant = f" Did you mean {registered.__name__!r}?" if registered else ""
    meant = meant or closest(impl.layer, {*vllms, *_declared()})
    if impl.layer in _declared():  # vLLM has not imported it, so that nothing is made of it
        return f"{impl.class_path} is no subclass of vLLM's {impl.layer}"
    return f"vLLM {vllm_version()} has no layer class {impl.layer!r}.{meant}"
