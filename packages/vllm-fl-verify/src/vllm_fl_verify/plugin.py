"""The verification plugin: hooks that object to incorrect implementations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from vllm_fl.hookspecs import hookimpl
from vllm_fl.plugins.inspection import Check, GroupFacts, Key, Moment, Objection
from vllm_fl.plugins.types import ATTENTION, AttentionImpl

VERIFIES = True


@hookimpl
def inspect_plan(engine: Any, moment: Moment) -> Mapping[Key, Objection] | None:
    if moment is Moment.GROUPED or engine.facts.settings.preflight == "off":
        return None
    from . import loaded, made_inputs
    from .trials import without_old_objects

    compare = {
        Moment.PLANNED: made_inputs.compare_on_made_inputs,
        Moment.LOADED: loaded.compare_loaded,
        Moment.CACHED: loaded.compare_with_cache,
        Moment.UPDATED: loaded.compare_again,
    }[moment]
    with without_old_objects():
        if moment is Moment.CACHED:
            loaded.compare_attention(engine)
        found = {**compare(engine), **_quantised(engine, moment)}
        if found and moment is not Moment.PLANNED:
            made_inputs.checks_of(engine).verdicts.refute(found)
        if moment is Moment.LOADED and engine.facts.settings.compares and not found:
            loaded.measure_stock(engine)
        return found


def _quantised(engine: Any, moment: Moment) -> Mapping[Key, Objection]:
    """Compare the planned classes of quantised layers, if there are any."""
    if not _plans_kernels(engine):
        return {}
    from . import quantised

    if moment is Moment.PLANNED:
        return quantised.compare_on_made_weights(engine)
    return quantised.compare_layers_of_plan(engine, moment)


def _plans_kernels(engine: Any) -> bool:
    """Whether classes of quantised layers are planned and to be compared."""
    from vllm_fl.integration.patchers.linear_kernels import planned_kernels

    return bool(engine.facts.settings.compares and planned_kernels(engine.plan))


@hookimpl
def communicator_checks(engine: Any, communicator: Any, group: GroupFacts) -> Iterator[Check]:
    if engine.facts.settings.preflight != "off":
        from .collectives import steps

        for what, run in steps(communicator, group.rank, group.size, group.device, group.dtype):
            yield Check(what, run)


@hookimpl
def rejections(op: str, impls: Sequence[Any], facts: Any, contract: Any) -> Mapping[str, str]:
    from .determinism import unmeasured

    return unmeasured(facts, impls, contract)


@hookimpl
def engine_session(engine: Any) -> AbstractContextManager[object]:
    settings, sessions = engine.facts.settings, ExitStack()
    building = sessions.enter_context(ExitStack())
    engine.on_serving(building.close)
    if settings.compares and engine.plan.entries[ATTENTION].classes(AttentionImpl):
        from .stock.attention import recording

        building.enter_context(recording())
    if _plans_kernels(engine):
        from .quantised import watching_layers

        building.enter_context(watching_layers(engine))
    if settings.shadow is not None:
        from .sampling import start_sampling

        engine.on_serving(partial(start_sampling, engine))  # the warm-up also runs steps
    return sessions


@hookimpl
def worker_report(engine: Any) -> Mapping[str, object]:
    from .made_inputs import Checks
    from .sampling import Canary

    checks, canary = engine.state.get(Checks), engine.state.get(Canary)
    return {
        "seed": checks.seed if checks else None,
        "smaller": dict(checks.smaller) if checks else {},
        "shadow": canary.shadow.report() if canary else None,
    }
