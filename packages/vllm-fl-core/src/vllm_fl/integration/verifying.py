"""What a worker verifies at its start, and agrees on with the other ranks: its plan on made inputs
before the model is built, then once more on the tensors of the model that was loaded."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..contracts.binding import Binding, FusionPlace, GraphPlace, IrPlace, LayerPlace
from ..dispatch import get_default_manager
from ..engine.budget import Valve
from ..engine.digest import fingerprint
from ..engine.facts import EngineFacts
from ..engine.live import Live
from ..engine.opaque import is_opaque
from ..engine.plan import Plan, PlanEntry
from ..engine.preflight import find_faults, host_threads
from ..engine.tables import Standing
from ..engine.trials import Request, Role, release
from ..engine.warmup import warm_counts
from ..errors import StartError
from ..logs import get_logger
from ..plugins.inspection import Key, Objection
from ..plugins.types import OpImpl
from ..settings.policy import at_size
from ..text import quote
from . import locking, probe
from .engines import Engine, calling
from .places import installed_bindings, without_layers
from .planning import plan_for
from .ranks import (
    FAILED,
    REJECTED,
    Disabled,
    Ran,
    Verdict,
    agree,
    common_table,
    differences,
    lacking,
    refusing,
)
from .seams import attention, fusions, whole_layers
from .seams.layers import foreign_code, layer_for, layer_table

if TYPE_CHECKING:
    pass

log = get_logger("engine")

ROWS_AGAIN, CALLS_AGAIN = 24, 200.0
"""How many rows of a call are compared, and how many calls, when the model is looked at once more:
what is new then is all of a call or none."""

Off = Mapping[tuple[str, str], Disabled]
"""(op, impl id) -> why it is out."""


@dataclasses.dataclass
class Checks:
    """What verification keeps of one engine, and runs when it starts: each implementation once.

    Args:
        engine: the engine.
        live_counts: the token counts at which all ranks run the loaded model.
        smaller: op -> the calls of it that were tried in a smaller size than the model's.
        remarks: what could not be verified, a phrase each.
        seconds: how long verification has taken.
    """

    engine: Engine
    live_counts: frozenset[int] = frozenset()
    smaller: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    remarks: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.facts, self.device = self.engine.facts, self.engine.device
        self.how = self.facts.settings.preflight
        locked = self.facts.settings.locked
        seed = locked.seed if locked else None
        self.seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        self.valve = Valve()
        self._passed: set[tuple[object, ...]] = set()

    def verdict(self, plan: Plan, contents: dict[str, Any]) -> Verdict:
        """This rank's verdict. It never raises: the other ranks wait for it."""
        installed = frozenset(get_default_manager().registry.snapshot().owners)
        table = self.engine.table
        mine = Verdict(self.engine.rank, facts=contents, table=table, installed=installed)
        try:
            reasons = attention.faults(plan, self.facts) | whole_layers.faults(plan)
            found = self._found(plan)
            reasons |= {key: o.reason for key, o in found.items() if o.code == FAILED}
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may raise anything, SystemExit included
            log.exception("vllm-fl could not verify the plan")
            return dataclasses.replace(mine, failure=quote(error))
        ending = {key: o.reason for key, o in found.items() if o.ends_strict}
        unmet = [entry.unmet for entry in plan.entries.values()]
        unmet += [table.fault] if plan.strict else []
        return dataclasses.replace(
            mine,
            faults=reasons,
            failure=_strict_failure(plan, reasons | ending) or "; ".join(filter(None, unmet)),
            counts=self._live_counts(plan),
            rejections={key: o.reason for key, o in found.items() if o.code == REJECTED},
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

    def _found(self, plan: Plan) -> dict[Key, Objection]:
        """Run every candidate that may take over a call: return the objections."""
        if self.how == "off":
            return {}
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
                bounds = _bounds(entry, impl)
                tokens = self._captured_tokens(plan, impl, *bounds) if meets and is_first else 0
                passed = *key, is_compiled, bool(counts), bool(tokens), bounds
                if passed in self._passed:
                    continue
                self._passed.add(passed)
                by_range = self.facts.by_range
                compiled = plan.as_compiled(op, impl, inlined=by_range) if is_compiled else None
                in_graphs = op in found_by_passes and is_first and impl.traced is not None
                owner = owners[key].name if key in owners else ""
                roles.append(Role(impl, owner, compiled, counts, tokens, in_graphs, *bounds))
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
            requires=self.facts.wants_invariance,
            valve=self.valve,
        )
        found = find_faults(request)
        self.remarks += found.remarks
        self.smaller |= found.smaller
        return found.objections

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

    def _captured_tokens(self, plan: Plan, impl: OpImpl, least: int, most: float) -> int:
        """How many tokens of `impl`, which serves in layers, to capture in a graph; 0 for none.

        A compiler's own code takes the place of what it traces. What operators and functions reach
        may run between graphs, as caches and prompts do: that it cannot be captured is no fault.
        """
        if self.device.type != "cuda" or (plan.mode == "compiled" and not is_opaque(impl)):
            return 0
        known = (n for n in self.facts.captured if least <= n <= min(most, probe.TOKENS))
        return max(known, default=0)

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


def _bounds(entry: PlanEntry, impl: OpImpl) -> tuple[int, float]:
    """The fewest and the most tokens of a call that `impl` may serve, by the rows of its op."""
    ends = [math.inf if n is None else n for n, _ in entry.candidates]
    begins = [1, *(int(end) + 1 for end in ends[:-1])]
    serving = [number for number, (_, impls) in enumerate(entry.candidates) if impl in impls]
    return begins[serving[0]], ends[serving[-1]]


def checks_of(engine: Engine) -> Checks:
    """Return what verification keeps of this engine."""
    found: Checks = engine.state.get(Checks) or engine.state.setdefault(Checks, Checks(engine))
    return found


class Agreed(NamedTuple):
    """What the ranks have agreed on; all of them hold the same.

    Attributes:
        table: what becomes of the table that the settings name.
        out: why each implementation that is out is so.
    """

    table: Standing
    out: Off


def step(before: Agreed, verdicts: list[Verdict]) -> tuple[Agreed, bool]:
    """What the ranks agree on after these verdicts, and whether these were given of that.

    Raises:
        StartError: a rank cannot go on, or strict mode and something that they have not all alike.
    """
    table = common_table(verdicts)
    lacks = {key: out for key, out in lacking(verdicts).items() if key not in before.out}
    is_strict = any(v.facts.get("strict") for v in verdicts)
    unusable = [table.fault, *map(_lack_of, lacks.items())] if is_strict else []
    new = _faults(verdicts, before.out, "; ".join(filter(None, unusable))) | lacks
    for v in verdicts:
        for key, why in v.rejections.items():
            if key not in before.out:
                new.setdefault(key, Disabled(REJECTED, v.rank, why))
    seen = {(v.table.digest, frozenset(v.table.left_out)) for v in verdicts}
    is_settled = not new and seen == {(table.digest, frozenset(table.left_out))}
    return Agreed(table, {**before.out, **new}), is_settled


def verified_plan(engine: Engine) -> dict[str, Any]:
    """Run and compare the plan, agree, and plan again while an implementation had to be disabled.

    Returns:
        The contents of the plan.

    Raises:
        StartError: strict mode and a fault, on whichever rank.
        LockError: the engine differs from its lock, on whichever rank: nothing is run for it.
    """
    registry, facts = get_default_manager().registry, engine.facts
    checks, alone = checks_of(engine), engine.joins
    if (locked := facts.settings.locked) is not None:
        lines = locking.differences(locked, engine.facts_of_lock)
        mine = Verdict(engine.rank, differs=tuple(lines))
        by_rank = {v.rank: v.differs for v in ([mine] if alone else agree(mine))}
        engine.differs = [line for told in by_rank.values() for line in told]
        locking.refuse(facts.settings, by_rank, says=engine.rank == 0)
    snapshot, is_settled = registry.snapshot(), False
    while not is_settled:
        plan = engine.plan
        consists = fingerprint(
            plan,
            snapshot.owners,
            snapshot.authors,
            table=engine.table.digest,
            required="batch_invariant" if facts.wants_invariance else "",
            settings=facts.settings,
            plugins=registry.plugins,
        )
        contents = {**consists, "workers": engine.worker_facts, "foreign": foreign_code(plan)}
        verdict = checks.verdict(plan, contents)
        verdicts = [verdict] if alone else agree(verdict)
        agreed, is_settled = step(Agreed(engine.table, engine.disabled), verdicts)
        engine.table = agreed.table
        _take_out(engine, agreed.out)
        if not is_settled:
            engine.plan = plan_of(engine)
    if engine.rank == 0:
        if engine.table.reason:
            log.warning("%s. Going on without a table [FL610]", engine.table.reason)
        for op, why in engine.table.left_out.items():
            log.warning("The table's rows of op '%s' have no effect: %s [FL610]", op, why)
        for line in differences(verdicts):
            log.warning("The ranks differ. %s [FL503]", line)
    for (op, impl_id), each in engine.disabled.items():
        if each.code != REJECTED:
            plan.record.demote(op, impl_id, each.reason)
    checks.live_counts = frozenset[int]().union(*(v.counts for v in verdicts))
    return contents


def plan_of(engine: Engine) -> Plan:
    """Return the engine's plan without the implementations that are disabled."""
    disabled = {key: each.reason for key, each in engine.disabled.items()}
    return plan_for(engine.facts, disabled, table=engine.table)


def verify_live(engine: Engine, renew: Callable[[], object]) -> list[str]:
    """Run the loaded model, compare, agree; again while an implementation had to be taken out.

    Nothing of it is left afterwards: neither on the path of a call nor in memory.

    Args:
        engine: the engine, whose plan serves in the model; all ranks run it at some token count.
        renew: makes another plan, without what was taken out, and binds the model to it.

    Returns:
        What was compared, and what was not, a phrase each.

    Raises:
        StartError: strict mode and a fault, on whichever rank.
    """
    began, checks = time.monotonic(), checks_of(engine)
    counts = checks.live_counts
    while True:
        live, not_run = _seen_live(engine, counts, valve=checks.valve)
        verdicts = _agree_on(engine, reasons(live), None if not_run else _ran(live))
        new = _faults(verdicts, engine.disabled)
        if not new:
            new = {
                key: each for key, each in refusing(verdicts).items() if key not in engine.disabled
            }
            # It may take calls of other sizes: what the plan has it for, and the largest batch.
            further = _further_counts(engine, new) - counts
            if further:
                counts |= further
                continue
        if not new:
            break
        _take_out(engine, new)
        renew()
    release(engine.device)
    seconds = time.monotonic() - began
    checks.seconds += seconds
    if not_run:
        return [f"not on live tensors: {not_run}"]
    plan = engine.plan
    called = frozenset[str]().union(*(v.ran.reached for v in verdicts if v.ran is not None))
    engine.unused |= _not_called(plan, verdicts)
    for op in called.intersection(engine.unused):
        del engine.unused[op]
    left_out = {op: f"{op} ({why})" for op, why in live.left_out.items()}
    table = installed_bindings()
    for op, entry in plan.entries.items():
        known = op in live.reached or op in engine.unused
        if entry.impls and not known and not _has(table.get(op), LayerPlace, IrPlace):
            left_out[op] = f"{op} (not called)"
    told = f"not compared there: {', '.join(left_out[op] for op in sorted(left_out))}"
    return [
        f"{live.compared} calls on live tensors in {seconds:.1f} s",
        *([told] if left_out else []),
    ]


def verify_with_cache(engine: Engine, renew: Callable[[], object]) -> str:
    """Run the loaded model once more, with vLLM's KV cache in memory: there is less of it now.

    Where nothing is compiled yet, what is wrong is taken out as before. Nothing is captured yet.

    Args:
        engine, renew: as for `verify_live`.

    Returns:
        What was compared, or why nothing was.

    Raises:
        StartError: strict mode and a fault, on whichever rank; or a fault of what is compiled.
    """
    began, checks = time.monotonic(), checks_of(engine)
    counts = frozenset((max(checks.live_counts),))
    while True:
        live, not_run = seen_again(engine, counts, checks.valve)
        faults = {key: f"{why} (with the KV cache in memory)" for key, why in reasons(live).items()}
        new = _faults(_agree_on(engine, faults), engine.disabled)
        if not new:
            break
        if engine.plan.mode == "compiled":
            raise StartError(_compiled_with(new))
        _take_out(engine, new)
        renew()
        counts = checks.live_counts
    if not_run:
        return f"not on live tensors with the KV cache in memory: {not_run}"
    return compared(live, began, " with the KV cache in memory,")


def reasons(live: Live) -> dict[Key, str]:
    """Why implementations must not serve, by what was seen."""
    return {key: objection.reason for key, objection in live.objections.items()}


def compared(live: Live, began: float, where: str = "") -> str:
    """What one line says of a look at the model.

    Args:
        live: what was seen.
        began: when, by `time.monotonic`.
        where: what stands between the calls and the seconds.
    """
    left = ", ".join(f"{op} ({why})" for op, why in sorted(live.left_out.items()))
    return (
        f"{live.compared} calls on live tensors{where} in {time.monotonic() - began:.1f} s"
        f"{left and f'; not compared: {left}'}"
    )


def _compiled_with(new: Off) -> str:
    """Why a start ends since what is wrong cannot be taken out any more."""
    each = "; ".join(
        f"implementation '{impl_id}' failed for op '{op}' on rank {out.rank}: {out.why}"
        for (op, impl_id), out in new.items()
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
    engine: Engine, counts: frozenset[int] = frozenset(), valve: Valve | None = None
) -> tuple[Live, str]:
    """What a short look at a model shows that was looked at before: `Live`, and why there was none.

    Args:
        engine: whose model it is; its plan serves in the model. Nothing is counted meanwhile.
        counts: of how many tokens; by default of as many as the largest forward at start had.
        valve: of the startup, if this is one.
    """
    wanted = counts or frozenset((max(checks_of(engine).live_counts),))
    limits: dict[str, Any] = {"rows": ROWS_AGAIN, "calls": CALLS_AGAIN, "scarce": True}
    limits["valve"] = valve or Valve()
    with engine.plan.record.aside():
        found = _seen_live(engine, wanted, **limits)
    device = engine.device
    if device.type != "cpu":  # vLLM has sized its KV cache: what is cached is not ours
        import torch

        torch.get_device_module(device).empty_cache()
    return found


def _seen_live(engine: Engine, counts: frozenset[int], **limits: Any) -> tuple[Live, str]:
    """(what forwards of so many tokens each showed, why there was none or nothing)."""
    owners, models = get_default_manager().registry.snapshot().owners, engine.models
    live = Live(engine.plan, models, engine.device, owners, **limits)
    if "" not in models:
        return live, "the worker shows no model"
    try:
        with calling(engine), live.watching(), host_threads(engine.device):
            for tokens in sorted(counts, reverse=True):
                not_run = probe.forward(engine.runner, models[""], engine.config, tokens)
                if not_run:
                    return live, not_run
    except Exception as error:  # vLLM's own, for a model that its dummy run does not fit
        log.warning("No verification on live tensors: the forward failed", exc_info=True)
        return live, f"the forward failed: {quote(error)}"
    return live, ""


def _agree_on(
    engine: Engine, faults: dict[tuple[str, str], str], ran: Ran | None = None
) -> list[Verdict]:
    """Every rank's verdict on the loaded model, this one's among them."""
    failure = _strict_failure(engine.plan, faults)
    return agree(Verdict(engine.rank, faults, failure, ran=ran))


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
    """Op -> why no call of it is to be expected, by what the model is made of."""
    found = dict.fromkeys(without_layers(plan, facts.provided), "this model has no layer of it")
    named = "the settings name it, and this model has no place for it here"
    found |= dict.fromkeys(facts.absent, named)  # those that only the user's settings plan
    return {op: found[op] for op, entry in plan.entries.items() if entry.impls and op in found}


def _further_counts(engine: Engine, refused: Iterable[tuple[str, str]]) -> frozenset[int]:
    """At how many tokens those that refused everything so far may yet take a call."""
    sizes = engine.facts.sizes
    if sizes is None or not refused:
        return frozenset()
    largest = sizes.tokens[-1]
    ceilings = (n for op, _ in refused for n in engine.plan.entries[op].ceilings)
    return frozenset((largest, *(n for n in ceilings if n < largest)))


def _faults(
    verdicts: list[Verdict], known: Off, unusable: str = ""
) -> dict[tuple[str, str], Disabled]:
    """What the ranks have found wrong, of what still serves.

    Raises:
        StartError: a rank cannot go on, or what they have in common is `unusable`.
    """
    failures = [f"rank {v.rank}: {v.failure}" for v in verdicts if v.failure]
    if failures or unusable:
        raise StartError(f"vllm-fl ends the start: {'; '.join(failures) or unusable}")
    return {
        key: Disabled(FAILED, v.rank, reason)
        for v in reversed(verdicts)
        for key, reason in v.faults.items()
        if key not in known
    }


def _take_out(engine: Engine, out: Off) -> None:
    """Keep what is out on all ranks; rank 0 says what is new."""
    for (op, impl_id), each in out.items():
        if engine.rank == 0 and (op, impl_id) not in engine.disabled:
            each.warn(op, impl_id)
    engine.disabled |= out


def _strict_failure(plan: Plan, reasons: Mapping[tuple[str, str], str]) -> str:
    """Why strict mode ends the start: implementations failed."""
    if not plan.strict or not reasons:
        return ""
    return "strict mode, and " + "; ".join(
        f"implementation '{impl_id}' failed for op '{op}': {reason}"
        for (op, impl_id), reason in reasons.items()
    )


def _lack_of(lack: tuple[tuple[str, str], Disabled]) -> str:
    """Why strict mode ends the start: what is installed on one rank is not on another."""
    (op, impl_id), (_, rank, what) = lack
    return f"strict mode, and rank {rank} lacks implementation '{impl_id}' of op '{op}' ({what})"


def meets_a_compiler(binding: Binding | None) -> bool:
    """Whether compiled code calls the op: operators and functions are called behind a compiler."""
    return _has(binding, LayerPlace, IrPlace, GraphPlace)


def _has(binding: Binding | None, *kinds: type) -> bool:
    return binding is not None and any(isinstance(place, kinds) for place in binding.places)
