"""Show and choose the classes that compute quantised linear layers and experts.

vLLM has a list of classes for each quantisation scheme, and takes the first that supports a layer
when it creates the layer's weights. While the model is built, the planned classes precede vLLM's
classes in this list. The loaded model shows the class of each layer.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ...dispatch import get_default_manager
from ...dispatch.resolver import STOCK, vllms_kernel
from ...engine.facts import EngineFacts, KernelUse
from ...engine.plan import Plan
from ...errors import NO_FALLBACK, StartError, TargetError
from ...logs import get_logger
from ...plugins.inspection import Moment
from ...plugins.types import KERNEL_OPS, VLLM_IDS, KernelImpl
from ...text import closest
from ..compat import vllm_version
from ..patcher import Patcher, WhyNot
from . import classes
from .expert_kernels import CLOSED, choosing_experts
from .kernel_classes import (
    LINEAR_KERNELS,
    SCHEMES,
    is_mixture,
    kernel_row,
    known_classes,
    listed_classes,
    refusal_of,
    table_of,
    uses_of,
)
from .layers import in_tables

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from ..engines import Engine

log = get_logger("engine")


def kernel_class(op: str, impl: KernelImpl) -> tuple[Any, str]:
    """Return (the class or None, why it cannot be used or empty)."""
    known = {cls.__name__: cls for cls in known_classes(op)}
    if impl.impl_id.startswith(VLLM_IDS):
        name = impl.impl_id.removeprefix(VLLM_IDS)
        problem = f"vLLM {vllm_version()} has no class {name!r} for {op}.{closest(name, known)}"
        return (known[name], "") if name in known else (None, problem.rstrip("."))

    if op in CLOSED:
        return None, f"vLLM accepts only its own classes for {op}"

    def problem_of(path: str, cls: Any) -> str:
        bases: dict[str, type] = vars(import_module(LINEAR_KERNELS)) if op in SCHEMES else known
        names = SCHEMES[op].bases if op in SCHEMES else sorted(known)
        own = tuple(bases[name] for name in names if name in bases)
        if isinstance(cls, type) and issubclass(cls, own):
            return ""
        return f"{path} is not a subclass of vLLM's {' or '.join(names)}"

    return classes.class_of(impl, op, None, problem_of)[1:]


def planned_kernels(plan: Plan) -> dict[str, tuple[KernelImpl, ...]]:
    """Return op -> the planned classes before `stock`, if there are any."""
    ops = plan.entries.keys() & KERNEL_OPS
    found = {op: plan.entries[op].classes(KernelImpl) for op in ops}
    return {op: impls for op, impls in sorted(found.items()) if impls}


def planned_classes(plan: Plan) -> dict[tuple[str, Any], str]:
    """Return (op, planned class) -> impl id."""
    return {
        (op, kernel_class(op, impl)[0]): impl.impl_id
        for op, impls in planned_kernels(plan).items()
        for impl in impls
    }


def _candidates(op: str, facts: EngineFacts) -> Iterator[KernelImpl]:
    """Yield the available classes before `stock` in the order of an op."""
    order = facts.settings.policy.order(op, facts.mode, engine=True)
    before = [*takewhile(lambda selector: selector.kind != STOCK.selector, order)]
    named = (vllms_kernel(op, each.name) for each in before if each.is_vllms and each.name)
    installed = get_default_manager().registry.snapshot().impls_by_op.get(op, ())
    for impl in (*installed, *named):
        if any(each.matches(impl) for each in before) and impl.is_available():
            assert isinstance(impl, KernelImpl)
            yield impl


class LinearKernels(Patcher):
    def request(self, vllm_config: VllmConfig, /, *_: Any, compiled: bool) -> dict[str, Any]:
        """Return op -> the argument of vLLM that determines the class."""
        if getattr(getattr(vllm_config, "load_config", None), "load_format", "") == "ipc_cache":
            note = "the weight cache of vLLM has weights that vLLM's class has converted"
            return {"linear_notes": dict.fromkeys(KERNEL_OPS, note)}
        found = {op: _backends(vllm_config, op) for op in KERNEL_OPS}
        notes = {op: f"{_flag(op)} is {' or '.join(own)}" for op, own in found.items() if own}
        return {"linear_notes": notes}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        """Return the user's arguments of vLLM, and why classes support no layer of the model."""
        refused: dict[tuple[str, str], str] = {}
        for op in (facts.kernels.keys() & KERNEL_OPS) - facts.linear_notes.keys():
            for impl in _candidates(op, facts):
                cls, problem = kernel_class(op, impl)
                configs = [c for use in facts.kernels[op] for c in use.configs.values()]
                whys = [refusal_of(cls, config) for config in configs if not problem]
                if whys and all(whys):
                    refused[op, impl.impl_id] = f"does not support this model: {whys[0]}"
                elif problem and impl.impl_id.startswith(VLLM_IDS):
                    refused[op, impl.impl_id] = problem
        return WhyNot(facts.linear_notes, refused)

    def faults(self, plan: Plan, facts: EngineFacts) -> dict[tuple[str, str], str]:
        return {
            (op, impl.impl_id): problem
            for op, impls in planned_kernels(plan).items()
            for impl in impls
            if (problem := kernel_class(op, impl)[1])
        }

    def choose(self, engine: Engine) -> dict[str, Any]:
        """Return op -> vLLM's class -> number of layers on a single rank."""
        uses = {
            op: {use.name: use.count for use in uses}
            for op, uses in sorted(engine.facts.kernels.items())
        }
        return {"linear_kernels": uses} if uses else {}

    def building(self, engine: Engine) -> AbstractContextManager[None]:
        """Put the planned classes first in vLLM's lists, if a model may be quantised."""
        planned = planned_kernels(engine.plan)
        engine.state[_ids] = _ids(engine.plan)
        if engine.config.quant_config is None and engine.config.speculative_config is None:
            return nullcontext()
        return first_in_lists(
            {op: [kernel_class(op, impl)[0] for impl in impls] for op, impls in planned.items()}
        )

    def bind(self, engine: Engine, model: torch.nn.Module) -> None:
        """Raise a StartError if the model is in use with a class that is disabled."""
        if engine.is_loaded and self.stale(engine):
            raise StartError(
                "the class of quantised layers cannot be replaced after the model is loaded"
            )

    def stale(self, engine: Engine) -> bool:
        return bool(engine.state[_ids] != _ids(engine.plan))

    def loaded(self, engine: Engine) -> None:
        """Count the layers of each class. Warn of layers that have another class than the plan or
        vLLM's arguments select. In strict mode, a layer without its planned class raises a
        TargetError."""
        plan, facts = engine.plan, engine.facts
        uses, planned = uses_of(engine.models.values()), planned_kernels(plan)
        ids = planned_classes(plan)
        rows = [kernel_row(use, ids.get((use.op, use.cls), STOCK.impl_id)) for use in uses]
        engine.state[LinearKernels] = rows
        lines = [*_not_followed(engine.config, uses), *_experts_not_followed(engine)]
        lines += [
            f"Op '{op}': '{impl_id}' is not used: {why}"
            for (op, impl_id), why in self.why_not(facts.ordered).impls.items()
            if impl_id.startswith(VLLM_IDS)  # only an order has such ids
        ]
        for use, row in zip(uses, rows, strict=True):
            first = next(iter(planned.get(use.op, ())), None)
            if first is None:
                continue
            if row["impl"] == first.impl_id:
                text = "Op '%s': %d layers by '%s' (%s)"
                args = use.op, row["layers"], first.impl_id, use.name
                log.log(logging.DEBUG if engine.rank else logging.INFO, text, *args)
                continue
            cls = kernel_class(use.op, first)[0]
            why = next(filter(None, (refusal_of(cls, c) for c in use.configs.values())), "")
            lines.append(
                f"Op '{use.op}': '{first.impl_id}' does not compute {use.count} layers, such as "
                f"{use.example}, which use {use.name}: {why or 'vLLM did not choose it'}"
            )
            if plan.strict:
                raise TargetError(f"{lines[-1]}. {NO_FALLBACK}", op=use.op, impl=first.impl_id)
            plan.fallbacks[use.op, row["impl"]] += use.count
        engine.remarks[Moment.LOADED] += lines
        for line in lines if engine.rank == 0 else ():
            log.warning("%s [FL413]", line)

    def report(self, engine: Engine) -> dict[str, Any]:
        return {"kernels": kernel_rows(engine)}


def kernel_rows(engine: Engine) -> list[dict[str, Any]]:
    """Return the classes of the loaded model, with `kernel_row` of each."""
    found: list[dict[str, Any]] = engine.state.get(LinearKernels, [])
    return found


def _ids(plan: Plan) -> dict[str, list[str]]:
    return {op: [impl.impl_id for impl in impls] for op, impls in planned_kernels(plan).items()}


def _flag(op: str) -> str:
    return "--linear-backend" if op in SCHEMES else "--moe-backend"


def _backends(vllm_config: Any, op: str) -> list[str]:
    """Return the backends that the user has set in vLLM for an op."""
    kernel_config = getattr(vllm_config, "kernel_config", None)
    if op not in SCHEMES:
        return sorted({getattr(kernel_config, "moe_backend", "auto")} - {"auto"})
    backend = getattr(kernel_config, "linear_backend", "auto")
    by_scheme = getattr(kernel_config, "linear_backend_per_quant", None) or {}
    return sorted({by_scheme.get(name) or backend for name in SCHEMES[op].flags} - {"auto"})


def first_in_lists(planned: Mapping[str, list[Any]]) -> AbstractContextManager[None]:
    """Inside the block, classes precede the others of vLLM's lists: op -> classes."""
    in_lists = {op: ours for op, ours in planned.items() if op in SCHEMES}
    return in_tables((*_lists(in_lists), *choosing_experts(planned)))


def _lists(planned: Mapping[str, list[Any]]) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    if not planned:
        return
    from vllm.platforms import current_platform

    for op, ours in planned.items():
        others = (cls for cls in listed_classes(op) if cls not in ours)
        yield table_of(op), current_platform._enum, [*ours, *others]
    names = vars(import_module(LINEAR_KERNELS))
    if reorder := names.get("prioritize_humming"):  # from 0.32 on, after the list is read
        chosen = {cls for ours in planned.values() for cls in ours}

        def ours_first(kernels: list[type], *args: Any, **named: Any) -> list[type]:
            first = [*takewhile(chosen.__contains__, kernels)]
            return [*first, *(c for c in reorder(kernels, *args, **named) if c not in first)]

        yield names, "prioritize_humming", ours_first


def _not_followed(vllm_config: Any, uses: Iterable[KernelUse]) -> Iterator[str]:
    """Yield a sentence for layers without a class of the backend that the user set in vLLM."""
    for use in (use for use in uses if use.op in SCHEMES):
        names = _backends(vllm_config, use.op)
        table = vars(import_module(LINEAR_KERNELS)).get("_LINEAR_BACKEND_KERNEL_MAP", {})
        if names and all(name in table and use.cls not in table[name] for name in names):
            yield (
                f"--linear-backend is {' or '.join(names)}, but vLLM uses {use.name} for "
                f"{use.count} layers of {use.op}, such as {use.example}"
            )


def _experts_not_followed(engine: Engine) -> Iterator[str]:
    """Yield a sentence for experts without the backend that the user set in vLLM."""
    backend = getattr(getattr(engine.config, "kernel_config", None), "moe_backend", "auto")
    found: Counter[str] = Counter()
    for model in engine.models.values() if backend != "auto" else ():
        for layer in filter(is_mixture, model.modules()):
            for value in vars(getattr(layer, "quant_method", None) or object).values():
                is_other = isinstance(value, enum.Enum) and "MoeBackend" in type(value).__name__
                if is_other and backend.upper() not in value.name:
                    found[value.name] += 1
    for name, count in found.items():
        yield f"--moe-backend is {backend}, but vLLM uses {name} for {count} layers of experts"
