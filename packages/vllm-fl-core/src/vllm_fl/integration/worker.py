"""The worker: vLLM's own, with the plan made, verified, agreed on and sealed before the model is
built, and verified once more on the tensors of the model that was loaded."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

from ..dispatch import get_default_manager
from ..dispatch.context import building
from ..engine.digest import code_facts, digest
from ..engine.facts import EngineFacts
from ..engine.metrics import MetricsFile
from ..engine.plan import Plan, leave_place, take_place
from ..engine.tables import Standing, under
from ..logs import get_logger
from ..plugins.calling import start_in_worker
from ..plugins.types import OpImpl, WorkerContext
from . import after, ranges, serving
from .models import skeleton_of
from .places import installed_bindings
from .planning import apply, facts_of, load_plugins, seal
from .seams import (
    attention,
    communicator,
    functions,
    fusions,
    operators,
    torch_operators,
    whole_layers,
)
from .seams.ir import bind_provider, reset_priorities
from .seams.layers import (
    bind_anew,
    foreign_layers,
    forget_shared_layers,
    layer_table,
    replace_layers,
)
from .seams.lookups import named
from .verifying import (
    Preflight,
    meets_a_compiler,
    planned_for_nothing,
    taken_out,
    verified_plan,
    verify_live,
    verify_with_cache,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from .canary import Canary

__all__ = ["PlannedWorker", "wrap_worker"]

PREFIX = "Planned__"

log = get_logger("engine")


class PlannedWorker:
    """What we change of a worker. Mixed in before the class that vLLM chose."""

    vllm_config: VllmConfig
    device: torch.device
    rank: int
    vllm_fl_facts: EngineFacts
    vllm_fl_plan: Plan
    vllm_fl_digest: str
    vllm_fl_table: Standing
    vllm_fl_preflight: Preflight
    vllm_fl_layers: dict[str, int]
    vllm_fl_groups: communicator.Groups | None = None
    vllm_fl_unseal: Callable[[], object]
    vllm_fl_unseal_config: Callable[[], None]
    vllm_fl_operators: operators.Overrides
    vllm_fl_functions: functions.Replacements
    vllm_fl_overriders: dict[str, str]
    vllm_fl_metrics: MetricsFile | None
    vllm_fl_canary: Canary | None = None
    vllm_fl_since: after.Since | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the methods of vLLM's worker that run the model say for which engine they do, and
        those that change weights or memory that they did."""
        super().__init_subclass__(**kwargs)
        after.watch(cls)
        for name in serving.RUNS_MODEL:
            if hasattr(cls, name):
                setattr(cls, name, serving.with_own_plan(getattr(cls, name)))

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        """Load the plugins that the engine's settings allow: vLLM's own start asks for norms."""
        load_plugins(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]

    def init_device(self) -> Any:
        """Open the device, and let the ranks agree on what they exchange tensors through."""
        facts = facts_of(self.vllm_config)
        groups = communicator.Groups(facts) if facts.communicator is not None else None
        if groups is not None and not groups.communicators:
            groups = None
        with communicator.made_by(groups):
            opened = super().init_device()  # type: ignore[misc]
            if groups is not None:
                groups.settle()
        self.vllm_fl_groups = groups
        return opened

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Seal the plan, build the model on it, verify it on live tensors, and say it once."""
        # A rank that joins a running engine (elastic EP) meets ranks that do not gather any more.
        joins = bool(kwargs.get("load_dummy_weights"))
        start = time.monotonic()
        replace_layers()
        facts = self.vllm_fl_facts = _facts_of_model(self.vllm_config)
        reports = _start_plugins(self)
        preflight = Preflight(self, {name: report["facts"] for name, report in reports.items()})
        _adopt(self, *verified_plan(self, preflight, alone=joins))
        preflight.not_reached |= planned_for_nothing(self.vllm_fl_plan, facts)
        how = {"verify": "verified in", "run": "run in", "off": "not verified;"}
        took = [f"{how[facts.settings.preflight]} {time.monotonic() - start:.1f} s"]
        if self.rank == 0:
            for report in reports.values():
                for line in report["lines"]:
                    log.info("%s", line)
        manager = get_default_manager()
        self.vllm_fl_unseal = manager.seal(f"the engine's worker (rank {self.rank})")
        attention.forget_choices()
        forget_shared_layers()
        try:
            _take_places(self)
            plan = self.vllm_fl_plan
            with building(plan), serving.calling(plan), whole_layers.in_place(plan):
                loaded = super().load_model(*args, **kwargs)  # type: ignore[misc]
            took += _verify_live(self, preflight, alone=joins)
        except BaseException:
            _leave_operators(self)
            raise
        finally:
            _say_plan(self, took, preflight)
        self.vllm_fl_preflight = preflight
        plan = self.vllm_fl_plan
        self.vllm_fl_layers = _built_layers(self, plan)
        _warn_of_unexpected_layers(self, plan)
        _name_overriders(self)
        self.vllm_fl_metrics = _metrics(self)
        if not joins:
            self.vllm_fl_since = after.Since(lambda: _models_of(self))
        return loaded

    def compile_or_warm_up_model(self) -> Any:
        """Warm vLLM's worker up, and name who has overridden an operator after us meanwhile.

        Before that the KV cache is there, and no graph is captured: the plan is verified once more.
        The model is compiled behind it: what passes found in it is said, too. The steps that follow
        are those of requests, and may be sampled.
        """
        if self.vllm_fl_since is not None:
            _verify_with_cache(self)
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        _name_overriders(self)
        if self.rank == 0 and hasattr(self, "vllm_fl_plan"):
            fusions.say(self.vllm_fl_plan)
        if hasattr(self, "vllm_fl_plan"):
            # Steps of warming up are none of a request; of compiled code only tracings are seen.
            self.vllm_fl_plan.record.begin(keeps_calls=self.vllm_fl_plan.mode == "compiled")
            self.vllm_fl_canary = _canary(self)
        return times

    def vllm_fl_verify(self) -> str:
        """Compare the plan once more on the loaded model's tensors: for `collective_rpc`.

        For weights that were updated by other ways than vLLM's own, which do it themselves.

        Returns:
            What was compared, or why nothing was.

        Raises:
            ServingError: something is wrong, on whichever rank; the last one raises it.
        """
        if self.vllm_fl_since is None:
            return "nothing is verified: this rank has joined a running engine"
        return after.verify(self, "it was asked for")

    def vllm_fl_report(self) -> dict[str, Any]:
        """What this worker runs with, and what it counted: for `collective_rpc`.

        Returns:
            JSON-able: `rank`, `mode`, `digest`, `ops` {op: {impl, reason}}, with `rows` [{up_to,
            impl, reason}] for an op that is ordered by size, `layers` {class of
            vLLM's: how many layers of the model are the plan's class}, `calls`, `fallbacks` and
            `refusals` {op: {impl id: count}}, `demotions` and `rejections` {op: {impl id: why}}:
            what the start took out since it failed, and since it refuses all calls of this model
            or lacks a property that is asked for. `not_reached` {op: why}: what is planned and this
            engine is not seen to call. Counters begin when the engine is about to serve; a call is
            counted to who computed it, under VLLM_FL_DISPATCH_DEBUG=1. `operators` {op: {operator:
            what became of it}}, as `seams.operators.report` says; `functions` {op: {function: the
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
            and the ops whose rows do not count; None where they name none. `shadow`: what was
            compared while it served, as `Shadow.report` says; None where no step is sampled.
            `wrong` {op: {impl id: why}}: what serves and was found wrong when the weights had been
            updated.
        """
        plan = self.vllm_fl_plan
        return {
            "rank": self.rank,
            "mode": plan.mode,
            "digest": self.vllm_fl_digest,
            "ops": {op: entry.told for op, entry in plan.entries.items()},
            "layers": self.vllm_fl_layers,
            "calls": _nested(plan.calls),
            "fallbacks": _nested(plan.fallbacks),
            "refusals": _nested(plan.record.refusals),
            "demotions": _nested(plan.record.demotions),
            "rejections": _nested(self.vllm_fl_preflight.rejected),
            "not_reached": dict(self.vllm_fl_preflight.not_reached),
            "operators": operators.report(plan, self.vllm_fl_operators),
            "functions": functions.report(plan, self.vllm_fl_functions),
            "fusions": {op: dataclasses.asdict(known) for op, known in fusions.sites(plan).items()},
            "ranges": ranges.report(plan, self.vllm_config),
            "defined": self.vllm_fl_operators.schemas,
            "smaller": dict(self.vllm_fl_preflight.smaller),
            "groups": dict(self.vllm_fl_groups.served) if self.vllm_fl_groups else {},
            "table": _table_report(self.vllm_fl_facts, self.vllm_fl_table),
            "shadow": self.vllm_fl_canary.shadow.report() if self.vllm_fl_canary else None,
            "wrong": _nested(self.vllm_fl_since.wrong if self.vllm_fl_since else {}),
        }

    def shutdown(self) -> None:
        """Say what fell back while the engine ran, and shut vLLM's worker down."""
        for watching in ("vllm_fl_canary", "vllm_fl_metrics"):
            if getattr(self, watching, None) is not None:
                getattr(self, watching).close()
        plan = getattr(self, "vllm_fl_plan", None)
        if plan is not None and (plan.fallbacks or plan.counts_calls):
            log.info(
                "rank %d: fallbacks %s, calls %s",
                self.rank,
                _nested(plan.fallbacks) or "none",
                _nested(plan.calls) or ("none" if plan.counts_calls else "not counted"),
            )
        if plan is not None:
            _leave_operators(self)
            leave_place(plan)
        if hasattr(self, "vllm_fl_unseal"):
            self.vllm_fl_unseal()
        super().shutdown()  # type: ignore[misc]


def _facts_of_model(vllm_config: VllmConfig) -> EngineFacts:
    """What the configuration says, and what the model is made of."""
    facts = facts_of(vllm_config)
    skeleton = skeleton_of(vllm_config)
    if skeleton is None:
        return facts
    log.debug("The model's layers: %s", dict(skeleton.layers))
    absent = facts.absent | skeleton.absent
    return dataclasses.replace(facts, absent=absent, provided=skeleton.provided)


def _canary(worker: PlannedWorker) -> Canary | None:
    """What samples this worker's steps, where the settings say so."""
    if worker.vllm_fl_facts.settings.shadow is None:
        return None
    from .canary import watch  # which no other engine needs

    return watch(worker, worker.vllm_fl_plan, _model_of(worker))


def _metrics(worker: PlannedWorker) -> MetricsFile | None:
    """The file of this worker's counters, where the settings name one."""
    named = worker.vllm_fl_facts.settings.metrics
    if named is None:
        return None
    # vLLM's own number of a replica is 0 in all of them where the model has no experts.
    replica = getattr(worker.vllm_config.parallel_config, "data_parallel_index", 0)
    return MetricsFile(
        named,
        worker.vllm_fl_plan,
        worker.vllm_fl_digest,
        rank=worker.rank,
        replica=replica,
        shadow=lambda: worker.vllm_fl_canary.shadow if worker.vllm_fl_canary else None,
    )


def _name_overriders(worker: PlannedWorker) -> None:
    """Say, once for each, whose kernels now run in the place of the plan's."""
    plan = getattr(worker, "vllm_fl_plan", None)
    for name, who in operators.overriders(plan).items() if plan is not None else ():
        if worker.vllm_fl_overriders.get(name) != who:
            worker.vllm_fl_overriders[name] = who
            log.warning(
                "Operator %s was overridden after vllm-fl, by %s: the plan's implementation runs "
                "in it only if that calls it",
                name,
                who,
            )


def _adopt(worker: PlannedWorker, plan: Plan, contents: dict[str, Any]) -> None:
    """Make `plan` the worker's, and its digest part of the engine's configuration."""
    plan = take_place(plan)
    if plan.place > 1:  # its operators have other names: compiled code of another's is not its
        contents = {**contents, "place": plan.place}
    dtype = worker.vllm_fl_facts.dtype
    assert dtype is not None  # a worker has a model
    chosen = operators.choose(plan, installed_bindings(), worker.device, dtype)
    replaced = functions.choose(plan, installed_bindings())
    contents = {
        **contents,
        "operators": chosen.names,
        "defined": chosen.schemas,
        "functions": replaced.names,
    }
    worker.vllm_fl_plan, worker.vllm_fl_digest = plan, digest(contents)
    worker.vllm_fl_operators, worker.vllm_fl_overriders = chosen, {}
    worker.vllm_fl_functions = replaced
    by_range = ranges.is_compiled_by_range(worker.vllm_config)
    bind_provider(plan, worker.vllm_fl_digest, by_range=by_range)
    apply(plan, worker.vllm_config)
    reset_priorities(plan, worker.vllm_config)
    worker.vllm_fl_unseal_config = seal(worker.vllm_config, worker.vllm_fl_digest)


def _take_places(worker: PlannedWorker) -> None:
    """From now on vLLM's operators and functions run what the worker's plan says, in its engine."""
    plan = worker.vllm_fl_plan
    serving.begin(plan, worker.vllm_config)
    operators.take(plan, worker.vllm_fl_operators, worker.device)
    functions.take(plan, worker.vllm_fl_functions)
    fusions.watch(plan)
    torch_operators.watch(plan)


def _verify_live(worker: PlannedWorker, preflight: Preflight, *, alone: bool) -> list[str]:
    """Verify the plan on the loaded model's tensors, where the ranks ask for it.

    Returns:
        What the start line says of it.

    Raises:
        StartError: strict mode and a fault, on whichever rank.
    """
    if alone or not preflight.live_counts:
        return []
    models = _models_of(worker)
    return verify_live(worker, models, preflight, lambda: _renew(worker, models, preflight))


def _renew(
    worker: PlannedWorker, models: Mapping[str, torch.nn.Module], preflight: Preflight
) -> None:
    """Make another plan, without what was taken out, and bind the models to it."""
    _leave_operators(worker)
    leave_place(worker.vllm_fl_plan)
    worker.vllm_fl_unseal_config()
    _adopt(worker, *verified_plan(worker, preflight, alone=False))
    _take_places(worker)
    for model in models.values():
        bind_anew(model, worker.vllm_fl_plan, worker.vllm_config)


def _verify_with_cache(worker: PlannedWorker) -> None:
    """Verify the plan once more, with the KV cache in memory; a plan that changes is said anew."""
    preflight, before = worker.vllm_fl_preflight, worker.vllm_fl_plan
    if not preflight.live_counts:
        return
    models = _models_of(worker)
    told = verify_with_cache(worker, models, preflight, lambda: _renew(worker, models, preflight))
    if worker.vllm_fl_plan is not before:
        _say_plan(worker, [told], preflight)
        if worker.vllm_fl_metrics is not None:
            worker.vllm_fl_metrics.close()
            worker.vllm_fl_metrics = _metrics(worker)
    elif worker.rank == 0:
        log.info("%s", told)


def _models_of(worker: PlannedWorker) -> dict[str, torch.nn.Module]:
    """The model and its draft model, by what the names of their layers begin with here."""
    runner = getattr(worker, "model_runner", None)
    draft = getattr(runner, "get_draft_model", lambda: None)
    found: dict[str, Any] = {"": _model_of(worker), "(draft model) ": draft()}
    # What drafts by other means than a model, as n-grams, may keep anything under that name.
    return {prefix: model for prefix, model in found.items() if hasattr(model, "named_modules")}


def _say_plan(worker: PlannedWorker, took: list[str], preflight: Preflight) -> None:
    """The start line, and what goes with it; rank 0 says it once."""
    if worker.rank != 0:
        return
    facts, plan = worker.vllm_fl_facts, worker.vllm_fl_plan
    refused = attention.refusals(facts) | whole_layers.refusals(facts)
    refused |= communicator.refusals(facts)
    said = (f"{op}: {impl_id} {why}" for (op, impl_id), why in refused.items())
    remarks = [*_of_table(facts, worker.vllm_fl_table), *_of_invariance(worker, plan)]
    remarks += [*preflight.limits(plan), *_of_length(worker), *said]
    _warn_of_foreign_layers(plan)
    inlined = ranges.planned(plan, worker.vllm_config)
    remarks += [f"{op} {ranges.told(chosen)}" for op, chosen in inlined.items()]
    told = (*taken_out(plan, preflight), *took, f"digest {worker.vllm_fl_digest}", *remarks)
    log.info("%s", plan.line(*told, not_reached=preflight.not_reached))
    _say_what_is_taken_whole(plan, inlined)


def _leave_operators(worker: PlannedWorker) -> None:
    """Give vLLM its operators and functions back."""
    operators.remove(worker.vllm_fl_plan)
    functions.remove(worker.vllm_fl_plan)
    serving.end(worker.vllm_fl_plan)


def _warn_of_foreign_layers(plan: Plan) -> None:
    """Name each layer that another plugin has replaced, its owner, and what does not run in it."""
    foreign = foreign_layers()
    owners = get_default_manager().registry.snapshot().owners
    for layer in layer_table() if foreign else ():
        entry = plan.entries.get(layer.op)
        # Of the traces, since the entry itself has no candidates under a note that names the owner.
        firsts = [trace.selected for _, trace in entry.rows] if entry else []
        chosen = [impl for impl in firsts if isinstance(impl, OpImpl)]
        if layer.cls in foreign and chosen:
            impl = chosen[0]
            log.warning(
                "Layer %s is left to %s, which replaced it before vllm-fl; '%s' of %s does not run "
                "in it",
                layer.cls,
                foreign[layer.cls],
                impl.impl_id,
                owners[layer.op, impl.impl_id].name,
            )


def _built_layers(worker: PlannedWorker, plan: Plan) -> dict[str, int]:
    """How many layers of the model are the plan's class, for each whole layer; rank 0 says so."""
    if not plan.layers:
        return {}
    model = _model_of(worker)
    if model is None:
        log.warning("This worker shows no model: whether whole layers serve in it is not known")
        return {}
    found = whole_layers.served(plan, model)
    for name, served in found.items() if worker.rank == 0 else ():
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


def _model_of(worker: PlannedWorker) -> torch.nn.Module | None:
    """The model, where the worker shows it: a device's own need not."""
    try:
        model: torch.nn.Module = worker.get_model()  # type: ignore[attr-defined]
    except NotImplementedError:
        return None
    return model


def _warn_of_unexpected_layers(worker: PlannedWorker, plan: Plan) -> None:
    """Name the layers whose op was not planned, since the configuration speaks of no such thing."""
    model = _model_of(worker) if worker.rank == 0 else None
    table = {layer.cls: layer for layer in layer_table() if layer.op not in plan.entries}
    if model is None or not table:
        return
    bases = tuple(layer.base for layer in table.values())
    found = Counter(
        next(cls.__name__ for cls in type(module).__mro__ if cls.__name__ in table)
        for module in model.modules()
        if isinstance(module, bases)
    )
    for name, count in found.items():
        op = table[name].op
        log.warning(
            "Layer %s: %d in this model, though its configuration did not say so: op '%s' is not "
            "planned, and they are vLLM's own. VLLM_FL_PER_OP='%s=…' plans it",
            name,
            count,
            op,
            op,
        )


def _start_plugins(worker: PlannedWorker) -> dict[str, dict[str, Any]]:
    """Run the plugins' `worker_start` hooks; distribution -> its lines and facts."""
    facts, startup = worker.vllm_fl_facts, get_default_manager().startup
    context = WorkerContext(
        facts.settings,
        worker.device,
        facts.dtype,
        worker.rank,
        worker.vllm_config,
        facts.wants_invariance,
    )
    found = start_in_worker(startup.plugins if startup else (), context)
    return {
        name: {
            "lines": list(report.lines),
            "facts": {
                **report.facts,
                "(code)": code_facts(plugin.owner, plugin.target.partition(":")[0]),
            },
        }
        for name, (plugin, report) in found.items()
    }


def _of_table(facts: EngineFacts, table: Standing) -> list[str]:
    """What the start line says of the table that the settings name."""
    pinned = facts.settings.pinned
    if pinned is None:
        return []
    return [pinned.label if table.digest else f"without the table {pinned.file}"]


def _of_invariance(worker: PlannedWorker, plan: Plan) -> list[str]:
    """What the start line says where only batch-invariant implementations may serve."""
    facts = worker.vllm_fl_facts
    if not facts.wants_invariance:
        return []
    told = [f"{facts.wants_invariance}: measured; vLLM's own code is not"]
    settings, manager = under(facts, worker.vllm_fl_table).settings, get_default_manager()
    by_size = [
        op for op in plan.entries if manager.ceilings(op, mode=facts.mode, settings=settings)
    ]
    if by_size:
        told.append(f"one order for all sizes, so that rows have no effect: {', '.join(by_size)}")
    return told


def _of_length(worker: PlannedWorker) -> list[str]:
    """What the start line says where an engine is longer than the tables that are made for it."""
    sizes = worker.vllm_fl_facts.sizes
    length = worker.vllm_config.model_config.max_model_len
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
    for (op, impl_id), value in sorted(table.items()):
        nested.setdefault(op, {})[impl_id] = value
    return nested


def wrap_worker(vllm_config: VllmConfig) -> None:
    """Put our worker in front of the one that vLLM chose, once."""
    parallel = vllm_config.parallel_config
    path = parallel.worker_cls
    if isinstance(path, str) and path != "auto" and not path.startswith(f"{__name__}.{PREFIX}"):
        parallel.worker_cls = f"{__name__}.{PREFIX}{path.replace('.', '__')}"


def __getattr__(name: str) -> type:
    """Only a path travels to the workers: the class is made from it on demand."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = named(name.removeprefix(PREFIX).replace("__", "."))
    worker = type(
        f"{base.__name__}FL", (PlannedWorker, base), {"__module__": __name__, "__qualname__": name}
    )
    globals()[name] = worker
    return worker
