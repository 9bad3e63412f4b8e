"""The worker makes, verifies and seals the plan, lets vLLM's worker build the model, and verifies
the plan again on the tensors of the loaded model."""

from __future__ import annotations

from copy import deepcopy
from inspect import getattr_static
from types import FunctionType
from typing import TYPE_CHECKING, Any

from ..dispatch import get_default_manager
from ..dispatch.context import building
from ..engine import start_line
from ..engine.digest import code_facts
from ..engine.phases import phases_of
from ..errors import PluginError
from ..logs import get_logger
from ..plugins.calling import asking, enter_session, sections, start_in_worker
from ..plugins.inspection import REJECTED, VERIFIED_BEFORE, Moment, WorkerContext
from ..plugins.types import ATTENTION, AttentionImpl
from ..text import quote
from . import patching, updates
from .engines import Engine, calling, with_own_engine
from .models import completed, drop_model, import_models
from .patchers.attention import attend
from .patchers.lookups import over_class, path_over, take_off
from .patching import PATCHERS, why_not
from .planning import facts_of, load_plugins, refuse_unverified
from .settling import bind, choices, set_plan, settle

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

PREFIX = "Planned:"

PLANNING, LIVE = "plan and verification", "verification on live tensors"
"""The startup phases that settle the ranks on a plan."""

log = get_logger("engine")


class PlannedWorker:
    vllm_config: VllmConfig
    device: torch.device
    rank: int
    vllm_fl_engine: Engine | None = None

    def __init_subclass__(cls) -> None:
        """Wrap the worker's methods, to attribute their calls to its engine and to follow weight
        updates. The base class's `__init_subclass__` is not called, because it may register or
        reject subclasses."""
        updates.wrap_updates(cls)
        for name in dir(cls):
            method = getattr_static(cls, name)
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, with_own_engine(method))

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Load the plugins that the engine's settings allow, because vLLM's `__init__` sets the
        priorities of IR ops."""
        with phases_of(self).during("plugins and settings"):
            load_plugins(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def init_device(self) -> Any:
        """Open the device, and let the ranks agree on their communicators."""
        engine = Engine(facts_of(self.vllm_config), self.rank, self)
        refuse_unverified(engine.facts)
        with patching.entered(lambda each: each.opening(engine)):
            with phases_of(self).during("vLLM: the device"):
                opened = super().init_device()  # type: ignore[misc]
            engine.device = self.device
            if engine.groups is not None:
                settle(engine, Moment.GROUPED)
                engine.groups.say()
        self.vllm_fl_engine = engine
        return opened

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        engine, phases = self.vllm_fl_engine, phases_of(self)
        assert engine is not None
        # In elastic EP, the ranks of a running engine do not gather with a rank that joins.
        engine.joins = bool(kwargs.get("load_dummy_weights"))
        with phases.during(PLANNING):
            lines = _begin(engine)
            settle(engine, Moment.PLANNED)
        for line in lines if self.rank == 0 else ():
            log.info("%s", line)
        bind(engine)
        for plugin in asking(get_default_manager().registry.plugins, "engine_session"):
            engine.on_exit(enter_session(plugin, engine))
        quantisation = deepcopy(self.vllm_config.quant_config)  # vLLM changes it
        try:
            while True:
                built = patching.entered(lambda each: each.building(engine))
                with built, building(engine.plan), calling(engine):
                    loaded = super().load_model(*args, **kwargs)  # type: ignore[misc]
                if engine.joins:
                    break
                with phases.during(LIVE):
                    settle(engine, Moment.LOADED)
                if not any(patcher.stale(engine) for patcher in PATCHERS):
                    break
                drop_model(self, deepcopy(quantisation))
        finally:
            _say_plan(engine)
        for patcher in PATCHERS:
            patcher.loaded(engine)
        engine.is_loaded = True
        return loaded

    def compile_or_warm_up_model(self) -> Any:
        """Verify the plan with the KV cache, run vLLM's warm-up, and begin to serve. After the
        warm-up the model is compiled, patchers log the results of passes and later overrides of
        operators, and plugins may sample steps."""
        engine = self.vllm_fl_engine
        # vLLM warms up again when ranks join or leave (elastic EP), without gathering.
        if engine is None or not engine.is_loaded or engine.status != "starting":
            return super().compile_or_warm_up_model()  # type: ignore[misc]
        if not engine.joins:
            before = engine.plan
            with phases_of(self).during("verification with the KV cache"):
                settle(engine, Moment.CACHED)
            if engine.plan is not before:
                _say_plan(engine)
            elif engine.rank == 0 and engine.remarks[Moment.CACHED]:
                log.info("%s", "; ".join(engine.remarks[Moment.CACHED]))
            _attend_once(engine)
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        for patcher in PATCHERS:
            patcher.compiled(engine)
        # Warm-up steps serve no request. In compiled mode only tracings are counted. They are kept.
        engine.plan.record.begin(keeps_calls=engine.plan.mode == "compiled")
        engine.serve()
        return times

    def vllm_fl_verify(self) -> str:
        """Verify the plan again on the loaded model's tensors. Call it through `collective_rpc`
        after weight updates that do not use vLLM's methods. Returns what was verified, or why
        nothing was verified. If an implementation is incorrect on any rank, the last rank raises a
        ServingError."""
        engine = self.vllm_fl_engine
        if engine is None or engine.joins:
            return "nothing is verified: this rank has joined a running engine"
        return updates.check(engine, "a request to verify")

    def vllm_fl_report(self) -> dict[str, Any]:
        """Return this worker's plan and counters, through `collective_rpc`. Counters begin when the
        engine begins to serve. The result is JSON-able. docs/worker-report.md describes its
        keys."""
        engine = self.vllm_fl_engine
        assert engine is not None  # vLLM forwards no `collective_rpc` before
        plan, table = engine.plan, engine.facts.settings.tuned
        compilation = self.vllm_config.compilation_config
        rejected = {key: out.why for key, out in engine.disabled.items() if out.code == REJECTED}
        report = {
            **patching.merged(lambda each: each.report(engine)),
            "rank": self.rank,
            "mode": plan.mode,
            "digest": engine.digest,
            "ops": {op: entry.to_json() for op, entry in plan.entries.items()},
            "calls": _nested(plan.calls),
            "fallbacks": _nested(plan.fallbacks),
            "refusals": _nested(plan.record.refusals),
            "demotions": _nested(plan.record.demotions),
            "rejections": _nested(rejected),
            "choices": _nested(choices(plan)),
            "not_reached": dict(engine.unused),
            "remarks": [line for lines in engine.remarks.values() for line in lines],
            "table": table
            and {"file": table.file, "acts": not table.unused, "reason": table.reason},
            "device": engine.facts.device or None,
            "ordered_for_device": engine.facts.ordered.settings.held_by_device,
            "start": {
                **phases_of(self).seconds,
                "of them: compiling": getattr(compilation, "compilation_time", 0.0),
            },
            "wrong": _nested(engine.wrong),
        }
        failed = engine.state.setdefault("plugins with a failed report", set())  # logged once
        for plugin in asking(get_default_manager().registry.plugins, "worker_report"):
            try:
                report.update(sections(plugin, engine, report))
            except PluginError as error:
                if plugin.owner not in failed:
                    log.warning("%s", error)
                failed.add(plugin.owner)
        return report

    def shutdown(self) -> None:
        engine = self.vllm_fl_engine
        if engine is not None:
            engine.end("ended")
        if engine is not None and engine.is_loaded:
            plan = engine.plan
            calls = f", calls {_nested(plan.calls) or 'none'}" if plan.counts_calls else ""
            if plan.fallbacks or calls:
                fallbacks = _nested(plan.fallbacks) or "none"
                log.info("rank %d: fallbacks %s%s", self.rank, fallbacks, calls)
        super().shutdown()  # type: ignore[misc]


def _begin(engine: Engine) -> list[str]:
    config, manager = engine.config, get_default_manager()
    import_models(config)
    # Read again, because a platform may register its layers when the device is opened.
    facts, _ = completed(facts_of(config), config)
    engine.facts = facts
    device, rank, invariance = engine.device, engine.rank, facts.wants_invariance
    context = WorkerContext(facts.settings, device, facts.dtype, rank, config, invariance)
    found = start_in_worker(manager.startup.plugins if manager.startup else (), context)
    engine.worker_facts = {
        name: {**report.facts, "(code)": code_facts(plugin.owner, plugin.target.partition(":")[0])}
        for name, (plugin, report) in found.items()
    }
    set_plan(engine)
    return [line for _, report in found.values() for line in report.lines]


def _attend_once(engine: Engine) -> None:
    """Run a plugin's attention once, because it may compile its kernels at the first call."""
    if not engine.plan.entries[ATTENTION].classes(AttentionImpl):
        return
    try:
        with phases_of(engine.worker).during("attention's first call"), calling(engine):
            is_eager = engine.plan.mode == "eager"
            attend(engine.runner, engine.config, is_eager=is_eager)
    except Exception as error:  # vLLM's dummy run may be missing, and does not fit every model
        log.info("Attention was not called before the first request: %s", quote(error))


def _say_plan(engine: Engine) -> None:
    """Keep remarks on the startup for the report and the DEBUG log. Rank 0 logs the start line."""
    plan, seconds = engine.plan, phases_of(engine.worker).seconds
    settings, found = engine.facts.settings, engine.remarks[Moment.PLANNED]
    how = "verified in" if settings.compares else {"run": "run in"}.get(settings.preflight)
    how = f"{VERIFIED_BEFORE}, small check in" if VERIFIED_BEFORE in found else how
    total = sum(seconds.get(phase, 0.0) for phase in (PLANNING, LIVE))
    took = f"{how} {total:.1f} s" if how else "not verified"
    digested = f"digest {engine.digest}"
    out = [f"{op}: {impl} {o.remark}" for (op, impl), o in engine.disabled.items() if o.remark]
    own = [*start_line.notes(plan, engine.unused), *out, took, digested, *_remarks(engine)]
    engine.remarks[Moment.PLANNED] = own + [each for each in found if each not in own]
    if engine.rank == 0:
        planned = " ".join(f"{op}={entry.label}" for op, entry in plan.entries.items())
        phrases = [line for lines in engine.remarks.values() for line in lines]
        log.debug("vllm-fl: %s (%s)", planned, "; ".join([plan.mode, *phrases]))
        log.info("%s", start_line.line(plan, took, digested, not_reached=engine.unused))


def _remarks(engine: Engine) -> list[str]:
    facts, found = engine.facts, []
    table, ordered = facts.settings.tuned, facts.ordered.settings.held_by_device
    if table is not None:
        found.append(f"{'without the ' if table.unused else ''}table {table.file}")
    if ordered:
        found.append(f"orders for {facts.device}: {', '.join(ordered)}")
    if facts.wants_invariance:
        found.append(f"{facts.wants_invariance}: measured; of vLLM's code, only layers are")
    return found + [f"{op}: {impl_id} {why}" for (op, impl_id), why in why_not(facts).impls.items()]


def _nested(table: Any) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (op, impl_id), value in sorted(dict(table).items()):
        nested.setdefault(op, {})[impl_id] = value
    return nested


def wrap_worker(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    path = parallel.worker_cls
    if isinstance(path, str) and path != "auto" and not path.startswith(f"{__name__}.{PREFIX}"):
        parallel.worker_cls = path_over(__name__, PREFIX, path)


def __getattr__(name: str) -> type:
    """Make the class of `wrap_worker` when vLLM imports it by its path."""
    made = over_class(__name__, PREFIX, name, PlannedWorker)
    if not issubclass(made, PlannedWorker):
        take_off()
    return made
