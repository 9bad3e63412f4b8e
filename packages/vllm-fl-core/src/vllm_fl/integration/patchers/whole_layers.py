"""Whole layers: a plugin's own class in the place of a layer class of vLLM's.

vLLM's table of replacements is one per process and keyed by class name. What a plan chose stands in
it while the plan's model is being built, LoRA's checks of classes included, and at no other time:
the next engine of the process may have another plan.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from ...text import closest
from ..compat import declared_layers, vllm_folders, vllm_version
from ..patcher import Patcher, WhyNot
from . import classes
from .layers import OURS, layer_table, oot_note, owner_of, taken_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..engines import Engine

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


@cache
def _declared() -> dict[str, str]:
    """The classes that this vLLM's source registers as layers -> the names."""
    return {layer.cls: layer.registered for layer in declared_layers(vllm_folders())}


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


class WholeLayers(Patcher):
    """Puts a plugin's own classes for layer classes of vLLM's while the model is built."""

    def layer_names(self) -> frozenset[str]:
        """Return names of classes and registered names that vLLM need not have imported."""
        brought = get_default_manager().registry.snapshot().layers
        return frozenset({*brought, *_declared(), *_declared().values()})

    def request(
        self, vllm_config: VllmConfig, /, *_: Any, compiled: bool
    ) -> dict[str, LayerRequest | None]:
        has_model = vllm_config.model_config is not None
        return {"layers": request_of(vllm_config, compiled=compiled) if has_model else None}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        """Return why vLLM's own class, or another plugin's, stays, and what classes refuse."""
        notes = {
            name: oot_note({name, registered}, facts.settings)
            or _user_note(name, registered, facts)
            for name, registered in known().items()
        }
        return WhyNot({name: why for name, why in notes.items() if why}, refusals(facts))

    def configure(
        self, plan: Plan, vllm_config: VllmConfig, entry: MutableMapping[str, Any]
    ) -> Sequence[str]:
        """Return the registered names of those of the plan's layers that are CustomOps.

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

    def faults(self, plan: Plan, facts: EngineFacts) -> dict[tuple[str, str], str]:
        return {
            (name, impl.impl_id): problem
            for name, impl in plan.layers.items()
            if (problem := _chosen(impl)[2])
        }

    def building(self, engine: Engine) -> AbstractContextManager[None]:
        return in_place(engine.plan)

    def loaded(self, engine: Engine) -> None:
        """Count the model's layers that are the plan's class, and log them on rank 0."""
        plan, model = engine.plan, engine.model
        counts: dict[str, int] = engine.state.setdefault(WholeLayers, {})
        if plan.layers and model is None:
            log.warning("This worker shows no model: whether whole layers serve in it is not known")
        for name, found in served(plan, model).items() if model is not None else ():
            counts[name] = found.ours
            if engine.rank == 0:
                _say(name, plan.layers[name].impl_id, found)

    def report(self, engine: Engine) -> dict[str, Any]:
        return {"layers": engine.state.get(WholeLayers, {})}


def _say(name: str, impl_id: str, found: Served) -> None:
    if not found.ours:
        log.warning("Layer %s: this model has none, so that '%s' does not run", name, impl_id)
        return
    log.info("Layer %s: %d in this model, by '%s'", name, found.ours, impl_id)
    if found.wrapped:
        log.warning(
            "Layer %s: LoRA wraps %d of them, and may call their quantisation method in place "
            "of the forward of '%s'",
            name,
            found.wrapped,
            impl_id,
        )


def _user_note(name: str, registered: str, facts: EngineFacts) -> str:
    """Return the setting of vLLM's that leaves the layer as it is, or nothing."""
    cls = _vllms_classes().get(name)
    if cls is None or not issubclass(cls, CustomOp):
        return ""  # `custom_ops` has only CustomOps
    return facts.custom_op_note(registered)


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
