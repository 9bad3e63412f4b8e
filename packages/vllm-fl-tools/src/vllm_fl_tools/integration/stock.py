"""vLLM's own forms of an op, called without an engine: what a user has where nothing is planned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_fl.contracts.binding import (
    Binding,
    FunctionPlace,
    FusionPlace,
    GraphPlace,
    LayerPlace,
    OperatorPlace,
)
from vllm_fl.integration.patchers import functions, operators
from vllm_fl.integration.places import stock_form
from vllm_fl.settings.policy import Mode

if TYPE_CHECKING:
    from vllm_fl.plugins.types import OpImpl

__all__ = ["apart", "stock_forms"]


def stock_forms(op: str, binding: Binding, mode: Mode, device: torch.device) -> tuple[OpImpl, ...]:
    """vLLM's own forms of `op`, by the contract's parameters: first what its layers run.

    There may be several, since vLLM has a kernel for each kind of call; who calls one that is not
    for its call gets a wrong result, or an exception. None where vLLM runs the op nowhere in this
    mode, or has no function for it alone.

    Compiled, a layer's own form is what Inductor makes of its plain PyTorch.

    Args:
        op: the op.
        binding: its places.
        mode: how the engine runs the model.
        device: the engine's.
    """
    _import_kernels()
    granted = frozenset(
        name
        for place in binding.places
        if isinstance(place, OperatorPlace)
        for name in place.grants
    )
    natives = [
        stock_form(op, place.native, granted if isinstance(place, FusionPlace) else frozenset())
        for place in binding.places
        if isinstance(place, LayerPlace | GraphPlace | FusionPlace)
    ]
    on_cpu: list[OpImpl | None] = []
    kernels: list[OpImpl | None] = []
    for place in binding.places:
        used = device.type == "cpu" and isinstance(place, OperatorPlace) and place.on_cpu
        (on_cpu if used else kernels).append(_opaque(op, place, device))
    if mode == "compiled":
        ordered = [*natives, *on_cpu, *kernels]
    elif any(isinstance(place, FusionPlace | GraphPlace) for place in binding.places):
        return ()
    elif device.type == "cpu":
        ordered = [*on_cpu, *natives, *kernels]
    else:
        ordered = [*kernels, *natives]
    found: dict[Callable[..., object], OpImpl] = {}
    for form in ordered:
        if form is not None:
            # Torch's operators are named after ids: two forms must not share one.
            number = f".{len(found)}" if found else ""
            named = dataclasses.replace(form, impl_id=form.impl_id + number)
            found.setdefault(form.fn, named)
    return tuple(found.values())


def apart(binding: Binding, forms: Sequence[OpImpl]) -> dict[str, Callable[..., object]]:
    """Id of a form of vLLM's -> what vLLM's graph has in its place, where that is less.

    Args:
        binding: the op's.
        forms: what `stock_forms` gave for it.
    """
    places = [place for place in binding.places if isinstance(place, FusionPlace)]
    less = {place.native: place.apart for place in places if place.apart is not None}
    return {form.impl_id: less[form.fn] for form in forms if form.fn in less}


def _opaque(op: str, place: object, device: torch.device) -> OpImpl | None:
    """The form that is a kernel or a function of vLLM's, which no compiler looks into."""
    own: Callable[..., object] | None
    if isinstance(place, OperatorPlace | FunctionPlace) and place.within:
        return None
    if isinstance(place, OperatorPlace):
        own = operators.own(place, device)
    elif isinstance(place, FunctionPlace):
        own = functions.own(place)
    else:
        return None
    if own is None:
        return None
    return stock_form(op, place.native(own), frozenset(place.grants), traceable=False)


def _import_kernels() -> None:
    """Load vLLM's compiled operators, as its workers do."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
