"""The worker: vLLM's own, with the plan made, verified, agreed on and sealed before the model is
built, and verified once more on the tensors of the model that was loaded."""

from __future__ import annotations

import dataclasses
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
from ..engine.tables import Standing, under
from ..engine.trials import without_old_objects
from ..logs import get_logger
from ..plugins.attention import ATTENTION
from ..plugins.calling import start_in_worker
from ..plugins.types import AttentionImpl, WorkerContext
from ..text import quote
from . import after, incident, locking, probe, ranges
from .models import model_facts
from .places import installed_bindings
from .planning import apply, configured, facts_of, load_plugins, refusals, seal
from .ranks import REJECTED
from .seams import (
    attention,
    communicator,
    functions,
    fusions,
    operators,
    taking,
    torch_operators,
    whole_layers,
)
from .seams.ir import bind_provider, reset_priorities
from .seams.layers import (
    bind_anew,
    forget_shared_layers,
    replace_layers,
)
from .seams.lookups import over_class, path_over, take_off
from .serving import Serving, calling, with_own_engine
from .verifying import (
    Start,
    meets_a_compiler,
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
    vllm_fl_serving: Serving | None = None

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
            start, lines = _begun(self)
        with phases.during("plan and verification"), without_old_objects():
            plan, contents = verified_plan(start, alone=joins)
        start.seconds = time.monotonic() - began
        took = [_took(start)]
        start.not_reached |= planned_for_nothing(plan, start.facts)
        for line in lines if self.rank == 0 else ():
            log.info("%s", line)
        serving = self.vllm_fl_serving = Serving(plan, start, self)
        _enter(serving, plan, contents)
        attention.forget_choices()
        forget_shared_layers()
        try:
            plan = serving.plan
            if not all(map(plan.is_stock, plan.entries)):
                replace_layers()
            with building(plan), calling(serving), whole_layers.in_place(plan):
                loaded = super().load_model(*args, **kwargs)  # type: ignore[misc]
            if start.live_counts and not joins:
                with phases.during("verification on live tensors"), without_old_objects():
                    took += verify_live(serving, lambda: _renew(serving))
        finally:
            _say_plan(serving, took)
        serving.layers = _built_layers(serving)
        _name_overriders(serving)
        _write_metrics(serving)
        serving.is_watched = not joins
        return loaded

    def compile_or_warm_up_model(self) -> Any:
        """Warm vLLM's worker up, and name who has overridden an operator after us meanwhile.

        Before that the KV cache is there, and no graph is captured: the plan is verified once more.
        The model is compiled behind it: what passes found in it is said, too. The steps that follow
        are those of requests, and may be sampled.
        """
        serving = self.vllm_fl_serving
        if serving is not None and serving.is_watched and serving.start.live_counts:
            with phases_of(self).during("verification with the KV cache"), without_old_objects():
                _verify_with_cache(serving)
        if serving is not None:
            _compare_with_lock(serving)
        if serving is not None and serving.is_watched:
            _attend_once(serving)
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if serving is None:
            return times
        _name_overriders(serving)
        if self.rank == 0:
            fusions.say(serving)
        serving.state = "serving"
        # Steps of warming up are none of a request; of compiled code only tracings are seen.
        serving.plan.record.begin(keeps_calls=serving.plan.mode == "compiled")
        if serving.start.facts.settings.shadow is not None:
            from .canary import watch  # which no other engine needs

            watch(serving)
        if serving.report is not None:
            serving.report.renew()
        return times

    def vllm_fl_verify(self) -> str:
        """Compare the plan once more on the loaded model's tensors: for `collective_rpc`.

        For weights that were updated by other ways than vLLM's own, which do it themselves.

        Returns:
            What was compared, or why nothing was.

        Raises:
            ServingError: something is wrong, on whichever rank; the last one raises it.
        """
        serving = self.vllm_fl_serving
        if serving is None or not serving.is_watched:
            return "nothing is verified: this rank has joined a running engine"
        return after.verify(serving, "it was asked for")

    def vllm_fl_lock(self) -> dict[str, Any]:
        """What `vllm-fl lock` writes: for `collective_rpc`, of a start under a lock."""
        serving = self.vllm_fl_serving
        assert serving is not None  # vLLM answers no call before it has loaded its model
        start = serving.start
        out = {key: each.reason for key, each in start.out.items()}
        ops = locking.labels(serving.plan)
        return {
            "facts": start.facts_of_lock,
            "result": {"ops": ops, "digest": serving.digest, "out": _nested(out)},
            "seed": start.seed,
            "tries": start.tried.made,
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
            what became of it}}, as `seams.taking.report` says; `functions` {op: {function: the
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
        serving = self.vllm_fl_serving
        assert serving is not None  # vLLM answers no call before it has loaded its model
        plan, start = serving.plan, serving.start
        compilation = self.vllm_config.compilation_config
        rejected = {key: out.why for key, out in start.out.items() if out.code == REJECTED}
        return {
            "rank": self.rank,
            "mode": plan.mode,
            "digest": serving.digest,
            "ops": {op: entry.told for op, entry in plan.entries.items()},
            "layers": serving.layers,
            "calls": _nested(plan.calls),
            "fallbacks": _nested(plan.fallbacks),
            "refusals": _nested(plan.record.refusals),
            "demotions": _nested(plan.record.demotions),
            "rejections": _nested(rejected),
            "not_reached": dict(start.not_reached),
            "remarks": serving.remarks,
            "operators": taking.report(serving, serving.operators),
            "functions": taking.report(serving, serving.functions),
            "fusions": {op: dataclasses.asdict(known) for op, known in dict(serving.sites).items()},
            "ranges": ranges.report(serving),
            "defined": serving.operators.schemas,
            "smaller": dict(start.smaller),
            "groups": dict(start.groups.served) if start.groups else {},
            "table": _table_report(start.facts, start.table),
            "device": str(start.facts.device) if start.facts.device else None,
            "ordered_for_device": _orders_by_device(start),
            "start": {
                **phases_of(self).seconds,
                "of them: compiling": getattr(compilation, "compilation_time", 0.0),
            },
            "shadow": serving.shadow.report() if serving.shadow else None,
            "wrong": _nested(serving.wrong),
        }

    def shutdown(self) -> None:
        """Say what fell back while the engine ran, and shut vLLM's worker down."""
        serving = self.vllm_fl_serving
        if serving is not None:
            serving.state = "ended"
            serving.leave()
            plan = serving.plan
            if plan.fallbacks or plan.counts_calls:
                calls = f", calls {_nested(plan.calls) or 'none'}" if plan.counts_calls else ""
                fallbacks = _nested(plan.fallbacks) or "none"
                log.info("rank %d: fallbacks %s%s", self.rank, fallbacks, calls)
        super().shutdown()  # type: ignore[misc]


def _begun(worker: PlannedWorker) -> tuple[Start, list[str]]:
    """(what the worker's start begins with, the lines that plugins have for the log)."""
    facts, _ = model_facts(worker.vllm_config)
    startup = get_default_manager().startup
    context = WorkerContext(
        facts.settings,
        worker.device,
        facts.dtype,
        worker.rank,
        worker.vllm_config,
        facts.wants_invariance,
    )
    found = start_in_worker(startup.plugins if startup else (), context)
    told = {
        name: {**report.facts, "(code)": code_facts(plugin.owner, plugin.target.partition(":")[0])}
        for name, (plugin, report) in found.items()
    }
    lines = [line for _, report in found.values() for line in report.lines]
    fixed = worker.rank, worker.device, worker.vllm_fl_groups, told
    of_lock = locking.facts_of_lock(facts, worker.vllm_config, worker.device)
    return Start(facts, *fixed, facts_of_lock=of_lock), lines


def _enter(serving: Serving, plan: Plan, contents: dict[str, Any]) -> None:
    """Take what the engine needs of this process, and of its configuration, to serve with `plan`.

    Args:
        serving: the engine, which holds it all until it leaves.
        plan: the plan, verified.
        contents: what the plan consists of.
    """
    start, config = serving.start, serving.config
    serving.hold(get_default_manager().seal(f"the engine's worker (rank {start.rank})"))
    plan = serving.plan = take_place(plan)
    serving.hold(leave_place, plan)
    if plan.place > 1:  # its operators have other names: compiled code of another's is not its
        contents = {**contents, "place": plan.place}
    assert start.facts.dtype is not None  # a worker has a model
    table = installed_bindings()
    serving.operators = operators.choose(plan, table, start.device, start.facts.dtype)
    serving.functions = functions.choose(plan, table)
    contents = {
        **contents,
        "operators": serving.operators.names,
        "defined": serving.operators.schemas,
        "functions": serving.functions.names,
    }
    serving.digest, serving.overriders = digest(contents), {}
    bind_provider(serving, by_range=ranges.is_compiled_by_range(config))
    apply(plan, config)
    reset_priorities(serving)
    serving.hold(seal(config, serving.digest))
    serving.begin(config)
    operators.take(serving, start.device)
    functions.take(serving)
    fusions.watch(serving)
    torch_operators.watch(serving)
    incident.keep(serving, serving.worker.vllm_fl_report, contents["versions"])


def _renew(serving: Serving) -> None:
    """Make another plan, without what was taken out, and bind the models to it."""
    serving.leave()
    _enter(serving, *verified_plan(serving.start, alone=False))
    for model in serving.models.values():
        bind_anew(model, serving.plan, serving.config)


def _verify_with_cache(serving: Serving) -> None:
    """Verify the plan once more, with the KV cache in memory; a plan that changes is said anew."""
    before = serving.plan
    told = verify_with_cache(serving, lambda: _renew(serving))
    if serving.plan is not before:
        _say_plan(serving, [told])
        _write_metrics(serving)
    elif serving.start.rank == 0:
        log.info("%s", told)


def _attend_once(serving: Serving) -> None:
    """Let a plugin's attention compile its kernels, if it does so when it is called first."""
    if not serving.plan.entries[ATTENTION].classes(AttentionImpl):
        return
    try:
        with phases_of(serving.worker).during("attention's first call"), calling(serving):
            is_eager = serving.plan.mode == "eager"
            probe.attend(serving.runner, serving.config, is_eager=is_eager)
    except Exception as error:  # vLLM's dummy run does not fit every model, and need not be there
        log.info("Attention was not called before the first request: %s", quote(error))


def _compare_with_lock(serving: Serving) -> None:
    """End the start where the verified plan is not the lock's; all ranks hold the same."""
    start = serving.start
    locked = start.facts.settings.locked
    if locked is not None and start.rank == 0:
        lines = locking.served_otherwise(locked, serving.plan, serving.digest)
        start.differs += lines
        locking.refuse(start.facts.settings, {0: lines}, says=True)


def _write_metrics(serving: Serving) -> None:
    """Write the engine's counters into a file from now on, where the settings name one."""
    start = serving.start
    file = start.facts.settings.metrics
    if file is None:
        return
    serving.metrics = MetricsFile(
        file,
        serving.plan,
        serving.digest,
        rank=start.rank,
        replica=serving.replica,
        shadow=lambda: serving.shadow,
        lock_differs=lambda: bool(start.differs),
    )
    serving.hold(serving.metrics.close)


def _name_overriders(serving: Serving) -> None:
    """Say, once for each, whose kernels now run in the place of the plan's."""
    for name, who in operators.overriders(serving).items():
        if serving.overriders.get(name) != who:
            serving.overriders[name] = who
            log.warning(
                "Operator %s was overridden after vllm-fl, by %s: the plan's implementation runs "
                "in it only if that calls it",
                name,
                who,
            )


def _took(start: Start) -> str:
    """How long verification has taken, as far as it has come."""
    how = {"verify": "verified in", "run": "run in"}.get(start.how)
    return f"{how} {start.seconds:.1f} s" if how else "not verified"


def _say_plan(serving: Serving, took: list[str]) -> None:
    """The start line, which rank 0 says once, and what goes with it, for the report and DEBUG."""
    start, plan = serving.start, serving.plan
    facts = start.facts
    said = (f"{op}: {impl_id} {why}" for (op, impl_id), why in refusals(facts).items())
    remarks = [*_of_table(facts, start.table), *_of_device(start), *_of_invariance(start, plan)]
    remarks += [*start.limits(plan), *_of_length(serving), *said]
    inlined = ranges.planned(plan, serving.config)
    remarks += [f"{op} {ranges.told(chosen)}" for op, chosen in inlined.items()]
    out = [f"{op}: {impl} {o.told}" for (op, impl), o in start.out.items() if o.told]
    digested = f"digest {serving.digest}"
    serving.remarks = [*plan.notes(start.not_reached), *out, *took, digested, *remarks]
    if start.rank == 0:
        planned = " ".join(f"{op}={entry.label}" for op, entry in plan.entries.items())
        log.debug("vllm-fl: %s (%s)", planned, "; ".join([plan.mode, *serving.remarks]))
        log.info("%s", plan.line(_took(start), digested, not_reached=start.not_reached))
        _say_what_is_taken_whole(plan, inlined)


def _built_layers(serving: Serving) -> dict[str, int]:
    """How many layers of the model are the plan's class, for each whole layer; rank 0 says so."""
    plan = serving.plan
    if not plan.layers:
        return {}
    model = serving.model
    if model is None:
        log.warning("This worker shows no model: whether whole layers serve in it is not known")
        return {}
    found = whole_layers.served(plan, model)
    for name, served in found.items() if serving.start.rank == 0 else ():
        impl_id = plan.layers[name].impl_id
        if not served.ours:
            log.warning("Layer %s: this model has none, so that '%s' does not run", name, impl_id)
            continue
        log.info("Layer %s: %d in this model, by '%s'", name, served.ours, impl_id)
        if served.wrapped:
            log.warning(
                "Layer %s: LoRA wraps %d of them, and may call their quantisation method in place "
                "of the forward of '%s'",
                name,
                served.wrapped,
                impl_id,
            )
    return {name: served.ours for name, served in found.items()}


def _of_table(facts: EngineFacts, table: Standing) -> list[str]:
    """What there is to say of the table that the settings name."""
    pinned = facts.settings.pinned
    if pinned is None:
        return []
    return [pinned.label if table.digest else f"without the table {pinned.file}"]


def _of_device(start: Start) -> list[str]:
    """What the start line says of orders for the device that it is."""
    ops = _orders_by_device(start)
    return [f"ordered for {start.facts.device}: {', '.join(ops)}"] if ops else []


def _orders_by_device(start: Start) -> dict[str, str]:
    """Op -> where its order for this device stands and for which figure, of those in force."""
    return under(start.facts, start.table).settings.held_by_device


def _of_invariance(start: Start, plan: Plan) -> list[str]:
    """What there is to say where only batch-invariant implementations may serve."""
    facts = start.facts
    if not facts.wants_invariance:
        return []
    told = [f"{facts.wants_invariance}: measured; vLLM's own code is not"]
    settings, manager = under(facts, start.table).settings, get_default_manager()
    by_size = [
        op for op in plan.entries if manager.ceilings(op, mode=facts.mode, settings=settings)
    ]
    if by_size:
        told.append(f"one order for all sizes, so that rows have no effect: {', '.join(by_size)}")
    return told


def _of_length(serving: Serving) -> list[str]:
    """What there is to say where an engine is longer than the tables that are made for it."""
    sizes = serving.start.facts.sizes
    length = serving.config.model_config.max_model_len
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
