"""Settle all ranks on one plan and bind to it. Only this module disables implementations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..dispatch import get_default_manager
from ..engine.digest import digest, fingerprint
from ..engine.plan import Plan, release_number, take_number
from ..errors import StartError, VllmFLError
from ..logs import get_logger
from ..plugins.calling import asking, objections
from ..plugins.inspection import FAILED, LACKED, REJECTED, Key, Moment, Objection
from ..text import quote
from . import patching
from .carried import seal
from .engines import Engine
from .planning import apply, plan_for
from .ranks import Disabled, Opinion, check_verifiers, plan_differences, united
from .targets import planned_for_nothing

log = get_logger("engine")


def settle(engine: Engine, moment: Moment) -> dict[Key, str]:
    """Gather objections and disable these implementations on all ranks, until no rank has a new
    objection. Patchers and plugins are called first; verifiers only if no rank has objected.

    Returns:
        At UPDATED, when nothing can be disabled: (op, impl id) -> why it is incorrect, with the
            rank. The result is empty at other moments.

    Raises:
        StartError: a rank has failed (with `failures`), or there is an objection in strict mode or
            to an implementation in compiled code.
        VllmFLError: an error of vllm-fl on this rank.
    """
    # A change is made in the next round inside `_together`, which sends its error to the other
    # ranks. From LOADED on, `_disable` also settles PLANNED again.
    next_change: Callable[[], object] | None = None
    while True:
        engine.remarks[moment] = []
        plans = _together(engine, moment, partial(_opinion, engine, moment, next_change))
        check_verifiers(plans)
        new = united(plans, engine.disabled)
        if not new and moment is Moment.PLANNED and _drops_table(engine, plans):
            next_change = partial(set_plan, engine)
            continue
        if not new:
            found = _together(
                engine, moment, lambda: Opinion(collect_objections(engine, moment, verifies=True))
            )
            new = united(found, engine.disabled)
        if new and moment is Moment.UPDATED:
            return {key: f"{each.why} (found on rank {each.rank})" for key, each in new.items()}
        if not new:
            if engine.rank == 0:
                _say_what_differs(engine, moment, plans)
            return {}
        _end_for(engine, moment, new)
        next_change = partial(_disable, engine, moment, new)


def _say_what_differs(engine: Engine, moment: Moment, opinions: list[Opinion]) -> None:
    table = engine.facts.settings.tuned
    if moment is Moment.PLANNED and table is not None and table.unused:
        log.warning("%s. Continuing without a table [FL610]", table.reason)
    for line in plan_differences(opinions):
        log.warning("The ranks differ. %s [FL503]", line)


def choices(plan: Plan) -> dict[Key, Any]:
    """Return (op, impl id) -> the choices that a planned implementation made by timing,
    JSON-able."""
    found: dict[Key, Any] = {}
    for impl in (impl for entry in plan.entries.values() for impl in entry.impls):
        if impl.choices is not None:
            try:
                chosen = json.loads(json.dumps(impl.choices()))
            except Exception as error:  # the choices are only reported
                chosen = f"choices() raised {quote(error)}"
            found[impl.op_name, impl.impl_id] = chosen
    return found


def set_plan(engine: Engine) -> None:
    registry, facts = get_default_manager().registry, engine.facts
    snapshot = registry.snapshot()
    disabled = {key: each.reason for key, each in engine.disabled.items()}
    engine.plan = plan_for(facts, disabled)
    unused = {**engine.unused, **planned_for_nothing(engine.plan, facts)}
    entries = engine.plan.entries
    engine.unused = {
        op: why for op, why in unused.items() if op in entries and entries[op].is_planned
    }
    for (op, impl_id), each in engine.disabled.items():
        if each.code != REJECTED:
            engine.plan.record.demote(op, impl_id, each.reason)
    consists = fingerprint(
        engine.plan,
        snapshot.owners,
        snapshot.authors,
        required="batch_invariant" if facts.wants_invariance else "",
        settings=facts.settings,
        plugins=registry.plugins,
    )
    contents = patching.merged(lambda each: each.contents(engine.plan))
    engine.contents = {**consists, "workers": engine.worker_facts, **contents}


def bind(engine: Engine) -> None:
    """Seal the plan, and change vLLM's configuration and code for it until it is unbound."""
    config, contents = engine.config, engine.contents
    engine.on_unbind(get_default_manager().seal(f"the engine's worker (rank {engine.rank})"))
    plan = engine.plan = take_number(engine.plan)
    engine.on_unbind(release_number, plan)
    if plan.number > 1:  # the operators of this plan have different names in compiled code
        contents = {**contents, "place": plan.number}
    chosen = patching.merged(lambda each: each.choose(engine))
    engine.digest = digest({**contents, **chosen})
    apply(plan, config)
    engine.on_unbind(seal(config, engine.digest))
    engine.begin(config)
    for patcher in patching.PATCHERS:
        patcher.apply(engine)


def stock_setting(keys: Iterable[Key]) -> str:
    """Return the setting that selects vLLM's implementation for the ops of these keys."""
    stock = ";".join(f"{op}=stock" for op in dict.fromkeys(op for op, _ in keys))
    return f"VLLM_FL_PER_OP='{stock}'"


def disable_built(
    engine: Engine, key: Key, why: Disabled, disable: Callable[[list[Any]], None] | None
) -> None:
    """Disable an implementation that built layers keep, by its own function. All ranks must call
    it. The plan still names the implementation, so the engine gets another digest. Without a
    function, raises StartError."""
    if disable is None:
        faults = (f"rank {why.rank}: {_fault(key, why)}",)
        raise _start_error({key: why}, "", ". The layers are built with it", failures=faults)
    _note_disabled(engine, {key: why})
    engine.plan.record.demote(*key, why.reason)
    engine.digest = digest({"bound": engine.digest, "disabled": key[1]})
    layers = engine.config.compilation_config.static_forward_context.values()
    disable([layer.impl for layer in layers if hasattr(layer, "impl")])


def _note_disabled(engine: Engine, new: Mapping[Key, Disabled]) -> None:
    for (op, impl_id), each in new.items() if engine.rank == 0 else ():
        each.warn(op, impl_id)
    engine.disabled |= new


def _disable(engine: Engine, moment: Moment, new: Mapping[Key, Disabled]) -> None:
    """Disable implementations on this rank. From LOADED on, settle and bind the model again."""
    _note_disabled(engine, new)
    if moment is Moment.GROUPED:
        assert engine.groups is not None  # only communicators have objections here
        engine.groups.replace()
        return
    if moment is not Moment.PLANNED:
        engine.unbind()
    set_plan(engine)
    if moment is not Moment.PLANNED:
        settle(engine, Moment.PLANNED)
        bind(engine)
        for patcher in patching.PATCHERS:
            for model in engine.models.values():
                patcher.bind(engine, model)


def collect_objections(engine: Engine, moment: Moment, *, verifies: bool) -> dict[Key, Objection]:
    """Return this rank's objections: those of verifiers if `verifies`, otherwise those of other
    plugins."""
    found: dict[Key, Objection] = {}
    for plugin in asking(get_default_manager().registry.plugins, "inspect_plan"):
        if plugin.verifies is verifies:
            found = {**objections(plugin, engine, moment), **found}
    return found


def _together(engine: Engine, moment: Moment, ask: Callable[[], Opinion]) -> list[Opinion]:
    """Return every rank's opinion. An error of this rank is sent to the waiting ranks. If a rank
    has failed, all ranks raise a StartError with `failures`. The failed rank may raise a more
    specific error."""
    what = f"agree on implementations to disable ({moment})"
    try:
        mine = ask()
    except BaseException as error:  # a plugin may raise anything, including SystemExit
        own = error if isinstance(error, VllmFLError) else None
        is_known = isinstance(own, StartError) and own.failures
        if is_known or isinstance(error, KeyboardInterrupt):
            raise
        if own is None:
            log.exception("vllm-fl could not %s", what)
        try:
            engine.fail(what, quote(error) if own is None else own.message)
        except StartError as failed:
            if own is None or type(own) is StartError:
                raise failed from error
        raise
    return engine.gather(what, mine)


def _opinion(engine: Engine, moment: Moment, change: Callable[[], object] | None) -> Opinion:
    """Apply `change`. Return the objections of patchers and plugins, and the plan's contents."""
    if change is not None:
        change()
    found = collect_objections(engine, moment, verifies=False) | _patchers_object(engine, moment)
    if moment is Moment.CACHED:
        chosen = choices(engine.plan).items()
        return Opinion(found, {f"{op}={impl} chose by timing": each for (op, impl), each in chosen})
    if moment is not Moment.PLANNED:
        return Opinion(found)
    rows = [(op, trace) for op, entry in engine.plan.entries.items() for _, trace in entry.rows]
    unavailable = {(op, i): why for op, trace in rows for i, why in trace.unavailable.items()}
    registry = get_default_manager().registry
    installed = frozenset(registry.snapshot().owners)
    loaded = (each for each in registry.plugins if each.verifies and each.is_loaded)
    verifiers = frozenset(str(each.owner.distribution) for each in loaded)
    table = engine.facts.settings.tuned
    unused = table.unused if table is not None else ""
    return Opinion(found, engine.contents, installed, unavailable, unused, verifiers)


def _patchers_object(engine: Engine, moment: Moment) -> dict[Key, Objection]:
    """Return objections to implementations that patchers cannot install as planned. Raises
    StartError in strict mode if an op has no implementation that may run."""
    if moment is Moment.GROUPED and engine.groups is not None:
        found = engine.groups.faults_here()
    elif moment is Moment.PLANNED:
        unmet = [entry.unmet for entry in engine.plan.entries.values()]
        if why := "; ".join(filter(None, unmet)):
            raise StartError(why)
        found = patching.merged(lambda each: each.faults(engine.plan, engine.facts))
    else:
        found = {}
    return {key: Objection(FAILED, why) for key, why in found.items()}


def _drops_table(engine: Engine, opinions: list[Opinion]) -> bool:
    """Drop the tuning table on all ranks if a rank cannot use it. Return whether to plan again.
    Raises StartError in strict mode if the table has no effect."""
    found = [(rank, each.table) for rank, each in enumerate(opinions) if each.table]
    if not found:
        return False
    rank, why = found[0]
    said = why if len(found) == len(opinions) else f"{why} (on rank {rank})"
    settings = engine.facts.settings.without_table(said)
    if engine.plan.strict and settings.tuned is not None:
        raise StartError(f"vllm-fl: engine startup failed in strict mode: {settings.tuned.reason}")
    engine.facts = replace(engine.facts, settings=settings)
    return len(found) < len(opinions)


def _end_for(engine: Engine, moment: Moment, new: Mapping[Key, Disabled]) -> None:
    """Raise a StartError if new objections end the startup, because the mode is strict or the model
    is already compiled."""
    ending = {key: each for key, each in new.items() if each.ends_strict}
    is_strict = bool(ending) and engine.facts.settings.policy.strict
    if not is_strict and (moment is not Moment.CACHED or engine.plan.mode == "eager"):
        return
    if is_strict:
        raise _start_error(ending, " in strict mode", "")
    raise _start_error(new, "", ". The model is compiled with it")


def _start_error(faults: Mapping[Key, Disabled], how: str, then: str, **more: Any) -> StartError:
    """Return the error for implementations that end the startup; `then` says why they do."""
    text = "; ".join(f"rank {each.rank}: {_fault(key, each)}" for key, each in faults.items())
    op, impl_id = next(iter(faults))
    text = f"vllm-fl: engine startup failed{how}: {text}{then}. {stock_setting(faults)} selects "
    return StartError(f"{text}vLLM's code", op=op, impl=impl_id, **more)


def _fault(key: Key, disabled: Disabled) -> str:
    op, impl_id = key
    if disabled.code == LACKED:
        return f"implementation '{impl_id}' of op '{op}' is missing ({disabled.why})"
    return f"implementation '{impl_id}' failed for op '{op}': {disabled.why}"
