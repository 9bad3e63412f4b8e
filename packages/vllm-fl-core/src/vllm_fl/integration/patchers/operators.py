"""Override kernels of the torch operators of vLLM.

Code that calls an operator by name (fused mixtures of experts, models without CustomOp layers) then
runs the planned implementation. An operator has one override per process, for all engines
(`process_wide.py`).

An override is a kernel, which compilers do not trace. Its calls are guarded as in eager mode, and
compiled or cached graphs call it like any kernel. For a vLLM without compiled operators, the
operators that the plan needs are defined
(`missing_operators.py`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...contracts import OpSpec
from ...contracts.binding import Binding, OperatorTarget
from ...engine.opaque import Watched
from ...engine.plan import Plan
from ...logs import get_logger
from ...plugins.signatures import verdict_of
from ...plugins.types import OpImpl
from ..engines import Engine
from . import missing_operators
from .layers import layer_table
from .process_wide import Choice, Replacement, Taking, mismatch, replacements_of

log = get_logger("engine")


def operator_overload(name: str) -> Any:
    """Return the operator overload of this name, or None if it is not defined."""
    namespace, _, rest = name.partition("::")
    short, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    return getattr(packet, overload or "default", None)


def _schema(name: str) -> Any:
    return getattr(operator_overload(name), "_schema", None)


def _parameters(schema: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return tuple(argument.name for argument in schema.arguments), defaults


def _calls_of(
    impl: OpImpl, spec: OpSpec, wanted: set[str], device: torch.device, dtype: torch.dtype
) -> set[str]:
    """Return the operators of `wanted` that an implementation calls itself. Overriding them would
    only add overhead to a call of the same kernel."""
    watched = Watched(lambda operator: operator.name() in wanted)
    for sample in spec.samples(dtype, device) if wanted else ():
        try:
            if verdict_of(impl, spec, sample.args) is True:
                with watched, torch.inference_mode():
                    impl.fn(*sample.args)
        except Exception as error:  # verification and the guard handle errors
            log.debug("%s of %s: its operators are unknown: %s", impl.impl_id, spec.name, error)
        if {operator.name() for operator, _, _ in watched.calls} == wanted:
            break
    return {operator.name() for operator, _, _ in watched.calls}


class _Override(Replacement):
    """The override of an operator's kernel.

    Attributes:
        beneath: where the replaced kernel was registered, then where inactive kernels were
            registered.
        logged: the latest override by other code that was logged.
    """

    def __init__(self, target: OperatorTarget, dispatch: str) -> None:
        super().__init__(target, *_parameters(_schema(target.name)))
        self.dispatch, self.logged = dispatch, ""
        self.kernel = torch.library.get_kernel(target.name, dispatch)
        self.beneath = _registered(target.name, dispatch)
        if len(self.beneath) > 1:
            log.warning(
                "Operator %s was already overridden, by %s: `stock` runs that override",
                target.name,
                self.beneath[0],
            )
        namespace, _, operator = target.name.partition("::")
        self.library: Any = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():
            # torch warns at the first override in a process.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self.library.impl(
                operator, self.answering(), dispatch, with_keyset=True, allow_override=True
            )

    def replaced(self, how: Any, *args: Any, **named: Any) -> Any:
        return self.kernel.call_boxed(how, *args, **named)

    def remove(self) -> bool:
        """Remove the override. If other code has overridden the operator later, it is kept and
        passes calls to the kernel."""
        if after := self.after:
            log.warning(
                "Operator %s was overridden after vllm-fl, by %s: vllm-fl's override remains under "
                "it, and passes calls on",
                self.target.name,
                after,
            )
            return False
        self.library._destroy()
        return True

    @property
    def after(self) -> str:
        now = _registered(self.target.name, self.dispatch)
        return now[0] if len(now) > len(self.beneath) + 1 else ""

    def to_json(self) -> dict[str, Any]:
        """Return the override's entry in the worker report. `replaced` and `overridden_by` are
        where the stock kernel and a later override were registered, or None. `without_engine` and
        `other_arguments` count calls of the stock kernel: calls without an engine, and calls that
        do not compute the op or set a parameter that the binding lacks."""
        before = next(iter(self.beneath), "an unknown location")
        return {
            "replaced": None if missing_operators.has_ours(self.target.name) else before,
            "overridden_by": self.after or None,
            "without_engine": self.without_engine,
            "other_arguments": self.other_arguments,
        }


def _registered(name: str, key: str) -> tuple[str, ...]:
    """Return where an operator's kernels for a dispatch key were registered. The active kernel is
    first."""
    dump: str = torch._C._dispatch_dump(name)
    found = re.findall(rf"^{key}(?: \(inactive\))?: (?:registered at )?(.*?) :: ", dump, re.M)
    return tuple(found)


class Operators(Taking):
    kind = OperatorTarget
    key = "operators"

    def note(self, plan: Plan, op: str) -> str:
        """Return why no operator of a planned op may be overridden, or empty. vLLM's layers call
        these operators, but a layer that settings exclude must run vLLM's implementation.
        """
        layers = (layer.cls for layer in layer_table() if layer.op == op)
        if kept := sorted(plan.kept_layers.intersection(layers)):
            return f"layer {kept[0]} is not replaced, and calls its operators"
        if not plan.functions_without_layer(op):
            return "its implementations need the calling layer, which operators do not have"
        return ""

    def misfit(self, target: OperatorTarget, device: torch.device) -> str:
        schema, key = _schema(target.name), torch._C._dispatch_key_for_device(device.type)
        has_kernel: Callable[[str, str], bool] = (
            torch._C._dispatch_has_computed_kernel_for_dispatch_key
        )
        if schema is None:
            definable = missing_operators.schema(target.name)
            if not definable:
                return "this vLLM has no such operator"
            schema = torch._C.parse_schema(definable)
        elif not has_kernel(target.name, key):
            return f"this vLLM has no {key} kernel for it"
        return mismatch(target, *_parameters(schema))

    def install(self, target: OperatorTarget, device: torch.device) -> Replacement:
        return _Override(target, torch._C._dispatch_key_for_device(device.type))

    def choice(
        self,
        plan: Plan,
        bindings: Mapping[str, Binding],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> Choice:
        """Choose the operators to override, except those that an implementation calls."""
        assert dtype is not None
        fitting = super().choice(plan, bindings, device, dtype)
        taken, left = dict(fitting.taken), {op: dict(why) for op, why in fitting.left.items()}
        for op, targets in fitting.taken.items():
            # A pass may insert calls that vLLM's kernel does not support. Therefore its operators
            # are always overridden, which lets the chain fall back.
            by_pass = any(target.puts_operators for target in bindings[op].targets)
            calls: dict[str, str] = {}
            firsts = [impl for impl in plan.entries[op].firsts if not impl.needs_layer]
            for first in () if by_pass else firsts or plan.functions_without_layer(op)[:1]:
                names = {target.name for target in targets} - calls.keys()
                found = _calls_of(first, plan.contracts[op], names, device, dtype)
                calls |= dict.fromkeys(sorted(found), f"{first.impl_id} calls it itself")
            if calls:
                left[op] = left.get(op, {}) | calls
                taken[op] = tuple(target for target in targets if target.name not in calls)
        taken = {op: targets for op, targets in taken.items() if targets}
        # When vLLM compiles a model, it reads some operators without calling them.
        defined = dict(missing_operators.read_always()) if plan.mode == "compiled" else {}
        for name in (target.name for targets in taken.values() for target in targets):
            if schema := missing_operators.schema(name):
                defined[name] = schema
        return Choice(taken, left, dict(sorted(defined.items())))

    def choose(self, engine: Engine) -> dict[str, Any]:
        return super().choose(engine) | {"defined": engine.state[Operators].defined}

    def take(self, engine: Engine, chosen: Choice) -> None:
        missing_operators.define(chosen.defined)
        super().take(engine, chosen)

    def loaded(self, engine: Engine) -> None:
        """Log once each override that was registered after vllm-fl's."""
        for ours in replacements_of(engine):
            if isinstance(ours, _Override) and ours.after not in ("", ours.logged):
                ours.logged = ours.after
                log.warning(
                    "Operator %s was overridden after vllm-fl, by %s: the planned implementation "
                    "runs only if that override calls it",
                    ours.target.name,
                    ours.logged,
                )

    compiled = loaded

    def report(self, engine: Engine) -> dict[str, Any]:
        return super().report(engine) | {"defined": engine.state[Operators].defined}
