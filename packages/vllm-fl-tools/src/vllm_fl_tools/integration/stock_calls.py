"""Calls vLLM's implementations of an op without an engine, for comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_fl.contracts.binding import Binding, FunctionTarget, OperatorTarget, Target
from vllm_fl.integration.patchers.functions import Functions
from vllm_fl.integration.patchers.lookups import lookup_of
from vllm_fl.integration.patchers.operators import Operators, operator_overload
from vllm_fl.integration.targets import stock_form
from vllm_fl.settings.policy import Mode

if TYPE_CHECKING:
    from vllm_fl.plugins.types import OpImpl


def stock_forms(op: str, binding: Binding, mode: Mode, device: torch.device) -> tuple[OpImpl, ...]:
    """Return vLLM's implementations of `op`, with the contract's parameters; layers' code first.

    vLLM may have a kernel for each kind of call. For other calls, such a kernel returns incorrect
    results or raises. The tuple is empty if vLLM does not run the op in this mode, or has no
    separate function for it.

    In compiled mode, Inductor compiles a layer's PyTorch code.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    granted = frozenset(
        name for target in binding.targets if target.called_by_name for name in target.grants
    )
    natives = [
        stock_form(op, target.plain, granted if target.puts_operators else frozenset())
        for target in binding.targets
    ]
    on_cpu: list[OpImpl | None] = []
    kernels: list[OpImpl | None] = []
    for target in binding.targets:
        used = device.type == "cpu" and target.on_cpu
        (on_cpu if used else kernels).append(_called(op, target, device))
    if mode == "compiled":
        ordered = [*natives, *on_cpu, *kernels]
    elif not all(target.seen_live for target in binding.targets):
        return ()
    elif device.type == "cpu":
        ordered = [*on_cpu, *natives, *kernels]
    else:
        ordered = [*kernels, *natives]
    found: dict[Callable[..., object], OpImpl] = {}
    for form in ordered:
        if form is not None:
            # torch names operators after ids, which must therefore be unique.
            number = f".{len(found)}" if found else ""
            named = dataclasses.replace(form, impl_id=form.impl_id + number)
            found.setdefault(form.fn, named)
    return tuple(found.values())


def _called(op: str, target: Target, device: torch.device) -> OpImpl | None:
    """Return vLLM's kernel or function at a target that no compiler traces.

    Return None if this vLLM lacks it, or if it works only inside a call of the target.
    """
    own: Callable[..., object] | None = None
    if isinstance(target, OperatorTarget) and not Operators().misfit(target, device):
        own = operator_overload(target.name)
    elif isinstance(target, FunctionTarget) and not Functions().misfit(target, device):
        own = lookup_of(target.name).function
    if own is None or not isinstance(target, OperatorTarget | FunctionTarget) or target.within:
        return None
    return stock_form(op, target.native(own), frozenset(target.grants), traceable=False)


def apart(binding: Binding, forms: Sequence[OpImpl]) -> dict[str, Callable[..., object]]:
    """Return impl id -> a cheaper function to time instead, for `forms` that have one."""
    less = {target.plain: target.apart for target in binding.targets if target.apart is not None}
    return {form.impl_id: less[form.fn] for form in forms if form.fn in less}
