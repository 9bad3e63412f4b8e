"""Replace layer classes of vLLM with whole classes of plugins.

The planned classes are in vLLM's table of replacements while the model is built
(`layers.in_tables`). LoRA's checks of classes are part of this time.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from vllm.model_executor import custom_op
from vllm.model_executor.custom_op import CustomOp, PluggableLayer

from ...dispatch import get_default_manager
from ...engine.facts import EngineFacts
from ...engine.plan import Plan
from ...errors import NO_FALLBACK, TargetError
from ...logs import get_logger
from ...plugins.types import LayerImpl, LayerRequest
from ...text import closest
from ..compat import declared_layers, vllm_version
from ..patcher import Patcher, WhyNot
from . import classes
from .layers import in_tables, layer_table, oot_note

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..engines import Engine

log = get_logger("engine")


def _reached_by(op: str, impl: classes.ClassImpl, layer: str, request: object) -> str:
    return f"vllm-fl replaces {layer} through the op {op}: provide an OpImpl, which is verified"


class WholeLayers(Patcher):
    def layer_names(self) -> frozenset[str]:
        """Return class names and registered names, even of classes that are not imported."""
        brought = get_default_manager().registry.snapshot().layers
        return frozenset({*brought, *declared_layers(), *declared_layers().values()})

    def request(
        self, vllm_config: VllmConfig, /, *_: Any, compiled: bool
    ) -> dict[str, LayerRequest | None]:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if model is None:
            return {"layers": None}
        tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
        request = LayerRequest(
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
        return {"layers": request}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        notes: dict[str, str] = {}
        refused: dict[tuple[str, str], str] = {}
        vllms, ops = _vllms_classes(), {layer.cls: layer.op for layer in layer_table()}
        for name in get_default_manager().registry.snapshot().layers:
            cls = vllms.get(name)
            # A subclass has its parent's registered name. vLLM may not have imported the class yet.
            registered = getattr(cls, "name", None) or declared_layers().get(name, name)
            why = oot_note({name, registered}, facts.settings)
            if not why and cls is not None and issubclass(cls, CustomOp):
                why = facts.custom_op_note(registered)
            if why:
                notes[name] = why
            if facts.layers is not None:
                request = replace(facts.layers, layer=name)
                ask = partial(_reached_by, ops[name]) if name in ops else classes.class_refusal
                refused |= classes.class_refusals(name, request, "this engine", ask)
        return WhyNot(notes, refused)

    def configure(
        self, plan: Plan, vllm_config: VllmConfig, entry: MutableMapping[str, Any]
    ) -> Sequence[str]:
        """Return the registered names of planned layers that are CustomOps. A name that is shared
        with layers of an op is omitted, because enabling it would change those layers."""
        ops = {layer.registered for layer in layer_table()}
        vllms = _vllms_classes()
        bases = (vllms.get(name) for name in plan.layers)
        return [
            base.name
            for base in bases
            if base is not None and issubclass(base, CustomOp) and base.name not in ops
        ]

    def faults(self, plan: Plan, facts: EngineFacts) -> dict[tuple[str, str], str]:
        return {
            (name, impl.impl_id): problem
            for name, impl in plan.layers.items()
            if (problem := _chosen(impl)[2])
        }

    def building(self, engine: Engine) -> AbstractContextManager[None]:
        table: dict[str, Any] = custom_op.op_registry_oot
        layers = engine.plan.layers.items()
        return in_tables((table, name, _chosen(impl)[0]) for name, impl in layers)

    def loaded(self, engine: Engine) -> None:
        """Count the model's layers that have planned classes, and their calls. vLLM matches exact
        class names and does not report a class without layers. In strict mode, a layer that still
        has vLLM's class raises a TargetError."""
        plan, model = engine.plan, engine.model
        counts: dict[str, int] = engine.state.setdefault(WholeLayers, {})
        if plan.layers and model is None:
            log.warning("This worker does not expose its model: replaced layers are not counted")
        modules = dict(model.named_modules()) if model is not None else {}
        for name, impl in plan.layers.items() if model is not None else ():
            cls, base, _ = _chosen(impl)
            ours = [module for module in modules.values() if type(module) is cls]
            stock = [path for path, module in modules.items() if type(module) is base]
            for module in ours if plan.counts_calls else ():
                module.forward = plan.record.counting(module.forward, name, impl.impl_id)
            counts[name] = len(ours)
            if stock:
                _fall_back(plan, impl, stock)
            if engine.rank == 0:
                _say(impl, len(ours), [getattr(m, "base_layer", None) for m in modules.values()])

    def report(self, engine: Engine) -> dict[str, Any]:
        return {"layers": engine.state.get(WholeLayers, {})}


def _fall_back(plan: Plan, impl: LayerImpl, stock: Sequence[str]) -> None:
    text = (
        f"Implementation '{impl.impl_id}' is not used for layer '{impl.layer}' in {len(stock)} "
        f"places, which keep vLLM's class: {', '.join(stock[:3])}"
    )
    if plan.strict:
        raise TargetError(f"{text}. {NO_FALLBACK}", op=impl.layer, impl=impl.impl_id)
    plan.fallbacks[impl.layer, "stock.vllm"] += len(stock)
    log.warning("%s", text)


def _say(impl: LayerImpl, count: int, wrapped_by_lora: Sequence[object]) -> None:
    if not count:
        text = "Layer %s: this model has none, so '%s' does not run"
        log.warning(text, impl.layer, impl.impl_id)
        return
    log.info("Layer %s: %d in this model, by '%s'", impl.layer, count, impl.impl_id)
    if wrapped := sum(type(layer) is _chosen(impl)[0] for layer in wrapped_by_lora):
        log.warning(
            "Layer %s: LoRA wraps %d of them, and may call their quantisation method instead of "
            "the forward of '%s'",
            impl.layer,
            wrapped,
            impl.impl_id,
        )


def _vllms_classes() -> dict[str, type[Any]]:
    found: dict[str, type[Any]] = {}
    below: list[type[Any]] = [CustomOp, PluggableLayer]
    for cls in below:  # grows during the loop
        below += cls.__subclasses__()
        if cls.__module__.startswith("vllm."):
            found.setdefault(cls.__name__, cls)
    del found["CustomOp"], found["PluggableLayer"]
    return found


@cache
def _chosen(impl: LayerImpl) -> tuple[type[Any], type[Any], str]:
    """Return (the class, vLLM's class that it extends, why it cannot be used or empty)."""

    def problem_of(path: str, cls: Any) -> str:
        if not isinstance(cls, type):
            return f"{path} is not a class"
        base = _vllms_classes().get(impl.layer)
        if base is not None and issubclass(cls, base):
            return ""
        known = {*_vllms_classes(), *declared_layers()}
        if impl.layer in known:
            return f"{path} is not a subclass of vLLM's {impl.layer}"
        hint = closest(impl.layer, known)
        return f"vLLM {vllm_version()} has no layer class {impl.layer!r}.{hint}"

    _, cls, problem = classes.class_of(impl, impl.layer, None, problem_of)
    return (object, object, problem) if problem else (cls, _vllms_classes()[impl.layer], "")
