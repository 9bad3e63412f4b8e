"""Verification on the tensors of the loaded model: at startup, with the KV cache, after updates."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm_fl.contracts import OpSpec
from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.patchers.classes import class_of
from vllm_fl.integration.patchers.layers import LayerClass, layer_table
from vllm_fl.integration.ranks import Disabled
from vllm_fl.integration.settling import disable_built
from vllm_fl.integration.targets import installed_bindings
from vllm_fl.logs import get_logger
from vllm_fl.plugins.inspection import FAILED, REFUSES, REJECTED, Key, Moment, Objection
from vllm_fl.plugins.types import ATTENTION, AttentionImpl, BackendImplKind, OpImpl
from vllm_fl.text import quote

from . import probe
from .budget import Valve
from .determinism import VARIANT, variance
from .live import Live
from .made_inputs import checks_of
from .preflight import host_threads
from .trials import Role, release

log = get_logger("engine")


@dataclass(frozen=True)
class Ran:
    """Observations of a rank while it ran its part of the loaded model.

    Args:
        refused: (op, impl id) -> why it supports no call, although it is their first candidate.
        served: (op, impl id) of implementations that computed a call.
        reached: ops that were called.
        possible: ops that the engine may call although this run did not.
    """

    refused: dict[tuple[str, str], str]
    served: frozenset[tuple[str, str]]
    reached: frozenset[str]
    possible: frozenset[str]


def compare_loaded(engine: Engine) -> dict[Key, Objection]:
    """Compare the plan in the loaded model, and restore its calls and memory."""
    checks, began = checks_of(engine), time.monotonic()
    counts = checks.live_counts
    if not counts or engine.joins:
        return {}
    while True:
        live, not_run = _seen_live(engine, counts, checks.valve)
        mine = bool(live.objections), None if not_run else _ran(live)
        found = engine.gather("run the loaded model", mine)
        if any(has_objections for has_objections, _ in found):
            return dict(live.objections)
        runs = [ran for _, ran in found if ran is not None]
        refused = _refused(runs) if len(runs) == len(found) else {}
        further = _further_counts(engine, refused) - counts
        if not further:
            break
        # They may support other sizes: those in the tuning table, or the largest batch.
        counts |= further
    if refused:
        return {
            key: Objection(REJECTED, f"{REFUSES} ({why})", ends_strict=False)
            for key, why in live.refused.items()
            if key in refused
        }
    checks.seen = engine.plan
    release(engine.device)
    remarks = engine.remarks[Moment.LOADED]
    if not_run:
        remarks.append(f"not verified on live tensors: {not_run}")
        return {}
    called = frozenset[str]().union(*(ran.reached for ran in runs))
    engine.unused |= _not_called(engine.plan, runs) if len(runs) == len(found) else {}
    for op in called.intersection(engine.unused):
        del engine.unused[op]
    table = installed_bindings()
    for op, entry in engine.plan.entries.items():
        known = op in live.reached or op in engine.unused
        of_op = table[op].targets if op in table else ()
        is_clear = any(target.reaches_compiler and target.seen_live for target in of_op)
        if entry.impls and not known and not is_clear:
            live.left_out.setdefault(op, "not called")
    remarks.append(_compared(engine, live, began))
    return {}


def measure_stock(engine: Engine) -> None:
    """If required, report vLLM's layers that are not batch-invariant. They are used nevertheless.
    The layers are called uncompiled. Layers with different parameters than the contract are
    omitted."""
    required, plan = engine.facts.wants_invariance, engine.plan
    modules = [each for model in engine.models.values() for each in model.modules()]
    for layer in layer_table() if required else ():
        own = [each for each in modules if type(each) is layer.base]
        if not own or layer.target.adapt is not None or not plan.is_stock(layer.op):
            continue
        kind = BackendImplKind.REFERENCE
        role = Role(OpImpl(layer.op, "stock.vllm", kind, lambda self, *args: self(*args)))
        request = checks_of(engine).request(plan, [role])
        request = replace(request, layer_for=partial(_fitting, layer, own))
        with request.valve.verifying(), request.trials() as trials:
            why = variance(request, role, trials[role.calls])
        if why.startswith(VARIANT):
            found = f"{layer.op}: vLLM's layers are {why}"
            engine.remarks[Moment.LOADED].append(found)
            if engine.rank == 0:
                log.warning("%s is set, but %s", required, found)


def _fitting(
    layer: LayerClass, modules: Iterable[torch.nn.Module], spec: OpSpec, provided: Mapping[str, Any]
) -> torch.nn.Module:
    """Return the first layer that provides tensors of these shapes and dtypes. Without such a
    layer, raises NotImplementedError, and the call is skipped."""
    for module in modules:
        held = layer.target.stand_in(module) if layer.target.stand_in else module
        if all(_kind(spec.from_layer[n](held)) == _kind(value) for n, value in provided.items()):
            return module
    raise NotImplementedError("the model has no such layer")


def _kind(value: Any) -> object:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def compare_with_cache(engine: Engine) -> dict[Key, Objection]:
    """Compare the plan again after vLLM has allocated its KV cache, because less memory is free."""
    checks, began = checks_of(engine), time.monotonic()
    if not checks.live_counts or engine.joins:
        return {}
    is_seen = checks.seen is engine.plan
    counts = frozenset((max(checks.live_counts),)) if is_seen else checks.live_counts
    live, not_run = _seen_again(engine, counts, checks.valve)
    beside = "with the KV cache in memory"
    if not live.objections:
        remark = f"not verified on live tensors {beside}: {not_run}"
        remark = remark if not_run else _compared(engine, live, began, f" {beside},")
        engine.remarks[Moment.CACHED].append(remark)
    found = live.objections.items()
    return {key: replace(each, reason=f"{each.reason} ({beside})") for key, each in found}


def compare_attention(engine: Engine) -> None:
    """Compare the attention layers that backends of plugins compute, on the allocated KV cache.

    A backend that can disable its kernels does so on all ranks if it is incorrect or raises on any
    rank, except in strict mode. Its layers are then compared again. The engine gets another digest,
    which a lock file refuses.

    Raises:
        StartError: another backend is incorrect. It cannot be replaced, because the layers are
            built with it.
    """
    facts, planned = engine.facts, engine.plan.entries[ATTENTION].classes(AttentionImpl)
    if not facts.settings.compares or engine.joins or not planned:
        return
    from .stock.attention import compared_attention, path_of

    checks = checks_of(engine)
    began, no_problem = time.monotonic(), lambda *_: ""
    named = ((class_of(i, ATTENTION, facts.attention, no_problem)[1], i) for i in planned)
    impls = {path_of(cls): impl for cls, impl in named if cls is not None}
    with engine.active(), engine.plan.record.aside(), host_threads(engine.device):
        rows = compared_attention(engine.runner, checks.seed, planned=impls, few=checks.is_kept)
    release(engine.device)
    for rank, each in enumerate(engine.gather("compare attention on the KV cache", rows)):
        for row in each:
            impl = impls.get(row.backend, planned[0])
            key = ATTENTION, impl.impl_id
            disable = None if engine.plan.strict or key in engine.disabled else impl.disable
            if row.is_incorrect or (row.raised and disable):
                why = Disabled(FAILED, rank, row.reason)
                checks.verdicts.refute({key: Objection(FAILED, why.reason)})
                disable_built(engine, key, why, disable)
                return compare_attention(engine)
    text = f"{sum(row.cases for row in rows)} calls of attention on the KV cache"
    text += f" in {time.monotonic() - began:.1f} s"
    left = ", ".join(row.reason for row in rows if row.reason)
    engine.remarks[Moment.CACHED].append(text + (left and f"; not compared: {left}"))


def compare_again(engine: Engine) -> dict[Key, Objection]:
    """Compare the plan once while the engine serves, without disturbing its requests. No cache is
    written, and no call is counted."""
    checks, remarks = checks_of(engine), engine.remarks[Moment.UPDATED]
    if not checks.live_counts:
        remarks += checks.unseen(engine.plan)
        return {}
    obstacles = engine.gather("report whether the model can run", _obstacle(engine))
    stopped = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(obstacles) if why)
    if stopped:
        remarks.append(f"nothing was verified: {stopped}")
        return {}
    began = time.monotonic()
    live, not_run = _seen_again(engine, frozenset((max(checks.live_counts),)), Valve())
    remarks += [f"nothing was verified: {not_run}" if not_run else _compared(engine, live, began)]
    return dict(live.objections)


def _compared(engine: Engine, live: Live, began: float, where: str = "") -> str:
    """Summarise a comparison in one line. `began` is its start by `time.monotonic`. `where` is text
    between the number of calls and the seconds."""
    seconds = f"{time.monotonic() - began:.1f} s"
    found = f"{live.compared} calls on live tensors{where} in {seconds}"
    drafting = engine.config.speculative_config if live.drafted else None
    found += f", {live.drafted} of them in the draft model" if drafting else ""
    if drafting and (config := drafting.draft_model_config):
        found += f" (hidden size {config.get_hidden_size()}, head size {config.get_head_size()})"
    if live.skipped:
        found += f", {live.skipped} others skipped for NaN, infinite or huge inputs"
    left = ", ".join(f"{op} ({why})" for op, why in sorted(live.left_out.items()))
    return found + (left and f"; not compared: {left}")


def _seen_again(engine: Engine, counts: frozenset[int], valve: Valve) -> tuple[Live, str]:
    """Run a model briefly again, with paused counters. Return `Live`, and why the model did not
    run."""
    with engine.plan.record.aside():
        found = _seen_live(engine, counts, valve, again=True)
    device = engine.device
    if device.type != "cpu":  # vLLM has sized its KV cache, so cached memory must be freed
        torch.get_device_module(device).empty_cache()
    return found


def _seen_live(
    engine: Engine, counts: frozenset[int], valve: Valve, *, again: bool = False
) -> tuple[Live, str]:
    """Run forwards with these token counts. Return `Live`, and why the model did not run,
    or empty."""
    owners, models = get_default_manager().registry.snapshot().owners, engine.models
    live = Live(engine.plan, models, engine.device, owners, again, valve)
    if "" not in models:
        return live, "the worker does not expose its model"
    try:
        with engine.active(), live.watching(), host_threads(engine.device):
            for tokens in sorted(counts, reverse=True):
                not_run = probe.forward(engine.runner, models, engine.config, tokens)
                if not_run:
                    return live, not_run
    except Exception as error:  # vLLM's dummy run does not support every model
        log.warning("No verification on live tensors: the forward pass failed", exc_info=True)
        return live, f"the forward pass failed: {quote(error)}"
    return live, ""


def _ran(live: Live) -> Ran:
    """Return what a rank observed in completed runs of its part of the model."""
    table = installed_bindings()
    possible = {
        op
        for op in live.plan.entries
        if (binding := table.get(op)) is None
        or binding.between_graphs  # attention and its replacements do not run
        or not all(target.seen_live for target in binding.targets)
        or _has_more_than_ran(live, op)
    }
    return Ran(live.refused, frozenset(live.served), frozenset(live.reached), frozenset(possible))


def _has_more_than_ran(live: Live, op: str) -> bool:
    """Whether the op has layers in parts of the model that do not run, such as encoders."""
    bases = tuple(layer.base for layer in layer_table() if layer.op == op)
    return any(
        isinstance(module, bases) and prefix + name.rpartition(".")[0] not in live.entered
        for prefix, model in live.models.items()
        for name, module in model.named_modules()
    )


def _refused(runs: Sequence[Ran]) -> dict[Key, str]:
    """Return implementations that support no call of the loaded model on any rank, with a reason.
    In a pipeline, an implementation may support calls of other ranks only."""
    served = frozenset[Key]().union(*(ran.served for ran in runs))
    return {
        key: why for ran in reversed(runs) for key, why in ran.refused.items() if key not in served
    }


def _not_called(plan: Plan, runs: Sequence[Ran]) -> dict[str, str]:
    """Return op -> reason, for ops that no rank called in its runs."""
    known = frozenset[str]().union(*(ran.reached | ran.possible for ran in runs))
    why = "a run of the model did not call it"
    return {op: why for op in plan.entries if op not in known and not plan.is_stock(op)}


def _further_counts(engine: Engine, refused: Iterable[tuple[str, str]]) -> frozenset[int]:
    """Return further token counts that the implementations in `refused` may support."""
    sizes = engine.facts.sizes
    if sizes is None or not refused:
        return frozenset()
    largest = sizes.tokens[-1]
    ceilings = (n for op, _ in refused for n in engine.plan.entries[op].ceilings)
    return frozenset((largest, *(n for n in ceilings if n < largest)))


def _obstacle(engine: Engine) -> str:
    runner = engine.runner
    run = getattr(type(runner), "_dummy_run", None)
    if run is not None and not run.__module__.startswith("vllm."):
        name = type(runner).__name__
        return f"the dummy run of {name} is not vLLM's, and may write to the KV cache"
    if getattr(runner, "execute_model_state", None) is not None:
        return "a step is still running"
    if engine.config.lora_config is not None and engine.worker.list_loras():
        return "LoRA adapters are loaded, which vLLM's dummy run would drop"
    return ""
