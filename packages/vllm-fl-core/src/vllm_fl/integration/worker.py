"""The worker: vLLM's own, with the plan made, verified, agreed on and sealed before the model is
built, and verified once more on the tensors of the model that was loaded."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..contracts.binding import Binding, IrPlace, LayerPlace
from ..dispatch import get_default_manager
from ..dispatch.context import building
from ..engine.determinism import find_variant
from ..engine.digest import code_facts, digest, fingerprint
from ..engine.facts import EngineFacts
from ..engine.live import Live
from ..engine.metrics import MetricsFile
from ..engine.opaque import is_opaque
from ..engine.plan import Plan, PlanEntry, leave_place, take_place
from ..engine.preflight import find_faults, release
from ..engine.tables import Standing, standing, under
from ..engine.warmup import warm_counts
from ..errors import VllmFLError
from ..logs import get_logger
from ..plugins.calling import start_in_worker
from ..plugins.types import OpImpl, WorkerContext
from ..text import quote
from . import probe, serving
from .bindings import installed_bindings
from .planning import apply, facts_of, load_plugins, plan_for, seal
from .ranks import Verdict, agree, common_table, differences, lacking
from .seams import attention, communicator, functions, fusions, operators, whole_layers
from .seams.ir import bind_provider, reset_priorities
from .seams.layers import (
    bind_anew,
    foreign_layers,
    forget_shared_layers,
    layer_for,
    layer_table,
    replace_layers,
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
    vllm_fl_layers: dict[str, int]
    vllm_fl_groups: communicator.Groups | None = None
    vllm_fl_unseal: Callable[[], object]
    vllm_fl_unseal_config: Callable[[], None]
    vllm_fl_operators: operators.Overrides
    vllm_fl_functions: functions.Replacements
    vllm_fl_overriders: dict[str, str]
    vllm_fl_metrics: MetricsFile | None
    vllm_fl_canary: Canary | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the methods of vLLM's worker that run the model say for which engine they do."""
        super().__init_subclass__(**kwargs)
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
        if groups is not None and not groups.entry.communicators:
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
        facts = self.vllm_fl_facts = facts_of(self.vllm_config)
        reports = _start_plugins(self)
        preflight = _Preflight(self, {name: report["facts"] for name, report in reports.items()})
        _adopt(self, *_verified_plan(self, preflight, alone=joins))
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
            _say_plan(self, took, preflight.limits(self.vllm_fl_plan))
        plan = self.vllm_fl_plan
        self.vllm_fl_layers = _built_layers(self, plan)
        _warn_of_unexpected_layers(self, plan)
        _name_overriders(self)
        self.vllm_fl_metrics = _metrics(self)
        return loaded

    def compile_or_warm_up_model(self) -> Any:
        """Warm vLLM's worker up, and name who has overridden an operator after us meanwhile.

        The model is compiled by then: what passes found in it is said, too. The steps that follow
        are those of requests, and may be sampled.
        """
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        _name_overriders(self)
        if self.rank == 0 and hasattr(self, "vllm_fl_plan"):
            fusions.say(self.vllm_fl_plan)
        if hasattr(self, "vllm_fl_plan"):
            self.vllm_fl_canary = _canary(self)
        return times

    def vllm_fl_report(self) -> dict[str, Any]:
        """What this worker runs with, and what it counted: for `collective_rpc`.

        Returns:
            JSON-able: `rank`, `mode`, `digest`, `ops` {op: {impl, reason}}, with `rows` [{up_to,
            impl, reason}] for an op that is ordered by size, `layers` {class of
            vLLM's: how many layers of the model are the plan's class}, `calls`, `fallbacks` and
            `refusals` {op: {impl id: count}}, `demotions` {op: {impl id: why}}. Calls are counted
            under VLLM_FL_DISPATCH_DEBUG=1. `operators` {op: {operator: what became of it}}, as
            `seams.operators.report` says; `functions` {op: {function: the same}}. `fusions` {op:
            {graphs, found}}: how many graphs vLLM's pass for the op went through, and in how many
            places it found the op. `defined` {operator: schema}: what this vLLM, an empty build,
            lacks, and is there while the engine is. `groups` {a group of ranks: the id of its
            communicator}; empty where the plan leaves them to vLLM. `table` {file, digest, acts,
            reason, left_out}: the table that the settings name, whether it acts, why it does not,
            and the ops whose rows do not count; None where they name none. `shadow`: what was
            compared while it served, as `Shadow.report` says; None where no step is sampled.
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
            "operators": operators.report(plan, self.vllm_fl_operators),
            "functions": functions.report(plan, self.vllm_fl_functions),
            "fusions": {op: dataclasses.asdict(s) for op, s in fusions.sites(plan).items()},
            "defined": self.vllm_fl_operators.schemas,
            "groups": dict(self.vllm_fl_groups.served) if self.vllm_fl_groups else {},
            "table": _table_report(self.vllm_fl_facts, self.vllm_fl_table),
            "shadow": self.vllm_fl_canary.shadow.report() if self.vllm_fl_canary else None,
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
                _nested(plan.calls) or "not counted",
            )
        if plan is not None:
            _leave_operators(self)
            leave_place(plan)
        if hasattr(self, "vllm_fl_unseal"):
            self.vllm_fl_unseal()
        super().shutdown()  # type: ignore[misc]


def _overrides(worker: PlannedWorker, plan: Plan) -> operators.Overrides:
    """Which operators the worker's plan overrides."""
    dtype = worker.vllm_fl_facts.dtype
    assert dtype is not None  # a worker has a model
    return operators.choose(plan, installed_bindings(), worker.device, dtype)


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
    chosen = _overrides(worker, plan)
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
    bind_provider(plan, worker.vllm_fl_digest)
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


def _verify_live(worker: PlannedWorker, preflight: _Preflight, *, alone: bool) -> list[str]:
    """Run the loaded model, compare, agree; again while an implementation had to be taken out.

    Nothing of it is left afterwards: neither on the path of a call nor in memory.

    Returns:
        What the start line says of it.

    Raises:
        VllmFLError: strict mode and a fault, on whichever rank.
    """
    if alone or not preflight.live_counts:
        return []
    start = time.monotonic()
    while True:
        plan = worker.vllm_fl_plan
        live, not_run = _seen_live(worker, sorted(preflight.live_counts, reverse=True))
        verdict = Verdict(worker.rank, live.faults, _strict_failure(plan, live.faults))
        verdicts = agree(verdict)
        new = _newly(verdicts, preflight.demoted)
        if not new:
            break
        _demote(worker, preflight, new)
        for op, impl_id in new:
            plan.record.demote(op, impl_id, preflight.demoted[op, impl_id])
        _leave_operators(worker)
        leave_place(plan)
        worker.vllm_fl_unseal_config()
        _adopt(worker, *_verified_plan(worker, preflight, alone=alone))
        _take_places(worker)
        for model in _models_of(worker).values():
            bind_anew(model, worker.vllm_fl_plan, worker.vllm_config)
    release(worker.device)
    if not_run:
        return [f"not on live tensors: {not_run}"]
    left_out = {op: f"{op} ({why})" for op, why in live.left_out.items()}
    table = installed_bindings()
    for op, entry in plan.entries.items():  # of a layer's op the model may have none
        if entry.impls and op not in live.called and not _meets_a_compiler(table.get(op)):
            left_out[op] = f"{op} (not called)"
    told = f"not compared there: {', '.join(left_out[op] for op in sorted(left_out))}"
    return [
        f"{live.compared} calls on live tensors in {time.monotonic() - start:.1f} s",
        *([told] if left_out else []),
    ]


def _seen_live(worker: PlannedWorker, counts: list[int]) -> tuple[Live, str]:
    """(what forwards of so many tokens each showed, why there was none or nothing)."""
    models = _models_of(worker)
    live = Live(worker.vllm_fl_plan, models, worker.device)
    if "" not in models:
        return live, "the worker shows no model"
    runner, config = getattr(worker, "model_runner", None), worker.vllm_config
    try:
        with serving.calling(worker.vllm_fl_plan), live.watching():
            for tokens in counts:
                if not_run := probe.forward(runner, models[""], config, tokens):
                    return live, not_run
    except Exception as error:  # vLLM's own, for a model that its dummy run does not fit
        log.warning("No verification on live tensors: the forward failed", exc_info=True)
        return live, f"the forward failed: {quote(error)}"
    return live, ""


def _models_of(worker: PlannedWorker) -> dict[str, torch.nn.Module]:
    """The model and its draft model, by what the names of their layers begin with here."""
    runner = getattr(worker, "model_runner", None)
    draft = getattr(runner, "get_draft_model", lambda: None)
    found: dict[str, Any] = {"": _model_of(worker), "(draft model) ": draft()}
    # What drafts by other means than a model, as n-grams, may keep anything under that name.
    return {prefix: model for prefix, model in found.items() if hasattr(model, "named_modules")}


def _say_plan(worker: PlannedWorker, took: list[str], limits: list[str]) -> None:
    """The start line, and what goes with it; rank 0 says it once."""
    if worker.rank != 0:
        return
    facts, plan = worker.vllm_fl_facts, worker.vllm_fl_plan
    refused = attention.refusals(facts) | whole_layers.refusals(facts)
    refused |= communicator.refusals(facts)
    said = (f"{op}: {impl_id} {why}" for (op, impl_id), why in refused.items())
    remarks = [*_of_table(facts, worker.vllm_fl_table), *_of_invariance(worker, plan)]
    remarks += [*limits, *said]
    _warn_of_foreign_layers(plan)
    log.info("%s", plan.line(*took, f"digest {worker.vllm_fl_digest}", *remarks))
    _say_what_is_taken_whole(plan)


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
        traces = (entry.trace, *(trace for _, trace in entry.rows)) if entry else ()
        chosen = [t.selected for t in traces if isinstance(t.selected, OpImpl)]
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


def _verified_plan(
    worker: PlannedWorker, preflight: _Preflight, *, alone: bool
) -> tuple[Plan, dict[str, Any]]:
    """Resolve, run and compare, agree; again while an implementation had to be taken out.

    Returns:
        (the plan, what it consists of).

    Raises:
        VllmFLError: strict mode and a fault, on whichever rank.
    """
    rank, demoted, rejected = worker.rank, preflight.demoted, preflight.rejected
    snapshot = get_default_manager().registry.snapshot()
    required = "batch_invariant" if worker.vllm_fl_facts.wants_invariance else ""
    table = standing(worker.vllm_fl_facts, snapshot, worker.device)
    while True:
        plan = plan_for(worker.vllm_fl_facts, {**rejected, **demoted}, table=table)
        consists = fingerprint(
            plan, snapshot.owners, snapshot.authors, table=table.digest, required=required
        )
        contents = {**consists, "workers": preflight.worker_facts}
        verdict = dataclasses.replace(
            preflight.verdict(plan, contents),
            table=table,
            installed=frozenset(snapshot.owners),
        )
        unmet = "; ".join(
            filter(
                None,
                (
                    *(entry.unmet for entry in plan.entries.values()),
                    _fault_of(table) if plan.strict else "",
                ),
            )
        )
        if unmet and not verdict.failure:
            verdict = dataclasses.replace(verdict, failure=unmet)
        verdicts = [verdict] if alone else agree(verdict)
        common = common_table(verdicts)
        is_strict = any(v.facts.get("strict") for v in verdicts)
        lacks = {key: at for key, at in lacking(verdicts).items() if key not in demoted}
        unusable = [*filter(None, [_fault_of(common)]), *map(_lack_of, lacks.items())]
        new = _newly(verdicts, demoted, "; ".join(unusable) if is_strict else "")
        barred = {
            key: (v.rank, reason)
            for v in reversed(verdicts)
            for key, reason in v.rejections.items()
            if key not in rejected
        }
        told = {(v.table.digest, frozenset(v.table.left_out)) for v in verdicts}
        table = common
        same_table = told == {(common.digest, frozenset(common.left_out))}
        if not new and not lacks and not barred and same_table:
            break
        _demote(worker, preflight, new)
        for (op, impl_id), (at, what) in lacks.items():
            if rank == 0:
                log.warning(
                    "Implementation '%s' of op '%s' is off on all ranks: rank %d lacks it. "
                    "Install %s on its node",
                    impl_id,
                    op,
                    at,
                    what,
                )
            demoted[op, impl_id] = f"rank {at} lacks it: {what} is not installed there"
        for (op, impl_id), (at, reason) in barred.items():
            if rank == 0:
                log.warning(
                    "Implementation '%s' is rejected for op '%s': %s (measured at start, on rank "
                    "%d; off on all)",
                    impl_id,
                    op,
                    reason,
                    at,
                )
            rejected[op, impl_id] = reason
    worker.vllm_fl_table = table
    if rank == 0:
        if table.reason:
            log.warning("%s. Going on without a table", table.reason)
        for op, why in table.left_out.items():
            log.warning("The table's rows of op '%s' have no effect: %s", op, why)
        for line in differences(verdicts):
            log.warning("The ranks differ. %s", line)
    for (op, impl_id), reason in demoted.items():
        plan.record.demote(op, impl_id, reason)
    preflight.live_counts = frozenset[int]().union(*(v.counts for v in verdicts))
    return plan, contents


def _newly(
    verdicts: list[Verdict], demoted: Mapping[tuple[str, str], str], unusable: str = ""
) -> dict[tuple[str, str], tuple[int, str]]:
    """(op, impl id) -> (the rank that found it, why it must not serve), of what still serves.

    Raises:
        VllmFLError: a rank cannot go on, or what they have in common is `unusable`.
    """
    failures = [f"rank {v.rank}: {v.failure}" for v in verdicts if v.failure]
    if failures or unusable:
        raise VllmFLError(f"vllm-fl ends the start: {'; '.join(failures) or unusable}")
    return {
        key: (v.rank, reason)
        for v in reversed(verdicts)
        for key, reason in v.faults.items()
        if key not in demoted
    }


def _demote(
    worker: PlannedWorker, preflight: _Preflight, new: dict[tuple[str, str], tuple[int, str]]
) -> None:
    """Take out what a rank has found, on this one, too."""
    for (op, impl_id), (at, reason) in new.items():
        if worker.rank == 0:
            log.warning(
                "Implementation '%s' failed for op '%s': %s (found at start, on rank %d; off on "
                "all)",
                impl_id,
                op,
                reason,
                at,
            )
        preflight.demoted[op, impl_id] = f"failed at start on rank {at}: {reason}"


def _strict_failure(plan: Plan, reasons: Mapping[tuple[str, str], str]) -> str:
    """Why strict mode ends the start: implementations failed."""
    if not plan.strict or not reasons:
        return ""
    return "strict mode, and " + "; ".join(
        f"implementation '{impl_id}' failed for op '{op}': {reason}"
        for (op, impl_id), reason in reasons.items()
    )


def _fault_of(table: Standing) -> str:
    """Why strict mode ends the start: a table that was named does not act, or not whole."""
    left_out = (f"the table's rows of op '{op}': {why}" for op, why in table.left_out.items())
    found = "; ".join(filter(None, (table.reason, *left_out)))
    return f"strict mode, and {found}" if found else ""


def _lack_of(lack: tuple[tuple[str, str], tuple[int, str]]) -> str:
    """Why strict mode ends the start: what is installed on one rank is not on another."""
    (op, impl_id), (at, what) = lack
    return f"strict mode, and rank {at} lacks implementation '{impl_id}' of op '{op}' ({what})"


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


class _Preflight:
    """Runs and compares what a plan may call, each implementation once.

    It holds what a start has found: `demoted` and, where only batch-invariant implementations may
    serve, `rejected`, each (op, impl id) -> why; `live_counts`, the token
    counts at which all ranks run the loaded model; and `worker_facts`, what plugins have reported.
    """

    def __init__(
        self, worker: PlannedWorker, worker_facts: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.worker_facts = dict(worker_facts)
        groups = worker.vllm_fl_groups
        self.demoted: dict[tuple[str, str], str] = {
            key: f"failed at start on rank {fault.rank}: {fault.why}"
            for key, fault in (groups.faults.items() if groups is not None else ())
        }
        self.rejected: dict[tuple[str, str], str] = {}
        self.live_counts: frozenset[int] = frozenset()
        self.facts, self.rank, self.device = worker.vllm_fl_facts, worker.rank, worker.device
        self.how = self.facts.settings.preflight
        self.seed = random.SystemRandom().randrange(1 << 32)
        self.remarks: list[str] = []
        self._passed: set[tuple[str, str, bool, bool, bool]] = set()

    def verdict(self, plan: Plan, contents: dict[str, Any]) -> Verdict:
        """This rank's verdict. It never raises: the other ranks wait for it."""
        try:
            reasons = attention.faults(plan, self.facts) | whole_layers.faults(plan)
            found, rejections = self._found(plan)
            reasons |= found
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may raise anything, SystemExit included
            log.exception("vllm-fl could not verify the plan")
            return Verdict(self.rank, failure=quote(error), facts=contents)
        failure = _strict_failure(plan, reasons)
        return Verdict(
            self.rank,
            reasons,
            failure,
            contents,
            counts=self._live_counts(plan),
            rejections=rejections,
        )

    def _live_counts(self, plan: Plan) -> frozenset[int]:
        """How many tokens this rank wants the loaded model run with, one run each: none where it
        has nothing to compare, and with orders by size also as many as a row is for."""
        entries = [entry for entry in plan.entries.values() if entry.impls]
        if self.how != "verify" or not entries:
            return frozenset()
        largest = self.facts.sizes.tokens[-1] if self.facts.sizes else 1
        counts = {*probe.COUNTS, *(n for entry in entries for n, _ in entry.by_row)}
        return frozenset(min(n, largest, probe.TOKENS) for n in counts)

    def _found(self, plan: Plan) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], str]]:
        """(op, impl id) -> why it must not serve, of every candidate that may take over a call:
        its faults; and of those without, what keeps them out where only batch-invariant ones may
        serve."""
        if self.how == "off":
            return {}, {}
        chosen, compiled, warm, captured = [], {}, {}, {}
        table = installed_bindings()
        for op, entry in plan.entries.items():
            for impl in entry.impls:
                is_traced = plan.mode == "compiled" and _meets_a_compiler(table.get(op))
                is_compiled = is_traced and impl in entry.firsts
                counts = self._warm_counts(entry, impl)
                in_layers = _meets_a_compiler(table.get(op)) and impl in entry.firsts
                tokens = self._captured_tokens(plan, impl) if in_layers else 0
                key = op, impl.impl_id, is_compiled, bool(counts), bool(tokens)
                if key in self._passed:
                    continue
                self._passed.add(key)
                chosen.append(impl)
                if is_compiled:
                    compiled[op, impl.impl_id] = plan.as_compiled(op, impl)
                if counts:
                    warm[op, impl.impl_id] = counts
                if tokens:
                    captured[op, impl.impl_id] = tokens
        assert self.facts.dtype is not None  # a worker has a model
        found = find_faults(
            chosen,
            self.facts.dtype,
            self.device,
            self.facts.sizes,
            backend=self.facts.lowering(self.device),
            compares=self.how == "verify",
            compiled=compiled,
            layer_for=layer_for,
            seed=self.seed,
            owners=get_default_manager().registry.snapshot().owners,
            specs=plan.contracts,
            warm=warm,
            captured=captured,
        )
        self.remarks += found.remarks
        asks = self.facts.wants_invariance
        variant = find_variant(
            [i for i in chosen if asks and (i.op_name, i.impl_id) not in found.faults],
            self.facts.dtype,
            self.device,
            self.facts.sizes,
            backend=self.facts.lowering(self.device),
            compiled=compiled,
            layer_for=layer_for,
            seed=self.seed,
            specs=plan.contracts,
        )
        faults = {key: reason for key, (reason, _) in found.faults.items()}
        return faults, {key: f"{asks}, and it is {why}" for key, why in variant.items()}

    def _warm_counts(self, entry: PlanEntry, impl: OpImpl) -> list[int]:
        """The token counts at which `impl` must have run before it serves: none for a later choice.

        Plain PyTorch compiles nothing when it is called, and what is traced is part of a graph.
        """
        sizes = self.facts.sizes
        if sizes is None or not is_opaque(impl):
            return []
        largest = sizes.tokens[-1]
        ceilings = [ceiling for ceiling, _ in entry.by_row]
        every = warm_counts(largest, self.facts.captured, ceilings)
        rows = zip((0, *ceilings), (*entry.by_row, (largest, entry.candidates)), strict=True)
        return [
            n
            for below, (ceiling, impls) in rows
            if [i for i in impls if isinstance(i, OpImpl)][:1] == [impl]
            for n in every
            if below < n <= ceiling
        ]

    def _captured_tokens(self, plan: Plan, impl: OpImpl) -> int:
        """How many tokens of `impl`, which serves in layers, to capture in a graph; 0 for none.

        A compiler's own code takes the place of what it traces. What operators and functions reach
        may run between graphs, as caches and prompts do: that it cannot be captured is no fault.
        """
        if self.device.type != "cuda" or (plan.mode == "compiled" and not is_opaque(impl)):
            return 0
        return max((n for n in self.facts.captured if n <= probe.TOKENS), default=0)

    def limits(self, plan: Plan) -> list[str]:
        """What the start could not look at, one phrase each, and the seed of what it drew."""
        if self.how == "off" or not any(entry.impls for entry in plan.entries.values()):
            return []
        sizes, table = self.facts.sizes, installed_bindings()
        planned = [table[op] for op, e in plan.entries.items() if e.impls and op in table]
        asked = {rule.name for binding in planned for rule in binding.sizes}
        unknown = [name for name in (sizes.unknown if sizes else ()) if name in asked]
        told = f"the configuration does not tell {', '.join(unknown)}: not verified at its sizes"
        return [f"seed {self.seed}", *([told] if unknown else ()), *self.remarks]


def _meets_a_compiler(binding: Binding | None) -> bool:
    """Whether compiled code calls the op: operators and functions are called behind a compiler."""
    places = binding.places if binding else ()
    return any(isinstance(place, LayerPlace | IrPlace) for place in places)


def _say_what_is_taken_whole(plan: Plan) -> None:
    """Name the ops that a compiler takes whole since they are ordered by size."""
    table = installed_bindings()
    ops = [
        op
        for op, entry in plan.entries.items()
        if plan.mode == "compiled" and entry.by_row and _meets_a_compiler(table.get(op))
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
    module, _, cls = name.removeprefix(PREFIX).replace("__", ".").rpartition(".")
    base = getattr(import_module(module), cls)
    worker = type(f"{cls}FL", (PlannedWorker, base), {"__module__": __name__, "__qualname__": name})
    globals()[name] = worker
    return worker
