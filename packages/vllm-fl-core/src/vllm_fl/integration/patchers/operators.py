"""Targets that we take: the kernels of torch operators of vLLM's.

What calls an operator by name (fused mixtures of experts, models without CustomOp layers) reaches
the planned implementation. A kernel is one per process, operator and dispatch key: there is one
override for all engines (`taking.py`).

It is a kernel, behind every compiler: calls are guarded as in eager mode, and graphs that a
compiler made, or loaded from its cache, call it like any other.

A vLLM that was built without compiled operators is given those that the plan needs (`empty.py`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...contracts import OpSpec
from ...contracts.binding import Binding, OperatorTarget
from ...engine.opaque import Watched
from ...engine.plan import Plan
from ...errors import TargetError
from ...logs import get_logger
from ...plugins.forms import verdict_of
from ...plugins.types import OpImpl
from ..engines import Engine
from ..patcher import Patcher
from ..targets import installed_bindings
from ..targets import targets as targets_of
from . import empty, taking
from .arguments import misfit
from .layers import layer_table
from .taking import Choice

log = get_logger("engine")


def operator_note(plan: Plan, op: str) -> str:
    """Why none of a planned op's operators is overridden; empty where they may be.

    vLLM's own layers call these operators: one that the user leaves to vLLM must not get ours
    through them.
    """
    kept = [
        layer.cls for layer in layer_table() if layer.op == op and layer.cls in plan.kept_layers
    ]
    if kept:
        return f"layer {min(kept)} is left to vLLM, and calls its operators"
    if not plan.callable(op):
        return "its implementations take the calling layer, and an operator has none"
    return ""


def choose(
    plan: Plan, bindings: Mapping[str, Binding], device: torch.device, dtype: torch.dtype
) -> Choice:
    """Which operators the engine of `plan` overrides. Changes nothing.

    Args:
        plan: the sealed plan.
        bindings: op -> its targets.
        device: the worker's.
        dtype: the model's.
    """
    note, why_not = partial(operator_note, plan), partial(_misfit, key=_dispatch_key(device))
    fitting = taking.choose(plan, bindings, OperatorTarget, note, why_not)
    taken, left = dict(fitting.taken), {op: dict(why) for op, why in fitting.left.items()}
    for op in fitting.taken:
        # What a pass of vLLM's compiler finds may be a call that vLLM's kernel cannot take: there
        # the chain has to be asked.
        by_pass = any(target.puts_operators for target in bindings[op].targets)
        for first in () if by_pass else _firsts(plan, op):
            names = {target.name for target in taken[op]}
            calls = _calls_of(first, plan.contracts[op], names, device, dtype)
            taken[op] = tuple(target for target in taken[op] if target.name not in calls)
            why = dict.fromkeys(sorted(calls), f"{first.impl_id} calls it itself")
            left[op] = left.get(op, {}) | why
    taken = {op: targets for op, targets in taken.items() if targets}
    owners = {target.name: op for op, targets in taken.items() for target in targets}
    return Choice(taken, left, _to_define(owners, bindings, reads=plan.mode == "compiled"))


def _firsts(plan: Plan, op: str) -> Sequence[OpImpl]:
    """What an operator of the op runs first: of each row, where it is ordered by size."""
    firsts = [impl for impl in plan.entries[op].firsts if not impl.needs_layer]
    return firsts or plan.callable(op)[:1]


def _to_define(
    taken: Mapping[str, str], bindings: Mapping[str, Binding], *, reads: bool
) -> tuple[empty.Definition, ...]:
    """What this vLLM lacks of the operators that are `taken` (operator -> op).

    Args:
        taken: the operators that the plan implements.
        bindings: op -> its targets.
        reads: whether vLLM will read operators that it does not call, since it compiles the model.
    """
    ops = {target.name: op for op, target in targets_of(bindings, OperatorTarget)} | dict(taken)
    schemas = dict(empty.read_always()) if reads else {}
    schemas |= {name: schema for name in taken if (schema := empty.schema(name))}
    return tuple(
        empty.Definition(name, schema, ops.get(name, ""))
        for name, schema in sorted(schemas.items())
    )


def _dispatch_key(device: torch.device) -> str:
    """The dispatch key of a device's kernels, as `CPU`."""
    key: str = torch._C._dispatch_key_for_device(device.type)
    return key


def _operator(name: str) -> Any:
    """The operator of this name, its overload included; AttributeError where there is none."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def _schema(name: str) -> Any:
    """The schema of an operator; None where no library has defined it."""
    try:
        return _operator(name)._schema
    except AttributeError:
        return None


def _misfit(target: OperatorTarget, key: str) -> str:
    """Why a target is not to be taken in this vLLM, or nothing."""
    schema = _schema(target.name)
    has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    if schema is None:
        definable = empty.schema(target.name)
        if not definable:
            return "this vLLM has no such operator"
        schema = torch._C.parse_schema(definable)
    elif not has_kernel(target.name, key):
        return f"this vLLM has no kernel of it for {key}"
    return misfit(target, [a.name for a in schema.arguments], _defaults(schema))


def _defaults(schema: Any) -> dict[str, Any]:
    """The values of the parameters that have some, by name."""
    return {a.name: a.default_value for a in schema.arguments if a.has_default_value()}


def _calls_of(
    impl: OpImpl, spec: OpSpec, wanted: set[str], device: torch.device, dtype: torch.dtype
) -> set[str]:
    """Which of the `wanted` operators an implementation calls itself.

    There nothing is to be overridden: the kernel that is there already is what would run, and only
    the way to it would be longer, for vLLM's layers, too.
    """
    watched = Watched(lambda operator: operator.name() in wanted)
    for sample in spec.samples(dtype, device) if wanted else ():
        try:
            if verdict_of(impl, spec, sample.args) is True:
                with watched, torch.inference_mode():
                    impl.fn(*sample.args)
        except Exception as error:  # the preflight has judged it, and its guard will
            log.debug("%s of %s, asked what it calls: %s", impl.impl_id, spec.name, error)
        if {operator.name() for operator, _, _ in watched.calls} == wanted:
            break
    return {operator.name() for operator, _, _ in watched.calls}


class _Override(taking.Stand[OperatorTarget]):
    """The one override of an operator in this process, in front of the kernel that was there.

    Attributes:
        key: the dispatch key of its kernel.
        kernel: the kernel that was there before.
        before: who had registered that, and those beneath it, the active one first.
        beneath: how many of them are for this key.
    """

    def __init__(self, target: OperatorTarget, key: str) -> None:
        self.key = key
        for former in list(_left_behind):
            if (former.target.name, former.key) == (target.name, key) and not former.after:
                former.library._destroy()
                _left_behind.remove(former)
        schema, before = _schema(target.name), _registered(target.name, key)
        names = tuple(argument.name for argument in schema.arguments)
        super().__init__(target, names, _defaults(schema))
        self.kernel = torch.library.get_kernel(target.name, key)
        self.before, self.beneath = before or ("an unknown place",), len(before)
        if len(before) > 1:
            log.warning(
                "Operator %s had been overridden already, by %s: that is what `stock` means there",
                target.name,
                before[0],
            )
        namespace, _, operator = target.name.partition("::")
        self.library: Any = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            # torch says so at the first override of a process, and never again.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self.library.impl(
                operator, self.answering(), key, with_keyset=True, allow_override=True
            )

    def replaced(self, how: Any, *args: Any, **named: Any) -> Any:
        """The kernel that was there; `how` is the set of dispatch keys that a call came with."""
        try:
            return self.kernel.call_boxed(how, *args, **named)
        except RuntimeError as error:
            if "SafeKernelFunction has been invalidated" not in str(error):
                raise
            raise TargetError(
                f"The kernel of {self.target.name} that vllm-fl replaced is gone: "
                f"{self.before[0]}, who had overridden it first, took its own back while an engine "
                "served. It must stay until that engine is shut down.",
                cause=error,
            ) from error

    def remove(self) -> None:
        """Take it away. One that somebody else stands on stays, and passes every call on."""
        after = self.after
        if not after:
            self.library._destroy()
            return
        _left_behind.append(self)
        log.warning(
            "Operator %s was overridden after vllm-fl, by %s: vllm-fl's override stays beneath it, "
            "and passes every call on",
            self.target.name,
            after,
        )

    @property
    def after(self) -> str:
        """Who has overridden the operator after us; empty if nobody has."""
        now = _registered(self.target.name, self.key)
        return now[0] if len(now) > self.beneath + 1 else ""

    def told(self) -> dict[str, Any]:
        """What a report says of it.

        Returns:
            `replaced`, where the kernel was registered that `stock` means there, or None where this
            vLLM has none; `overridden_by`, who has overridden it after us, or None; and the calls
            left to that kernel: `without_engine`, which no engine of ours made, and
            `other_arguments`, which are not the op, or gave parameters that the binding does not
            know another value than their default.
        """
        return {
            "replaced": None if empty.has_ours(self.target.name) else self.before[0],
            "overridden_by": self.after or None,
            "without_engine": self.without_engine,
            "other_arguments": self.other_arguments,
        }


_left_behind: list[_Override] = []
"""Overrides that nobody needs any more, but that another one stands on: they pass every call on."""


def _registered(name: str, key: str) -> tuple[str, ...]:
    """Where an operator's kernels for a dispatch key were registered, the active one first."""
    dump: str = torch._C._dispatch_dump(name)
    found = re.findall(rf"^{key}(?: \(inactive\))?: (?:registered at )?(.*?) :: ", dump, re.M)
    return tuple(found)


def take(engine: Engine, chosen: Choice, device: torch.device) -> None:
    """Define and override the chosen operators until the engine leaves.

    What was defined, and that nobody else has overridden meanwhile, is not there any more then.
    """
    key, defined = _dispatch_key(device), chosen.defined
    empty.define(defined)
    engine.on_unbind(lambda: empty.forget(defined, {o.target.name for o in _left_behind}))
    taking.take(engine, chosen, partial(_Override, key=key), key)


def overriders(engine: Engine) -> dict[str, str]:
    """Operator -> who has overridden it after the engine did."""
    overrides = (stand for stand in taking.stands_of(engine) if isinstance(stand, _Override))
    return {each.target.name: after for each in overrides if (after := each.after)}


@dataclass
class _Taken:
    """The operators of one engine.

    Attributes:
        chosen: which it overrides.
        overriders: operator -> who has overridden it after us, as far as that was logged.
    """

    chosen: Choice
    overriders: dict[str, str] = field(default_factory=dict)


class Operators(Patcher):
    """Overrides kernels of torch operators of vLLM's."""

    kind = OperatorTarget

    def choose(self, engine: Engine) -> dict[str, Any]:
        dtype = engine.facts.dtype
        assert dtype is not None  # a worker has a model
        chosen = choose(engine.plan, installed_bindings(), engine.device, dtype)
        engine.state[Operators] = _Taken(chosen)
        return {"operators": chosen.names, "defined": chosen.schemas}

    def apply(self, engine: Engine) -> None:
        take(engine, engine.state[Operators].chosen, engine.device)

    def loaded(self, engine: Engine) -> None:
        """Log, once for each, whose kernels now run instead of the plan's."""
        known: dict[str, str] = engine.state[Operators].overriders
        for name, who in overriders(engine).items():
            if known.get(name) != who:
                known[name] = who
                log.warning(
                    "Operator %s was overridden after vllm-fl, by %s: the plan's implementation "
                    "runs in it only if that calls it",
                    name,
                    who,
                )

    compiled = loaded

    def own_form(self, op: str, target: OperatorTarget, device: torch.device) -> OpImpl | None:
        own = None
        if _schema(target.name) is not None and not _misfit(target, _dispatch_key(device)):
            own = _operator(target.name)
        return taking.form_of(op, target, own)

    def report(self, engine: Engine) -> dict[str, Any]:
        chosen: Choice = engine.state[Operators].chosen
        return {"operators": taking.report(engine, chosen), "defined": chosen.schemas}
