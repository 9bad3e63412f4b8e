"""What a worker verifies at its start, and agrees on with the other ranks: its plan on made inputs
before the model is built, then once more on the tensors of the model that was loaded."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..contracts.binding import Binding, FusionPlace, GraphPlace, IrPlace, LayerPlace
from ..dispatch import get_default_manager
from ..engine.determinism import find_variant
from ..engine.digest import fingerprint
from ..engine.facts import EngineFacts
from ..engine.live import Live
from ..engine.opaque import is_opaque
from ..engine.plan import Plan, PlanEntry
from ..engine.preflight import find_faults
from ..engine.tables import Standing, standing
from ..engine.trials import Request, Role, release
from ..engine.warmup import warm_counts
from ..errors import StartError
from ..logs import get_logger
from ..plugins.types import OpImpl
from ..settings.policy import at_size
from ..text import quote
from . import probe, serving
from .places import installed_bindings
from .planning import plan_for
from .ranks import Ran, Verdict, agree, common_table, differences, lacking, refusing, warn_of_fault
from .seams import attention, fusions, whole_layers
from .seams.layers import foreign_code, layer_for, layer_table

if TYPE_CHECKING:
    import torch

    from .worker import PlannedWorker

__all__ = [
    "Preflight",
    "meets_a_compiler",
    "planned_for_nothing",
    "seen_again",
    "taken_out",
    "verified_plan",
    "verify_live",
    "verify_with_cache",
    "without",
]

log = get_logger("engine")

REFUSES = "it refuses every call of this model"
"""What the reason of a rejection begins with, of what is right and takes none of them."""

FAILED = "failed at start"
"""What the reason of a demotion begins with that a rank's own look has brought."""

ROWS_AGAIN, SECONDS_AGAIN = 24, 1.0
"""How many rows of a call are compared, and how long, when the model is looked at once more: what
is new then is all of a call or none."""


class Preflight:
    """Runs and compares what a plan may call, each implementation once.

    It holds what a start has found: `demoted`, and `rejected`, which is what refuses every call of
    this model or lacks a property that is asked for, each (op, impl id) -> why; `live_counts`, the
    token counts at which all ranks run the loaded model; `not_reached`, op -> why this engine is
    not seen to call it; `smaller`, op -> what of its calls was tried in a smaller size than the
    model's; and `worker_facts`, what plugins have reported.
    """

    def __init__(
        self, worker: PlannedWorker, worker_facts: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.worker_facts = dict(worker_facts)
        groups = worker.vllm_fl_groups
        self.demoted: dict[tuple[str, str], str] = {
            key: f"{FAILED} on rank {fault.rank}: {fault.why}"
            for key, fault in (groups.faults.items() if groups is not None else ())
        }
        self.rejected: dict[tuple[str, str], str] = {}
        self.live_counts: frozenset[int] = frozenset()
        self.not_reached: dict[str, str] = {}
        self.facts, self.rank, self.device = worker.vllm_fl_facts, worker.rank, worker.device
        self.how = self.facts.settings.preflight
        self.seed = random.SystemRandom().randrange(1 << 32)
        self.remarks: list[str] = []
        self.smaller: dict[str, list[str]] = {}
        self._passed: set[tuple[str, str, bool, bool, bool]] = set()

    def verdict(self, plan: Plan, contents: dict[str, Any]) -> Verdict:
        """This rank's verdict. It never raises: the other ranks wait for it."""
        try:
            reasons = attention.faults(plan, self.facts) | whole_layers.faults(plan)
            found, refused, variant = self._found(plan)
            reasons |= found
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may raise anything, SystemExit included
            log.exception("vllm-fl could not verify the plan")
            return Verdict(self.rank, failure=quote(error), facts=contents)
        failure = _strict_failure(plan, reasons | refused)
        return Verdict(
            self.rank,
            reasons,
            failure,
            contents,
            counts=self._live_counts(plan),
            rejections=refused | variant,
        )

    def _live_counts(self, plan: Plan) -> frozenset[int]:
        """How many tokens this rank wants the loaded model run with, one run each: none where it
        has nothing to compare, and with orders by size also as many as a row is for."""
        entries = [entry for entry in plan.entries.values() if entry.impls]
        if self.how != "verify" or not entries:
            return frozenset()
        largest = self.facts.sizes.tokens[-1] if self.facts.sizes else 1
        counts = {*probe.COUNTS, *(n for entry in entries for n in entry.ceilings)}
        return frozenset(min(n, largest, probe.TOKENS) for n in counts)

    def _found(self, plan: Plan) -> tuple[dict[tuple[str, str], str], ...]:
        """(op, impl id) -> why it must not serve, of every candidate that may take over a call.

        Three of them: its faults; of those without, that they refuse all calls of this model; and
        what keeps them out where only batch-invariant ones may serve.
        """
        if self.how == "off":
            return {}, {}, {}
        roles: list[Role] = []
        owners = get_default_manager().registry.snapshot().owners
        table = installed_bindings()
        found_by_passes = {op for op, _, _ in fusions.operators(plan)}
        for op, entry in plan.entries.items():
            meets = meets_a_compiler(table.get(op))
            for impl in entry.impls:
                key, is_first = (op, impl.impl_id), impl in entry.firsts
                is_compiled = plan.mode == "compiled" and meets and is_first
                counts = self._warm_counts(entry, impl)
                tokens = self._captured_tokens(plan, impl) if meets and is_first else 0
                passed = *key, is_compiled, bool(counts), bool(tokens)
                if passed in self._passed:
                    continue
                self._passed.add(passed)
                by_range = self.facts.by_range
                compiled = plan.as_compiled(op, impl, inlined=by_range) if is_compiled else None
                in_graphs = op in found_by_passes and is_first and impl.traced is not None
                owner = owners[key].name if key in owners else ""
                roles.append(Role(impl, owner, compiled, counts, tokens, in_graphs))
        assert self.facts.dtype is not None  # a worker has a model
        request = Request(
            roles,
            self.facts.dtype,
            self.device,
            self.facts.sizes,
            compares=self.how == "verify",
            backend=self.facts.lowering(self.device),
            layer_for=layer_for,
            seed=self.seed,
            specs=plan.contracts,
            provided=self.facts.provided,
        )
        found = find_faults(request)
        self.remarks += found.remarks
        self.smaller |= found.smaller
        asks = self.facts.wants_invariance
        right = [role for role in roles if role.key not in found.faults | found.refused]
        variant = find_variant(dataclasses.replace(request, roles=right if asks else ()))
        return (
            {key: reason for key, (reason, _) in found.faults.items()},
            {key: f"{REFUSES} ({why})" for key, why in found.refused.items()},
            {key: f"{asks}, and it is {why}" for key, why in variant.items()},
        )

    def _warm_counts(self, entry: PlanEntry, impl: OpImpl) -> list[int]:
        """The token counts at which `impl` must have run before it serves: none for a later choice.

        Plain PyTorch compiles nothing when it is called, and what is traced is part of a graph.
        """
        sizes = self.facts.sizes
        if sizes is None or not is_opaque(impl):
            return []
        largest = sizes.tokens[-1]
        return [
            n
            for n in warm_counts(largest, self.facts.captured, entry.ceilings)
            if [i for i in at_size(entry.candidates, n) if isinstance(i, OpImpl)][:1] == [impl]
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


def verified_plan(
    worker: PlannedWorker, preflight: Preflight, *, alone: bool
) -> tuple[Plan, dict[str, Any]]:
    """Resolve, run and compare, agree; again while an implementation had to be taken out.

    Returns:
        (the plan, what it consists of).

    Raises:
        StartError: strict mode and a fault, on whichever rank.
    """
    rank, demoted, rejected = worker.rank, preflight.demoted, preflight.rejected
    registry = get_default_manager().registry
    snapshot = registry.snapshot()
    required = "batch_invariant" if worker.vllm_fl_facts.wants_invariance else ""
    table = standing(worker.vllm_fl_facts, snapshot, worker.device)
    while True:
        plan = plan_for(worker.vllm_fl_facts, {**rejected, **demoted}, table=table)
        consists = fingerprint(
            plan,
            snapshot.owners,
            snapshot.authors,
            table=table.digest,
            required=required,
            settings=worker.vllm_fl_facts.settings,
            plugins=registry.plugins,
        )
        contents = {**consists, "workers": preflight.worker_facts, "foreign": foreign_code()}
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
                    "Install %s on its node [FL411]",
                    impl_id,
                    op,
                    at,
                    what,
                )
            demoted[op, impl_id] = f"rank {at} lacks it: {what} is not installed there"
        _bar(worker, preflight, barred)
    worker.vllm_fl_table = table
    if rank == 0:
        if table.reason:
            log.warning("%s. Going on without a table [FL610]", table.reason)
        for op, why in table.left_out.items():
            log.warning("The table's rows of op '%s' have no effect: %s [FL610]", op, why)
        for line in differences(verdicts):
            log.warning("The ranks differ. %s [FL503]", line)
    for (op, impl_id), reason in demoted.items():
        plan.record.demote(op, impl_id, reason)
    preflight.live_counts = frozenset[int]().union(*(v.counts for v in verdicts))
    return plan, contents


def verify_live(
    worker: PlannedWorker,
    models: Mapping[str, torch.nn.Module],
    preflight: Preflight,
    renew: Callable[[], object],
) -> list[str]:
    """Run the loaded model, compare, agree; again while an implementation had to be taken out.

    Nothing of it is left afterwards: neither on the path of a call nor in memory.

    Args:
        worker: the worker, whose plan serves in the model.
        models: the model under "", where the worker shows it, and its draft model, by what the
            names of their layers begin with in messages.
        preflight: what the start has found; at least one token count to run the model with.
        renew: makes another plan, without what was taken out, and binds the model to it.

    Returns:
        What the start line says of it.

    Raises:
        StartError: strict mode and a fault, on whichever rank.
    """
    start = time.monotonic()
    counts = preflight.live_counts
    while True:
        plan = worker.vllm_fl_plan
        live, not_run = _seen_live(worker, models, sorted(counts, reverse=True))
        ran = None if not_run else _ran(live)
        verdict = Verdict(worker.rank, live.faults, _strict_failure(plan, live.faults), ran=ran)
        verdicts = agree(verdict)
        if new := _newly(verdicts, preflight.demoted):
            _demote(worker, preflight, new)
            for op, impl_id in new:
                plan.record.demote(op, impl_id, preflight.demoted[op, impl_id])
            renew()
            continue
        refused = refusing(verdicts, preflight.rejected)
        if not refused:
            break
        # It may take calls of other sizes: what the plan has it for, and the largest batch.
        if further := _further_counts(worker, plan, refused) - counts:
            counts |= further
            continue
        why = {key: (at, f"{REFUSES} ({reason})") for key, (at, reason) in refused.items()}
        _bar(worker, preflight, why)
        renew()
    release(worker.device)
    if not_run:
        return [f"not on live tensors: {not_run}"]
    called = frozenset[str]().union(*(v.ran.reached for v in verdicts if v.ran is not None))
    preflight.not_reached |= _not_called(plan, verdicts)
    for op in called.intersection(preflight.not_reached):
        del preflight.not_reached[op]
    left_out = {op: f"{op} ({why})" for op, why in live.left_out.items()}
    table = installed_bindings()
    for op, entry in plan.entries.items():
        known = op in live.reached or op in preflight.not_reached
        if entry.impls and not known and not _has(table.get(op), LayerPlace, IrPlace):
            left_out[op] = f"{op} (not called)"
    told = f"not compared there: {', '.join(left_out[op] for op in sorted(left_out))}"
    return [
        f"{live.compared} calls on live tensors in {time.monotonic() - start:.1f} s",
        *([told] if left_out else []),
    ]


def verify_with_cache(
    worker: PlannedWorker,
    models: Mapping[str, torch.nn.Module],
    preflight: Preflight,
    renew: Callable[[], object],
) -> str:
    """Run the loaded model once more, with vLLM's KV cache in memory: there is less of it now.

    Where nothing is compiled yet, what is wrong is taken out as before. Nothing is captured yet.

    Args:
        worker, models, preflight, renew: as for `verify_live`.

    Returns:
        What was compared, or why nothing was.

    Raises:
        StartError: strict mode and a fault, on whichever rank; or a fault of what is compiled.
    """
    start = time.monotonic()
    counts = frozenset((max(preflight.live_counts),))
    while True:
        plan = worker.vllm_fl_plan
        with plan.record.aside():
            live, not_run = seen_again(worker, models, counts)
        faults = {key: f"{why} (with the KV cache in memory)" for key, why in live.faults.items()}
        verdicts = agree(Verdict(worker.rank, faults, _strict_failure(plan, faults)))
        new = _newly(verdicts, preflight.demoted)
        if not new:
            break
        if plan.mode == "compiled":
            raise StartError(_compiled_with(new))
        _demote(worker, preflight, new)
        for op, impl_id in new:
            plan.record.demote(op, impl_id, preflight.demoted[op, impl_id])
        renew()
        counts = preflight.live_counts
    if not_run:
        return f"not on live tensors with the KV cache in memory: {not_run}"
    left = ", ".join(f"{op} ({why})" for op, why in sorted(live.left_out.items()))
    return (
        f"{live.compared} calls on live tensors with the KV cache in memory, in "
        f"{time.monotonic() - start:.1f} s{left and f'; not compared: {left}'}"
    )


def _compiled_with(new: Mapping[tuple[str, str], tuple[int, str]]) -> str:
    """Why a start ends since what is wrong cannot be taken out any more."""
    each = "; ".join(
        f"implementation '{impl_id}' failed for op '{op}' on rank {at}: {reason}"
        for (op, impl_id), (at, reason) in new.items()
    )
    return (
        f"vllm-fl ends the start: {each}. The model is compiled with it. {without(new)} leaves it "
        "out"
    )


def without(keys: Iterable[tuple[str, str]]) -> str:
    """The variable that leaves the ops of these (op, impl id) to vLLM."""
    stock = ";".join(f"{op}=stock" for op in dict.fromkeys(op for op, _ in keys))
    return f"VLLM_FL_PER_OP='{stock}'"


def seen_again(
    worker: PlannedWorker,
    models: Mapping[str, torch.nn.Module],
    counts: frozenset[int] = frozenset(),
) -> tuple[Live, str]:
    """What a short look at a model shows that was looked at before: `Live`, and why there was none.

    Args:
        worker: whose model it is; its plan serves in the model.
        models: as for `verify_live`.
        counts: of how many tokens; by default of as many as the largest forward at start had.
    """
    wanted = counts or frozenset((max(worker.vllm_fl_preflight.live_counts),))
    limits = {"rows": ROWS_AGAIN, "seconds": SECONDS_AGAIN, "scarce": True}
    found = _seen_live(worker, models, sorted(wanted, reverse=True), **limits)
    if worker.device.type != "cpu":  # vLLM has sized its KV cache: what is cached is not ours
        import torch

        torch.get_device_module(worker.device).empty_cache()
    return found


def _seen_live(
    worker: PlannedWorker,
    models: Mapping[str, torch.nn.Module],
    counts: list[int],
    **limits: Any,
) -> tuple[Live, str]:
    """(what forwards of so many tokens each showed, why there was none or nothing)."""
    owners = get_default_manager().registry.snapshot().owners
    live = Live(worker.vllm_fl_plan, models, worker.device, owners, **limits)
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


def _ran(live: Live) -> Ran:
    """What a rank saw in runs of its part of the model that came to their end."""
    table = installed_bindings()
    untold = {
        op
        for op in live.plan.entries
        if (binding := table.get(op)) is None
        or binding.between_graphs  # attention does not run, nor what stands in its place
        or _has(binding, FusionPlace, GraphPlace)  # nor does what a compiler makes of the model
        or _has_more_than_ran(live, op)
    }
    return Ran(live.refused, frozenset(live.served), frozenset(live.reached), frozenset(untold))


def _has_more_than_ran(live: Live, op: str) -> bool:
    """Whether the op has layers in a part of the model that such a run leaves out: encoders."""
    bases = tuple(layer.base for layer in layer_table() if layer.op == op)
    return any(
        isinstance(module, bases) and prefix + name.rpartition(".")[0] not in live.entered
        for prefix, model in live.models.items()
        for name, module in model.named_modules()
    )


def _not_called(plan: Plan, verdicts: list[Verdict]) -> dict[str, str]:
    """Op -> that no rank called it, where a run tells that."""
    runs = [v.ran for v in verdicts if v.ran is not None]
    known = frozenset[str]().union(*(ran.reached | ran.untold for ran in runs))
    why = "the model was run, and did not call it"
    planned = (op for op, entry in plan.entries.items() if entry.impls)
    return {op: why for op in planned if op not in known} if len(runs) == len(verdicts) else {}


def planned_for_nothing(plan: Plan, facts: EngineFacts) -> dict[str, str]:
    """Op -> why no call of it is to be expected, of those that only the user's settings plan."""
    why = "the settings name it, and this model has no place for it here"
    return {op: why for op, entry in plan.entries.items() if entry.impls and op in facts.absent}


def _further_counts(
    worker: PlannedWorker, plan: Plan, refused: Iterable[tuple[str, str]]
) -> frozenset[int]:
    """At how many tokens those that refused everything so far may yet take a call."""
    sizes = worker.vllm_fl_facts.sizes
    if sizes is None:
        return frozenset()
    largest = sizes.tokens[-1]
    ceilings = (n for op, _ in refused for n in plan.entries[op].ceilings)
    return frozenset((largest, *(n for n in ceilings if n < largest)))


def _newly(
    verdicts: list[Verdict], demoted: Mapping[tuple[str, str], str], unusable: str = ""
) -> dict[tuple[str, str], tuple[int, str]]:
    """(op, impl id) -> (the rank that found it, why it must not serve), of what still serves.

    Raises:
        StartError: a rank cannot go on, or what they have in common is `unusable`.
    """
    failures = [f"rank {v.rank}: {v.failure}" for v in verdicts if v.failure]
    if failures or unusable:
        raise StartError(f"vllm-fl ends the start: {'; '.join(failures) or unusable}")
    return {
        key: (v.rank, reason)
        for v in reversed(verdicts)
        for key, reason in v.faults.items()
        if key not in demoted
    }


def _demote(
    worker: PlannedWorker, preflight: Preflight, new: dict[tuple[str, str], tuple[int, str]]
) -> None:
    """Take out what a rank has found, on this one, too."""
    for (op, impl_id), (at, reason) in new.items():
        if worker.rank == 0:
            warn_of_fault(op, impl_id, reason, at)
        preflight.demoted[op, impl_id] = f"{FAILED} on rank {at}: {reason}"


def _bar(
    worker: PlannedWorker, preflight: Preflight, barred: dict[tuple[str, str], tuple[int, str]]
) -> None:
    """Take out what is right and may not serve, or would refuse every call of this model."""
    for (op, impl_id), (at, reason) in barred.items():
        if worker.rank == 0:
            log.warning(
                "Implementation '%s' is rejected for op '%s': %s (measured at start, on rank "
                "%d; off on all) [FL412]",
                impl_id,
                op,
                reason,
                at,
            )
        preflight.rejected[op, impl_id] = reason


def taken_out(plan: Plan, preflight: Preflight) -> list[str]:
    """What the start took out, for its line; a warning of this code has said the whole of it."""
    demoted = [
        f"{op}: {impl_id} was taken out [{'FL410' if why.startswith(FAILED) else 'FL411'}]"
        for (op, impl_id), why in plan.record.demotions.items()
    ]
    return demoted + [
        f"{op}: {impl_id} refuses every call [FL412]"
        for (op, impl_id), why in preflight.rejected.items()
        if why.startswith(REFUSES)
    ]


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


def meets_a_compiler(binding: Binding | None) -> bool:
    """Whether compiled code calls the op: operators and functions are called behind a compiler."""
    return _has(binding, LayerPlace, IrPlace, GraphPlace)


def _has(binding: Binding | None, *kinds: type) -> bool:
    return binding is not None and any(isinstance(place, kinds) for place in binding.places)
