"""Functions of vLLM's that do nothing but call an operator: the short way to its override.

From Python to an operator and from torch's dispatcher back to Python takes the host microseconds,
also for a call that is left to vLLM. While an operator is overridden, such a function is one of
ours that calls the override itself. It goes by the dispatcher, as vLLM's own does, where somebody
has to see the call: a compiler, a mode of torch's, or a profiler.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .lookups import Target, target_of

__all__ = ["ShortWay"]


class ShortWay:
    """The functions that only call one operator.

    Args:
        operator: as `_C_cache_ops::reshape_and_cache_flash`.
        parameters: the names of all its parameters.
        paths: where a function that calls it is looked up. Modules that are not loaded are passed
            over: they import what stands in one that is.
        kernel: the override: the dispatch keys, then the operator's arguments.
        device: the type of the devices that the override is for.
        keyset: the dispatch keys that the override is called with.
    """

    def __init__(
        self,
        operator: str,
        parameters: tuple[str, ...],
        paths: tuple[str, ...],
        kernel: Callable[..., Any],
        device: str,
        keyset: Any,
    ) -> None:
        self.parameters, self.paths = parameters, paths
        self.kernel, self.device, self.keyset = kernel, device, keyset
        self.is_open = False
        self._own: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None
        found = _loaded(paths)
        fits = [t.function for t in found if only_calls(t.function, operator, parameters)]
        if fits:
            self._own, self._ours = fits[0], self._function(fits[0])
            self.is_open = True
            self._put(self._ours, instead_of=self._own)

    @property
    def places(self) -> int:
        """How many lookups of vLLM's function find ours."""
        return sum(self.is_open and target.now is self._ours for target in _loaded(self.paths))

    def close(self) -> None:
        """Put vLLM's function back, also where ours was imported meanwhile."""
        self.is_open = False
        if self._own is not None:
            self._put(self._own, instead_of=self._ours)

    def _put(self, function: Callable[..., Any], instead_of: Callable[..., Any] | None) -> None:
        for target in _loaded(self.paths):
            if target.now is instead_of:
                target.put(function)

    def _function(self, own: Callable[..., Any]) -> Callable[..., Any]:
        kernel, device, keyset = self.kernel, self.device, self.keyset
        parameters, count = self.parameters, len(self.parameters)
        modes, profiled = torch._C._len_torch_dispatch_stack, torch._C._autograd._profiler_enabled

        @functools.wraps(own)
        def called(*args: Any, **named: Any) -> Any:
            # Python's error for a call that is none of the function's is vLLM's to raise.
            if (
                self.is_open
                and len(args) + len(named) == count
                and (not named or named.keys() == set(parameters[len(args) :]))
                and args
                and isinstance(args[0], torch.Tensor)
                and args[0].device.type == device
                and not (torch.compiler.is_compiling() or modes() or profiled())
            ):
                return kernel(keyset, *args, **named)
            return own(*args, **named)

        return called


def only_calls(function: Any, operator: str, parameters: tuple[str, ...]) -> bool:
    """Whether a function's whole body is the operator's call with its own parameters, in order."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return False
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return False
    for argument in definition.args.args:
        argument.annotation = None
    has_docstring = ast.get_docstring(definition) is not None
    body = [ast.unparse(statement) for statement in definition.body[has_docstring:]]
    names = ", ".join(parameters)
    call = f"torch.ops.{operator.replace('::', '.')}({names})"
    return ast.unparse(definition.args) == names and body in ([call], [f"return {call}"])


def _loaded(paths: Iterable[str]) -> list[Target]:
    """Where they are looked up, of those whose modules are loaded and have such a thing."""
    parts = [path.rpartition(".") for path in paths]
    return [
        target_of(f"{module}.{attribute}")
        for module, _, attribute in parts
        if hasattr(sys.modules.get(module), attribute)
    ]
