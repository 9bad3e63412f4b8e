"""The worker: vLLM's own, with the plan made, verified, agreed on and sealed before the model is
built, and verified once more on the tensors of the model that was loaded."""

from __future__ import annotations

import time
from collections.abc import Container
from inspect import getattr_static
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ..dispatch import get_default_manager
from ..dispatch.context import building
from ..engine.digest import code_facts, digest
from ..engine.facts import EngineFacts
from ..engine.metrics import MetricsFile
from ..engine.phases import before_worker, phases_of
from ..engine.plan import Plan, leave_place, take_place
from ..engine.tables import Standing, standing, under
from ..engine.trials import without_old_objects
from ..logs import get_logger
from ..plugins.attention import ATTENTION
from ..plugins.calling import start_in_worker
from ..plugins.types import AttentionImpl, WorkerContext
from ..text import quote
from . import after, incident, locking, patching, probe
from .engines import Engine, calling, with_own_engine
from .graphs import ranges
from .models import model_facts
from .patchers import communicator
from .patchers.lookups import over_class, path_over, take_off
from .patching import PATCHERS, by_range
from .planning import apply, configured, facts_of, load_plugins, plan_for, refusals, seal
from .ranks import FAILED, REJECTED, Disabled
from .targets import installed_bindings
from .verifying import (
    Checks,
    checks_of,
    meets_a_compiler,
    plan_of,
    planned_for_nothing,
    verified_plan,
    verify_live,
    verify_with_cache,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

PREFIX = "Planned:"

log = get_logger("engine")


class PlannedWorker:
    """What we change of a worker. Mixed in before the class that vLLM chose."""

    vllm_config: VllmConfig
    device: torch.device
    rank: int
    vllm_fl_groups: communicator.Groups | None = None
    vllm_fl_engine: Engine | None = None

    def __init_subclass__(cls) -> None:
        """Let the methods of vLLM's worker say for which engine they run, and those that change
        weights or memory that they did.

        A class below that counts or refuses its subclasses is not asked about ours.
        """
        after.watch(cls)
        for name in dir(cls):
            method = getattr_static(cls, name)
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, with_own_engine(method))

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Load the plugins that the engine's settings allow: vLLM's own start asks for norms."""
        phases = phases_of(self)
        phases.seconds |= before_worker(configured(vllm_config))
        with phases.during("plugins and settings"):
            load_plugins(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def init_device(self) -> Any:
        """Open the device, and let the ranks agree on what they exchange tensors through."""
        facts = facts_of(self.vllm_config)
        groups = communicator.Groups(facts) if facts.communicator is not None else None
        if groups is not None and not groups.communicators:
            groups = None
        with communicator.made_by(groups):
            with phases_of(self).during("vLLM: the device"):
                opened = super().init_device()  # type: ignore[misc]
            if groups is not None:
                groups.settle()
        self.vllm_fl_groups = groups
        return opened

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Seal the plan, build the model on it, verify it on live tensors, and say it once."""
        # A rank that joins a running engine (elastic EP) meets ranks that do not gather any more.
        joins = bool(kwargs.get("load_dummy_weights"))
        began, phases = time.monotonic(), phases_of(self)
        with phases.during("what the plan goes by"):
            engine, lines = _begun(self, joins=joins)
        with phases.during("plan and verification"), without_old_objects():
            contents = verified_plan(engine)
        checks = checks_of(engine)
        checks.seconds = time.monotonic() - began
        took = [_took(checks)]
        engine.unused |= planned_for_nothing(engine.plan, engine.facts)
        for line in lines if self.rank == 0 else ():
            log.info("%s", line)
        self.vllm_fl_engine = engine
        _enter(engine, contents)
        try:
            with patching.building(engine), building(engine.plan), calling(engine):
                loaded = super().load_model(*args, **kwargs)  # type: ignore[misc]
            if checks.live_counts and not joins:
                with phases.during("verification on live tensors"), without_old_objects():
                    took += verify_live(engine, lambda: _renew(engine))
        finally:
            _say_plan(engine, took)
        for patcher in PATCHERS:
            patcher.loaded(engine)
        _write_metrics(engine)
        engine.is_watched = not joins
        return loaded

    def compile_or_warm_up_model(self) -> Any:
        """Warm vLLM's worker up, and name who has overridden an operator after us meanwhile.

        Before that the KV cache is there, and no graph is captured: the plan is verified once more.
        The model is compiled behind it: what passes found in it is said, too. The steps that follow
        are those of requests, and may be sampled.
        """
        engine = self.vllm_fl_engine
        if engine is not None and engine.is_watched and checks_of(engine).live_counts:
            with phases_of(self).during("verification with the KV cache"), without_old_objects():
                _verify_with_cache(engine)
        if engine is not None:
            _compare_with_lock(engine)
        if engine is not None and engine.is_watched:
            _attend_once(engine)
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if engine is None:
            return times
        for patcher in PATCHERS:
            patcher.compiled(engine)
        engine.status = "serving"
        # Steps of warming up are none of a request; of compiled code only tracings are seen.
        engine.plan.record.begin(keeps_calls=engine.plan.mode == "compiled")
        if engine.facts.settings.shadow is not None:
            from .canary import watch  # which no other engine needs

            watch(engine)
        if engine.report is not None:
            engine.report.renew()
        return times

    def vllm_fl_verify(self) -> str:
        """Compare the plan once more on the loaded model's tensors: for `collective_rpc`.

        For weights that were updated by other ways than vLLM's own, which do it themselves.

        Returns:
            What was compared, or why nothing was.

        Raises:
            ServingError: something is wrong, on whichever rank; the last one raises it.
        """
        engine = self.vllm_fl_engine
        if engine is None or not engine.is_watched:
            return "nothing is verified: this rank has joined a running engine"
        return after.verify(engine, "it was asked for")

    def vllm_fl_lock(self) -> dict[str, Any]:
        """What `vllm-fl lock` writes: for `collective_rpc`, of a start under a lock."""
        engine = self.vllm_fl_engine
        assert engine is not None  # vLLM answers no call before it has loaded its model
        checks = checks_of(engine)
        out = {key: each.reason for key, each in engine.disabled.items()}
        ops = locking.labels(engine.plan)
        return {
            "facts": engine.facts_of_lock,
            "result": {"ops": ops, "digest": engine.digest, "out": _nested(out)},
            "seed": checks.seed,
            "tries": checks.tried.made,
        }

    def vllm_fl_report(self) -> dict[str, Any]:
        """What this worker runs with, and what it counted: for `collective_rpc`.

        Returns:
            JSON-able: `rank`, `mode`, `digest`, `ops` {op: {impl, reason}}, with `rows` [{up_to,
            impl, reason}] for an op that is ordered by size, `layers` {class of
            vLLM's: how many layers of the model are the plan's class}, `calls`, `fallbacks` and
            `refusals` {op: {impl id: count}}, `demotions` and `rejections` {op: {impl id: why}}:
            what the start took out since it failed, and since it refuses all calls of this model
            or lacks a property that is asked for. `not_reached` {op: why}: what is planned and this
            engine is not seen to call. `remarks` [what else there is to say of the start].
            Counters begin when the engine is about to serve; a call is counted to who computed it,
            under VLLM_FL_DISPATCH_DEBUG=1. `operators` {op: {operator:
            what became of it}}, as `patchers.taking.report` says; `functions` {op: {function: the
            same}}. `fusions` {op: {graphs, found}}: how many graphs the pass for the op went
            through, and in how many places it found the op. `ranges` {op: [{first, last, impl,
            places}]}: of an op that is
            ordered by size, whose code is inlined in the graphs of so many tokens, and in how many
            places (0 where vLLM had them in its cache); impl None where an operator looks its row
            up. `defined` {operator: schema}: what this vLLM, an empty build,
            lacks, and is there while the engine is. `smaller` {op: [what of its calls the start
            tried in a smaller size than the model's]}. `groups` {a group of ranks: the id of its
            communicator}; empty where the plan leaves them to vLLM. `table` {file, digest, acts,
            reason, left_out}: the table that the settings name, whether it acts, why it does not,
            and the ops whose rows do not count; None where they name none. `device`: the class of
            the device, where a setting is for one; `ordered_for_device` {op: where that stands, and
            the figure}: what is in force. `start` {phase: seconds}: what the start took, from where
            vLLM makes the configuration, without what it does between its worker's methods; `of
            them: compiling` is in vLLM's phases already. `shadow`: what was compared while it
            served, as `Shadow.report` says; None where no step is sampled. `wrong` {op: {impl id:
            why}}: what serves and was found wrong when the weights had been updated.
        """
        engine = self.vllm_fl_engine
        assert engine is not None  # vLLM answers no call before it has loaded its model
        plan = engine.plan
        compilation = self.vllm_config.compilation_config
        rejected = {key: out.why for key, out in engine.disabled.items() if out.code == REJECTED}
        return {
            **patching.report(engine),
            "rank": self.rank,
            "mode": plan.mode,
            "digest": engine.digest,
            "ops": {op: entry.told for op, entry in plan.entries.items()},
            "calls": _nested(plan.calls),
            "fallbacks": _nested(plan.fallbacks),
            "refusals": _nested(plan.record.refusals),
            "demotions": _nested(plan.record.demotions),
            "rejections": _nested(rejected),
            "not_reached": dict(engine.unused),
            "remarks": engine.remarks,
            "ranges": ranges.report(engine, by_range(plan)),
            "smaller": dict(checks_of(engine).smaller),
            "table": _table_report(engine.facts, engine.table),
            "device": str(engine.facts.device) if engine.facts.device else None,
            "ordered_for_device": _orders_by_device(engine),
            "start": {
                **phases_of(self).seconds,
                "of them: compiling": getattr(compilation, "compilation_time", 0.0),
            },
            "shadow": engine.shadow.report() if engine.shadow else None,
            "wrong": _nested(engine.wrong),
        }

    def shutdown(self) -> None:
        """Say what fell back while the engine ran, and shut vLLM's worker down."""
        engine = self.vllm_fl_engine
        if engine is not None:
            engine.status = "ended"
            engine.leave()
            plan = engine.plan
            if plan.fallbacks or plan.counts_calls:
                calls = f", calls {_nested(plan.calls) or 'none'}" if plan.counts_calls else ""
                fallbacks = _nested(plan.fallbacks) or "none"
                log.info("rank %d: fallbacks %s%s", self.rank, fallbacks, calls)
        super().shutdown()  # type: ignore[misc]


def _begun(worker: PlannedWorker, *, joins: bool) -> tuple[Engine, list[str]]:
    """Make the worker's engine, with its first plan, and the lines that plugins log."""
    facts, _ = model_facts(worker.vllm_config)
    manager = get_default_manager()
    context = WorkerContext(
        facts.settings,
        worker.device,
        facts.dtype,
        worker.rank,
        worker.vllm_config,
        facts.wants_invariance,
    )
    found = start_in_worker(manager.startup.plugins if manager.startup else (), context)
    told = {
        name: {**report.facts, "(code)": code_facts(plugin.owner, plugin.target.partition(":")[0])}
        for name, (plugin, report) in found.items()
    }
    groups = worker.vllm_fl_groups
    faults = groups.faults if groups is not None else {}
    disabled = {key: Disabled(FAILED, fault.rank, fault.why) for key, fault in faults.items()}
    table = standing(facts, manager.registry.snapshot(), worker.device)
    engine = Engine(
        plan_for(facts, {key: each.reason for key, each in disabled.items()}, table=table),
        facts,
        worker.rank,
        worker.device,
        worker,
        groups=groups,
        joins=joins,
        worker_facts=told,
        table=table,
        disabled=disabled,
        facts_of_lock=locking.facts_of_lock(facts, worker.vllm_config, worker.device),
    )
    return engine, [line for _, report in found.values() for line in report.lines]


def _enter(engine: Engine, contents: dict[str, Any]) -> None:
    """Take what the engine needs of this process, and of its configuration, to serve with `plan`.

    Args:
        engine: the engine, which holds it all until it leaves; its plan is verified.
        contents: what the plan consists of.
    """
    config = engine.config
    engine.hold(get_default_manager().seal(f"the engine's worker (rank {engine.rank})"))
    plan = engine.plan = take_place(engine.plan)
    engine.hold(leave_place, plan)
    if plan.place > 1:  # its operators have other names: compiled code of another's is not its
        contents = {**contents, "place": plan.place}
    for patcher in PATCHERS:
        contents = {**contents, **patcher.choose(engine)}
    engine.digest = digest(contents)
    apply(plan, config)
    engine.hold(seal(config, engine.digest))
    engine.begin(config)
    for patcher in PATCHERS:
        patcher.apply(engine)
    incident.keep(engine, engine.worker.vllm_fl_report, contents["versions"])


def _renew(engine: Engine) -> None:
    """Make another plan, without what was taken out, and bind the models to it."""
    engine.leave()
    engine.plan = plan_of(engine)
    _enter(engine, verified_plan(engine))
    for model in engine.models.values():
        for patcher in PATCHERS:
            patcher.bind(engine, model)


def _verify_with_cache(engine: Engine) -> None:
    """Verify the plan once more, with the KV cache in memory; a plan that changes is said anew."""
    before = engine.plan
    told = verify_with_cache(engine, lambda: _renew(engine))
    if engine.plan is not before:
        _say_plan(engine, [told])
        _write_metrics(engine)
    elif engine.rank == 0:
        log.info("%s", told)


def _attend_once(engine: Engine) -> None:
    """Let a plugin's attention compile its kernels, if it does so when it is called first."""
    if not engine.plan.entries[ATTENTION].classes(AttentionImpl):
        return
    try:
        with phases_of(engine.worker).during("attention's first call"), calling(engine):
            is_eager = engine.plan.mode == "eager"
            probe.attend(engine.runner, engine.config, is_eager=is_eager)
    except Exception as error:  # vLLM's dummy run does not fit every model, and need not be there
        log.info("Attention was not called before the first request: %s", quote(error))


def _compare_with_lock(engine: Engine) -> None:
    """End the start where the verified plan is not the lock's; all ranks hold the same."""
    locked = engine.facts.settings.locked
    if locked is not None and engine.rank == 0:
        lines = locking.served_otherwise(locked, engine.plan, engine.digest)
        engine.differs += lines
        locking.refuse(engine.facts.settings, {0: lines}, says=True)


def _write_metrics(engine: Engine) -> None:
    """Write the engine's counters into a file from now on, where the settings name one."""
    file = engine.facts.settings.metrics
    if file is None:
        return
    engine.metrics = MetricsFile(
        file,
        engine.plan,
        engine.digest,
        rank=engine.rank,
        replica=engine.replica,
        shadow=lambda: engine.shadow,
        lock_differs=lambda: bool(engine.differs),
    )
    engine.hold(engine.metrics.close)


def _took(checks: Checks) -> str:
    """How long verification has taken, as far as it has come."""
    how = {"verify": "verified in", "run": "run in"}.get(checks.how)
    return f"{how} {checks.seconds:.1f} s" if how else "not verified"


def _say_plan(engine: Engine, took: list[str]) -> None:
    """The start line, which rank 0 says once, and what goes with it, for the report and DEBUG."""
    plan, facts, checks = engine.plan, engine.facts, checks_of(engine)
    said = (f"{op}: {impl_id} {why}" for (op, impl_id), why in refusals(facts).items())
    remarks = [*_of_table(facts, engine.table), *_of_device(engine), *_of_invariance(engine, plan)]
    remarks += [*checks.limits(plan), *_of_length(engine), *said]
    inlined = ranges.planned(by_range(plan), engine.config)
    remarks += [f"{op} {ranges.told(chosen)}" for op, chosen in inlined.items()]
    out = [f"{op}: {impl} {o.told}" for (op, impl), o in engine.disabled.items() if o.told]
    digested = f"digest {engine.digest}"
    engine.remarks = [*plan.notes(engine.unused), *out, *took, digested, *remarks]
    if engine.rank == 0:
        planned = " ".join(f"{op}={entry.label}" for op, entry in plan.entries.items())
        log.debug("vllm-fl: %s (%s)", planned, "; ".join([plan.mode, *engine.remarks]))
        log.info("%s", plan.line(_took(checks), digested, not_reached=engine.unused))
        _say_what_is_taken_whole(plan, inlined)


def _of_table(facts: EngineFacts, table: Standing) -> list[str]:
    """What there is to say of the table that the settings name."""
    pinned = facts.settings.pinned
    if pinned is None:
        return []
    return [pinned.label if table.digest else f"without the table {pinned.file}"]


def _of_device(engine: Engine) -> list[str]:
    """What the start line says of orders for the device that it is."""
    ops = _orders_by_device(engine)
    return [f"ordered for {engine.facts.device}: {', '.join(ops)}"] if ops else []


def _orders_by_device(engine: Engine) -> dict[str, str]:
    """Op -> where its order for this device stands and for which figure, of those in force."""
    return under(engine.facts, engine.table).settings.held_by_device


def _of_invariance(engine: Engine, plan: Plan) -> list[str]:
    """What there is to say where only batch-invariant implementations may serve."""
    facts = engine.facts
    if not facts.wants_invariance:
        return []
    told = [f"{facts.wants_invariance}: measured; vLLM's own code is not"]
    settings, manager = under(facts, engine.table).settings, get_default_manager()
    by_size = [
        op for op in plan.entries if manager.ceilings(op, mode=facts.mode, settings=settings)
    ]
    if by_size:
        told.append(f"one order for all sizes, so that rows have no effect: {', '.join(by_size)}")
    return told


def _of_length(engine: Engine) -> list[str]:
    """What there is to say where an engine is longer than the tables that are made for it."""
    sizes = engine.facts.sizes
    length = engine.config.model_config.max_model_len
    if sizes is None or length <= sizes.max_position:
        return []
    return [f"made inputs have positions below {sizes.max_position} of {length}"]


def _table_report(facts: EngineFacts, table: Standing) -> dict[str, Any] | None:
    pinned = facts.settings.pinned
    if pinned is None:
        return None
    return {
        "file": pinned.file,
        "digest": pinned.digest,
        "acts": bool(table.digest),
        "reason": table.reason,
        "left_out": dict(table.left_out),
    }


def _say_what_is_taken_whole(plan: Plan, inlined: Container[str]) -> None:
    """Name the ops that a compiler takes whole since they are ordered by size.

    Args:
        plan: the plan.
        inlined: the ops whose code is inlined in some range.
    """
    table = installed_bindings()
    ops = [
        op
        for op, entry in plan.entries.items()
        if plan.mode == "compiled" and entry.ceilings and meets_a_compiler(table.get(op))
        if op not in inlined
    ]
    if ops:
        log.info(
            "Ordered by size, and so one operator each that the compiler takes whole, with nothing "
            "fused into it: %s. At sizes that are stock it runs vLLM's plain form",
            ", ".join(ops),
        )


def _nested(table: Any) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (op, impl_id), value in sorted(dict(table).items()):
        nested.setdefault(op, {})[impl_id] = value
    return nested


def wrap_worker(vllm_config: VllmConfig) -> None:
    """Put our worker in front of the one that vLLM chose, once."""
    parallel = vllm_config.parallel_config
    path = parallel.worker_cls
    if isinstance(path, str) and path != "auto" and not path.startswith(f"{__name__}.{PREFIX}"):
        parallel.worker_cls = path_over(__name__, PREFIX, path)


def __getattr__(name: str) -> type:
    """Only a path travels to the workers: the class is made from it on demand."""
    made = over_class(__name__, PREFIX, name, PlannedWorker)
    if not issubclass(made, PlannedWorker):
        take_off()
    return made
