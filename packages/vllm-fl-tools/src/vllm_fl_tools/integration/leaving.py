"""Leaves single layers of an op to vLLM, in an engine that runs.

For `vllm-fl bisect` alone, by vLLM's argument `worker_extension_cls`: no other engine has it. The
engine must be eager, since graphs hold what they were made of, and must answer nothing meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from vllm_fl.dispatch import dispatch_method
from vllm_fl.integration.engines import Engine, without
from vllm_fl.integration.patchers.layers import FORWARDS

__all__ = ["Leaving"]

CALLED = "_forward_method"
"""The attribute of vLLM's layers that holds the forward which it chose."""


class Leaving:
    """Methods that vLLM adds to the worker's."""

    vllm_fl_engine: Engine
    vllm_fl_left: list[Callable[[], None]]

    def vllm_fl_layers_of(self, op: str) -> dict[str, int]:
        """The layers of this worker's model that run an op.

        Returns:
            A layer's name -> how many places of the model share it. vLLM gives layers of the same
            sizes one rope, and it has the name of the first.
        """
        named = _layers_of(self._vllm_fl_model(), op)
        return {names[0]: len(names) for _, names in named}

    def vllm_fl_leave(self, op: str, names: list[str]) -> None:
        """Leave the layers of these names to vLLM, and give the plan back those left before.

        What a left layer calls, as an operator of vLLM's, is vLLM's too.
        """
        for undo in getattr(self, "vllm_fl_left", ()):
            undo()
        self.vllm_fl_left = [
            _leave(layer, self.vllm_fl_engine)
            for layer, named in _layers_of(self._vllm_fl_model(), op)
            if named[0] in names
        ]

    def _vllm_fl_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.get_model()  # type: ignore[attr-defined]
        return model


def _layers_of(model: torch.nn.Module, op: str) -> Iterable[tuple[torch.nn.Module, list[str]]]:
    """Each layer that runs an op, with every name that it has."""
    found: dict[int, tuple[torch.nn.Module, list[str]]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if any(method.op == op for _, method in _methods(layer)):
            found.setdefault(id(layer), (layer, []))[1].append(name)
    return found.values()


def _methods(layer: torch.nn.Module) -> Iterator[tuple[str, dispatch_method]]:
    for name in FORWARDS:
        method = inspect.getattr_static(type(layer), name, None)
        if isinstance(method, dispatch_method):
            yield name, method


def _leave(layer: torch.nn.Module, engine: Engine) -> Callable[[], None]:
    """Put vLLM's own methods into a layer; what is returned puts the plan's back."""
    attributes = vars(layer)
    bound = {name: attributes[name] for name in (*FORWARDS, CALLED) if name in attributes}
    own = {name: partial(_without, engine, method.own(layer)) for name, method in _methods(layer)}
    called = next((name for name in own if bound.get(name) is bound[CALLED]), None)
    if called is None:
        raise RuntimeError(f"{type(layer).__name__} calls a forward that is none of {FORWARDS}")
    attributes.update(own)
    attributes[CALLED] = own[called]
    return partial(attributes.update, bound)


def _without(engine: Engine, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with without(engine):
        return method(*args, **kwargs)
