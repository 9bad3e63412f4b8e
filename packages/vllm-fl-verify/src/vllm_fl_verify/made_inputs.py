"""Verification on generated inputs: once per implementation, before the model is built."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_fl.contracts import OpSpec
from vllm_fl.contracts.binding import Binding
from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.opaque import is_opaque
from vllm_fl.engine.plan import Plan, PlanEntry
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.patchers.layers import layer_table
from vllm_fl.integration.targets import installed_bindings
from vllm_fl.plugins.inspection import VERIFIED_BEFORE, Key, Moment, Objection
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.policy import at_size

from . import probe
from .budget import Valve
from .kept import EngineVerdicts
from .preflight import find_faults
from .trials import Request, Role
from .warmup import warm_counts


@dataclass
class Checks:
    """Verification state of one engine. Each implementation is verified once.

    Args:
        live_counts: sizes of the loaded model's runs in tokens, from all ranks.
        smaller: op -> calls that were verified at smaller sizes than in the model.
        remarks: what could not be verified, one phrase each.
        seen: the plan that was last compared in the loaded model.
    """

    engine: Engine
    live_counts: frozenset[int] = frozenset()
    smaller: dict[str, list[str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    seen: Plan | None = None

    def __post_init__(self) -> None:
        self.facts, self.device = self.engine.facts, self.engine.device
        locked = self.facts.settings.locked
        seed = locked.seed if locked else None
        self.seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        self.valve = Valve()
        self.verdicts = EngineVerdicts(self.engine, self.valve)
        self._verified: dict[str, Role] = {}
        """`Role.name` -> role, of all verifications."""

    @property
    def is_kept(self) -> bool:
        """Whether an earlier startup has verified all implementations."""
        return bool(self._verified) and all(role.kept for role in self._verified.values())

    def objections(self, plan: Plan) -> dict[Key, Objection]:
        """Return (op, impl id) -> why it must not run, for candidates that may run a call."""
        verdicts, roles = self.verdicts, self._new_roles(plan)
        passed = verdicts.agreed(self.request(plan, roles))
        if verdicts.is_void:  # verify in full what this startup has not
            self._verified = {n: role for n, role in self._verified.items() if not role.kept}
            roles = self._new_roles(plan)
        roles = [replace(role, kept=role.name in passed) for role in roles]
        found = find_faults(self.request(plan, roles))
        if verdicts.is_tuned_differently(roles):
            roles = [replace(role, kept=False) for role in roles]
            found = find_faults(self.request(plan, roles))
        self._verified |= {role.name: role for role in roles}
        verdicts.record(roles, found.objections)
        self.remarks += found.remarks
        self.smaller |= found.smaller
        return found.objections

    def _new_roles(self, plan: Plan) -> list[Role]:
        return [role for role in self._roles(plan) if role.name not in self._verified]

    def _roles(self, plan: Plan) -> list[Role]:
        """Return the roles of all candidates that may run a call."""
        roles: list[Role] = []
        owners = get_default_manager().registry.snapshot().owners
        table = installed_bindings()
        for op, entry in plan.entries.items():
            of_op = table[op].targets if op in table else ()
            meets = any(target.reaches_compiler for target in of_op)
            for impl in entry.impls:
                key, is_first = (op, impl.impl_id), impl in entry.firsts
                is_compiled = plan.mode == "compiled" and meets and is_first
                counts = self._warm_counts(entry, impl)
                bounds = _bounds(entry, impl)
                tokens = self._captured_tokens(plan, impl, *bounds) if meets and is_first else 0
                compiled = plan.as_compiled(op, impl) if is_compiled else None
                owner = owners[key].name if key in owners else ""
                roles.append(Role(impl, owner, compiled, counts, tokens, *bounds))
        return roles

    def request(self, plan: Plan, roles: Sequence[Role]) -> Request:
        assert self.facts.dtype is not None
        return Request(
            roles,
            self.facts.dtype,
            self.device,
            self.facts.sizes,
            compares=self.facts.settings.compares,
            backend=lowering(self.facts, self.device),
            layer_for=layer_for,
            seed=self.seed,
            specs=plan.contracts,
            provided=self.facts.provided,
            requires=self.facts.wants_invariance,
            valve=self.valve,
            keeper=plan.record.keeper,
        )

    def _warm_counts(self, entry: PlanEntry, impl: OpImpl) -> list[int]:
        """Return the warm-up's token counts at which `impl` is the first choice. Plain PyTorch and
        traced code have no warm-up: PyTorch compiles nothing, and traced code is part of the
        model's graph.
        """
        sizes = self.facts.sizes
        if sizes is None or not is_opaque(impl):
            return []
        largest = sizes.tokens[-1]
        return [
            n
            for n in warm_counts(largest, self.facts.captured, entry.ceilings, self.seed)
            if [i for i in at_size(entry.candidates, n) if isinstance(i, OpImpl)][:1] == [impl]
        ]

    def _captured_tokens(self, plan: Plan, impl: OpImpl, least: int, most: float) -> int:
        """Return the size at which to capture `impl` in a graph, in tokens, or 0. Traced code is
        not captured, because the compiler replaces it. Operators and functions outside layers, such
        as cache writes, may run between graphs, so they need not be capturable.
        """
        if self.device.type != "cuda" or (plan.mode == "compiled" and not is_opaque(impl)):
            return 0
        known = (n for n in self.facts.captured if least <= n <= min(most, probe.TOKENS))
        return max(known, default=0)

    def counts(self, plan: Plan) -> frozenset[int]:
        """Return the sizes of this rank's runs of the loaded model, in tokens; empty if no call of
        these runs is compared. They include the maximum tokens of the planned ops' rows."""
        table = installed_bindings()
        entries = [e for op, e in plan.entries.items() if e.impls and _may_run(table.get(op))]
        if not self.facts.settings.compares or not entries:
            return frozenset()
        largest = self.facts.sizes.tokens[-1] if self.facts.sizes else 1
        counts = {*probe.FORWARD_SIZES, *(n for entry in entries for n in entry.ceilings)}
        return frozenset(min(n, largest, probe.TOKENS) for n in counts)

    def limits(self, plan: Plan) -> list[str]:
        """Return the seed, and what startup could not verify, one phrase each."""
        if not any(entry.impls for entry in plan.entries.values()):
            return []
        sizes, table = self.facts.sizes, installed_bindings()
        planned = [table[op] for op, e in plan.entries.items() if e.impls and op in table]
        asked = {rule.name for binding in planned for rule in binding.sizes}
        unknown = [name for name in (sizes.unknown if sizes else ()) if name in asked]
        limit = f"some calls are unverified: the configuration does not define {', '.join(unknown)}"
        impls = {impl for entry in plan.entries.values() for impl in entry.impls}
        kept = [role.kept for role in self._verified.values() if role.impl in impls]
        some = f"{sum(kept)} of {len(kept)} implementations were verified before"
        before = [VERIFIED_BEFORE if all(kept) else some] if any(kept) else []
        remarks = *before, *self.unseen(plan), *self.remarks
        return [f"seed {self.seed}", *([limit] if unknown else ()), *remarks]

    def unseen(self, plan: Plan) -> list[str]:
        """Return a remark if no run of the loaded model calls a planned op."""
        is_planned = any(entry.impls for entry in plan.entries.values())
        if self.live_counts or not is_planned or not self.facts.settings.compares:
            return []
        return ["no calls on live tensors: all ops are in compiled graphs or attention"]


def _may_run(binding: Binding | None) -> bool:
    """Return whether a run of the loaded model, uncompiled and without attention, may call an
    op."""
    if binding is None or not binding.targets:
        return True
    by_pass = any(target.puts_operators for target in binding.targets)
    is_seen = any(target.seen_live for target in binding.targets)
    return is_seen and not by_pass and not binding.between_graphs


def lowering(facts: EngineFacts, device: torch.device) -> str:
    """Return the compiler for verification: `inductor` if it compiles the model, on a CPU or with
    CUDA; otherwise `aot_eager`, which only traces."""
    is_inductor = facts.compile_backend in ("", "inductor")
    return "inductor" if is_inductor and device.type in ("cpu", "cuda") else "aot_eager"


def checks_of(engine: Engine) -> Checks:
    """Return the engine's `Checks`. The first call creates the object."""
    found: Checks = engine.state.get(Checks) or engine.state.setdefault(Checks, Checks(engine))
    return found


def compare_on_made_inputs(engine: Engine) -> dict[Key, Objection]:
    checks = checks_of(engine)
    found = checks.objections(engine.plan)
    counts = engine.gather("report token counts of model runs", checks.counts(engine.plan))
    checks.live_counts = frozenset[int]().union(*counts)
    sizes, length = engine.facts.sizes, engine.config.model_config.max_model_len
    remarks = engine.remarks[Moment.PLANNED]
    remarks += checks.limits(engine.plan)
    if sizes is not None and length > sizes.max_position:
        remarks.append(f"generated inputs have positions below {sizes.max_position} of {length}")
    return found


def _bounds(entry: PlanEntry, impl: OpImpl) -> tuple[int, float]:
    """Return the minimum and maximum tokens of `impl`'s calls, from its op's rows."""
    ends = [math.inf if n is None else n for n, _ in entry.candidates]
    begins = [1, *(int(end) + 1 for end in ends[:-1])]
    serving = [number for number, (_, impls) in enumerate(entry.candidates) if impl in impls]
    return begins[serving[0]], ends[serving[-1]]


def layer_for(spec: OpSpec, provided: Mapping[str, Any]) -> object:
    """Return a layer of a vLLM class with the values `provided` for `spec.from_layer`. It is for
    implementations that need a layer. The class's constructor is not called, because it would
    choose an implementation."""
    stand_in = spec.layer(**provided)
    base = next((layer.base for layer in layer_table() if layer.op == spec.name), None)
    if base is None:
        return stand_in
    layer: Any = object.__new__(base)
    torch.nn.Module.__init__(layer)
    for name, value in vars(stand_in).items():
        is_weight = isinstance(value, torch.Tensor)
        setattr(layer, name, torch.nn.Parameter(value, False) if is_weight else value)
    return layer
