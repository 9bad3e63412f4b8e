"""Bind the forward methods of vLLM layers to the plan.

All four forwards are bound, including `forward_native`. In compiled mode the compiler therefore
traces a traceable implementation, for any `custom_ops`. If compiled code calls an op as a vLLM IR
op (`ir.py`), the op is bound here for its other calls.

vLLM has several `CustomOp` classes. Its hardware-agnostic layers have a separate class, with a
separate table of replacements. Names in vLLM are looked up only when a model is planned and built,
because vLLM may rebind them temporarily while it runs general plugins.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ...contracts.binding import LayerTarget
from ...dispatch import dispatch_method
from ...dispatch.method import PLAN_ATTRIBUTE
from ...dispatch.resolver import FOREIGN
from ...engine.digest import code_hash
from ...engine.facts import EngineFacts
from ...engine.plan import Plan
from ...logs import get_logger
from ...plugins.installed import metadata_of
from ...settings.schema import Settings
from ...text import quote
from ..compat import FORMER_LAYERS, OF_FEW_MODELS, shared_table
from ..patcher import Patcher, WhyNot
from ..targets import installed_bindings, stock_form, targets
from .ir import ir_ops
from .lookups import import_object

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..engines import Engine

log = get_logger("engine")

DISPATCHED = "_vllm_fl_dispatched"
"""The attribute of a layer that stores the arguments of its `dispatch_forward` call."""

FORWARDS = ("forward_native", "forward_cpu", "forward_cuda", "forward_oot")

_one_at_a_time = threading.RLock()
"""vLLM has one set of tables of replacements, and one current configuration, per process."""


@dataclass(frozen=True)
class LayerClass:
    """A layer class of vLLM that runs an op, with the target for the class or its parent class."""

    base: type
    op: str
    target: LayerTarget

    @property
    def cls(self) -> str:
        return self.base.__name__

    @property
    def registered(self) -> str:
        return str(self.base.name)  # type: ignore[attr-defined]


def layer_table() -> list[LayerClass]:
    """Return the layer classes of this vLLM that we replace, each with its op. A class that few
    models have is included only if the process has imported it. Workers first import the model."""
    found: dict[type, LayerClass] = {}
    for op, target in targets(installed_bindings(), LayerTarget):
        module = target.path.rpartition(".")[0]
        if module.startswith(OF_FEW_MODELS) and module not in sys.modules:
            continue
        base = _found(target.path)
        inheriting = _inheriting(base) if base is not None and target.subclasses else ()
        for cls in (base, *inheriting):
            if cls is not None:
                found.setdefault(cls, LayerClass(cls, op, target))
    return [*found.values()]


def custom_op_of(cls: type) -> type | None:
    named_so = (base for base in cls.__mro__ if base.__name__ == "CustomOp")
    return next((base for base in named_so if base.__module__.startswith("vllm.")), None)


def _replacements(cls: type) -> dict[str, type]:
    """Return vLLM's table of replacements for a layer class, from the module of its `CustomOp`."""
    base = custom_op_of(cls)
    assert base is not None
    table: dict[str, type] = sys.modules[base.__module__].op_registry_oot
    return table


def _is_in_tree(layer: LayerClass) -> bool:
    return _replacements(layer.base) is custom_op_table()


@cache
def _found(path: str) -> type | None:
    """Return the `CustomOp` class at `path`, or None if this vLLM does not have it; logged once."""
    try:
        cls = import_object(path)
        if isinstance(cls, type) and custom_op_of(cls) is not None:
            return cls
        problem = "it is not a CustomOp of vLLM"
    except Exception as error:  # an older release, or a plugin's module that fails
        problem = quote(error)
    log.debug("The layer %s is not replaced: %s", path, problem)
    return None


def _inheriting(base: type) -> list[type]:
    found = [base]
    for cls in found:  # subclasses of subclasses are added during the loop
        subclasses: list[type] = cls.__subclasses__()
        for subclass in subclasses:
            own_forward = any(name.startswith("forward") for name in vars(subclass))
            if subclass.__module__.startswith("vllm.") and not own_forward:
                found.append(subclass)
    return found[1:]


def ours() -> Iterator[tuple[dict[str, type], str, type]]:
    """Yield (vLLM's table, class name, our class) for layers that no other plugin replaces."""
    for layer in layer_table():
        table = _replacements(layer.base)
        if layer.cls not in table:
            yield table, layer.cls, _over(layer, layer.base)


def taken_layers(plan: Plan) -> dict[str, type | None]:
    """Return the layer classes that replace other plugins' classes while the model is built: class
    name -> our class, or None for vLLM's class. If the other plugin precedes `stock` in the order,
    our class extends its class. Layers that the plan does not change are missing."""
    table = {layer.cls: layer for layer in layer_table() if _is_in_tree(layer)}
    found: dict[str, type | None] = {}
    for name, cls in _foreign().items():
        layer = table.get(name)
        entry = plan.entries.get(layer.op if layer else name)
        if entry is None or not entry.is_foreign or entry.note or name in plan.kept_layers:
            continue
        is_below = entry.fallback is FOREIGN
        if layer is not None and entry.impls:
            found[name] = _over(layer, cls if is_below else layer.base)
        elif not is_below:
            found[name] = None
    return found


@contextmanager
def in_tables(classes: Iterable[tuple[dict[Any, Any], Any, Any]]) -> Iterator[None]:
    """Inside the block, vLLM has these entries in its tables: (table, key, value or None for no
    entry). A value is usually a layer class that vLLM then builds. vLLM's tables exist once per
    process, but another engine may have a different plan. vLLM rejects a second class for a layer,
    so other plugins must be able to add classes outside the block."""
    with _one_at_a_time:
        put = [(table, name, table.pop(name, None), cls) for table, name, cls in [*classes]]
        for table, name, _, cls in put:
            if cls is not None:
                table[name] = cls
        try:
            yield
        finally:
            for table, name, before, cls in put:
                if table.get(name) is cls:
                    table.pop(name, None)
                    if before is not None:
                        table[name] = before


def _over(layer: LayerClass, base: type) -> type:
    """Return the subclass of `base`, from vLLM or another plugin, that is bound to the plan."""
    is_foreign, target = base is not layer.base, layer.target
    name = "Agnostic" * (not _is_in_tree(layer)) + f"{layer.cls}FL"
    name += f"Over{base.__name__}" * is_foreign
    held = globals().get(name)
    if isinstance(held, type) and held.__base__ is base:
        return held
    method = partial(
        dispatch_method,
        layer.op,
        target.grants,
        adapt=target.adapt,
        last=stock_form(layer.op, target.native),
        stand_in=target.stand_in,
        traces_own=layer.op in ir_ops(),
        vllms=layer.base if is_foreign else None,
    )
    made: type = type(
        name,
        (base,),
        {"__module__": __name__, "dispatch_forward": _dispatch_forward(base)}
        | {forward: method() for forward in _forwards(base)},
    )
    made.name = layer.registered  # type: ignore[attr-defined]  # as `custom_ops` uses it
    globals()[name] = made
    return made


def _forwards(cls: type) -> Iterator[str]:
    """Yield the forwards to bind, including `forward` if the class overrides it."""
    yield from (forward for forward in FORWARDS if hasattr(cls, forward))
    if cls.forward is not custom_op_of(cls).forward:  # type: ignore[attr-defined, union-attr]
        yield "forward"


def forget_shared_layers() -> None:
    """Clear vLLM's tables of shared layers, before the next model is built. vLLM shares rotary
    embeddings of the same sizes, and activations by name, within a process. A shared layer is bound
    to the plan that it was built for, so another engine must not get it. Existing models keep their
    layers. If this vLLM lacks a table, the ops of that table are not planned."""
    paths = (path for binding in installed_bindings().values() for path in binding.shared)
    for path in dict.fromkeys(paths):
        table = shared_table(path)
        if table is not None:
            table.clear()


def _dispatch_forward(base: type) -> Callable[..., Any]:
    """Return a `dispatch_forward` that binds every forward when vLLM builds a layer. Some models
    call `forward_native` by name in every step. It must not be resolved in each call, or while a
    compiler traces it."""

    def dispatch_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)[DISPATCHED] = args, kwargs
        for forward in _forwards(base):
            vars(self)[forward] = getattr(self, forward)
        return base.dispatch_forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    return dispatch_forward


def foreign_layers() -> dict[str, str]:
    return {name: owner_of(cls) for name, cls in _foreign().items()}


def foreign_ops() -> dict[str, dict[str, str]]:
    """Return op -> its entries of `foreign_layers`. The key of a layer without an op is
    the layer."""
    ops = {layer.cls: layer.op for layer in layer_table()}
    found: dict[str, dict[str, str]] = {}
    for name, owner in foreign_layers().items():
        found.setdefault(ops.get(name, name), {})[name] = owner
    return found


def oot_note(names: set[str], settings: Settings) -> str:
    if not settings.oot_enabled:
        return "VLLM_FL_OOT_ENABLED=0"
    if settings.oot_whitelist is not None:
        return "" if names & set(settings.oot_whitelist) else "oot_whitelist does not list it"
    named = sorted(names & set(settings.oot_blacklist))
    return f"oot_blacklist lists {named[0]}" if named else ""


class Layers(Patcher):
    kind = LayerTarget

    def ops(self) -> set[str]:
        return {layer.op for layer in layer_table()}

    def layer_names(self) -> frozenset[str]:
        from vllm.model_executor.custom_op import op_registry

        ours = {name for layer in layer_table() for name in (layer.cls, layer.registered)}
        classes = {cls.__name__ for cls in op_registry.values()}
        return frozenset({*op_registry, *classes, *ours, *FORMER_LAYERS})

    def request(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"foreign": foreign_ops()}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        """Return the settings that exclude layers. In compiled mode an IR op has no layers, so a
        setting for one layer excludes the whole op."""
        notes: dict[str, str] = {}
        kept: list[str] = []
        in_ir = ir_ops() if facts.mode == "compiled" else {}
        by_op: dict[str, dict[str, str]] = {}
        for layer in layer_table():
            why = oot_note({layer.cls, layer.registered}, facts.settings)
            if not why and layer.op not in in_ir:
                why = facts.custom_op_note(layer.registered)
            by_op.setdefault(layer.op, {})[f"{layer.base.__module__}.{layer.cls}"] = why
        for op, whys in by_op.items():
            left = [path for path, why in whys.items() if why]
            of_all = left and op in in_ir and not facts.settings.oot_whitelist
            if len(left) == len(whys) or of_all:
                notes[op] = whys[left[0]]
            elif op not in in_ir:
                kept += [path.rpartition(".")[2] for path in left]
        return WhyNot(ops=notes, layers=kept)

    def configure(
        self, plan: Plan, vllm_config: VllmConfig, entry: MutableMapping[str, Any]
    ) -> Sequence[str]:
        enabled = (layer for layer in layer_table() if layer.target.enabled)
        return [layer.registered for layer in enabled if not plan.is_stock(layer.op)]

    def contents(self, plan: Plan) -> dict[str, Any]:
        """Return the layer classes of other plugins that run, even under ours, and their code."""
        taken = taken_layers(plan)
        code = {
            name: [owner_of(cls), code_hash(None, cls.__module__)]
            for name, cls in _foreign().items()
            if issubclass(taken.get(name, cls) or object, cls)
        }
        return {"foreign": code}

    @contextmanager
    def building(self, engine: Engine) -> Iterator[None]:
        forget_shared_layers()
        plan, table = engine.plan, custom_op_table()
        taken = [(table, name, cls) for name, cls in taken_layers(plan).items()]
        has_ops = not all(map(plan.is_stock, plan.entries))
        with in_tables([*(ours() if has_ops else ()), *taken]):
            yield

    def bind(self, engine: Engine, model: torch.nn.Module) -> None:
        from vllm.config.vllm import set_current_vllm_config

        with set_current_vllm_config(engine.config):
            layer: Any
            for layer in model.modules():
                held = vars(layer)
                if DISPATCHED not in held:
                    continue
                held[PLAN_ATTRIBUTE] = engine.plan
                for forward in (*FORWARDS, "forward"):
                    held.pop(forward, None)
                args, kwargs = held[DISPATCHED]
                held["_forward_method"] = layer.dispatch_forward(*args, **kwargs)


def custom_op_table() -> dict[str, Any]:
    from vllm.model_executor import custom_op

    table: dict[str, Any] = custom_op.op_registry_oot
    return table


def _foreign() -> dict[str, type]:
    return {name: cls for name, cls in custom_op_table().items() if cls.__module__ != __name__}


@cache
def owner_of(cls: type) -> str:
    """Return the path of a class, with the distributions of its top-level package if known."""
    from importlib_metadata import distribution, packages_distributions

    path = f"{cls.__module__}.{cls.__qualname__}"
    try:
        names = packages_distributions().get(cls.__module__.partition(".")[0], [])
        owners = [metadata_of(distribution(name)) for name in dict.fromkeys(names)]
    except Exception:  # the metadata of a distribution may be incomplete
        return path
    named = " and ".join(f"{name} {version}" for name, version, _ in owners)
    return f"{path} of {named}" if named else path
