"""Choose the classes that compute quantised experts.

vLLM has a function for each scheme, with an order of backends. It returns the first class that
supports the experts, and the backend of the class. vLLM then converts the weights for this backend.
While a model is built, this module wraps these functions, because layers do not keep the arguments.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...plugins.types import EXPERT_OPS
from ...text import quote
from .layers import in_tables

ORACLES = "vllm.model_executor.layers.fused_moe.oracle"
"""vLLM's package with a module for each scheme."""

MODULES = ("int_wna16", "fp8", "int8", "mxfp8", "mxfp4", "nvfp4")
"""Its modules. The scheme is the name without `int_`, and `fp8_block` if the scales of fp8 weights
are for blocks."""

CLOSED = frozenset(("wna16_experts",))
"""Ops for which vLLM accepts only its own classes. It asserts this after converting the weights."""

SELECT = re.compile(r"select_\w+_moe_backend")
"""The names of vLLM's functions that choose a backend and a class."""

LAYERS, CLASSES = "vllm.model_executor.layers.", "backend_to_kernel_cls"
"""vLLM's package with the callers, and the end of the name of the function that returns the classes
of a backend."""

ATTRIBUTE = "vllm_fl_offers"

_building: dict[str, Mapping[str, Iterable[Any]]] = {}


def refusal_by(cls: Any, name: str, *args: Any) -> str:
    """Return a class's reason for refusing a layer, from its method `name`; empty if it accepts.
    An exception is a reason too, because third-party code may raise anything."""
    try:
        can, why = getattr(cls, name)(*args)
        return "" if can else str(why).rstrip(". ") or f"{name} returned no reason"
    except Exception as error:
        return f"it raised {quote(error)}"


class Offers(NamedTuple):
    """The backends that vLLM considers for the experts of a layer, in its order.

    Args:
        module: vLLM's module for the scheme.
        asked: backend -> the further arguments of `is_supported_config` of its classes.
    """

    module: str
    asked: dict[Any, tuple[Any, ...]]

    @property
    def op(self) -> str:
        """The op of the layer's scheme."""
        weight: Any = next((asked[1] for asked in self.asked.values()), None)
        shape = getattr(getattr(weight, "scale", None), "group_shape", None)
        is_block = self.module == "fp8" and shape is not None and min(shape) > 1
        return f"{self.module.removeprefix('int_')}{'_block' * is_block}_experts"

    def backend_for(self, cls: Any) -> tuple[Any, str]:
        """Return (the first backend with which a class can compute the layer, an empty text), or
        (None, vLLM's reason)."""
        why = "vLLM does not consider it for this layer"
        for backend, asked in self.asked.items():
            if not {*cls.__mro__}.intersection(_classes(self.module, backend)):
                continue
            why = refusal_by(cls, "is_supported_config", cls, *asked)
            if not why:
                return backend, ""
        return None, why


def offers_for(method: Any) -> Offers | None:
    """Return the backends for the experts of a quantisation method; None if no order can choose
    their class."""
    found: Offers | None = getattr(getattr(method, "moe", None), ATTRIBUTE, None)
    return found


def known_experts(op: str) -> list[type]:
    """Return vLLM's classes for an op, of all backends; empty if this vLLM has none."""
    scheme = op.removesuffix("_experts").removesuffix("_block")
    module = next(name for name in MODULES if name.removeprefix("int_") == scheme)
    kinds: list[Any] = [each for each in _names(module).values() if isinstance(each, enum.EnumType)]
    backends = (each for kind in kinds if "moebackend" in kind.__name__.lower() for each in kind)
    return [*dict.fromkeys(cls for backend in backends for cls in _classes(module, backend))]


def choosing_experts(
    planned: Mapping[str, Iterable[Any]],
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield entries for `in_tables`, with which vLLM uses the first class of an op that supports
    the experts. `planned` is op -> classes."""
    yield _building, "planned", {op: planned[op] for op in EXPERT_OPS if op in planned}
    for module in MODULES:
        _names(module)  # imported before a caller copies its function
    callers = [each for path, each in [*sys.modules.items()] if path.startswith(LAYERS)]
    for names in map(vars, callers):
        for name in [each for each in names if SELECT.fullmatch(each)]:
            package, _, module = names[name].__module__.rpartition(".")
            is_wrapped = hasattr(names[name], "__wrapped__")  # imported inside such a block
            if package == ORACLES and module in MODULES and not is_wrapped:
                yield names, name, _choosing(names[name])


@cache
def _choosing(select: Callable[..., Any]) -> Callable[..., Any]:
    module = select.__module__.rpartition(".")[2]

    @wraps(select)
    def chosen(*args: Any, **named: Any) -> Any:
        if not _building:  # a module that was imported inside a block keeps this function
            return select(*args, **named)
        config = named["config"] if "config" in named else args[0]
        offers = Offers(module, _asked(select, *args, **named))
        setattr(config, ATTRIBUTE, offers)
        for cls in _building["planned"].get(offers.op, ()):
            backend, why = offers.backend_for(cls)
            if not why:
                return backend, cls
        return select(*args, **named)

    return chosen


def _asked(select: Callable[..., Any], *args: Any, **named: Any) -> dict[Any, tuple[Any, ...]]:
    """Call vLLM's function with a class that supports nothing. Return its arguments by backend."""
    asked: dict[Any, tuple[Any, ...]] = {}

    def noting(backend: Any) -> list[Any]:
        def is_supported_config(_: Any, *given: Any) -> tuple[bool, str]:
            asked.setdefault(backend, given)
            return False, "only the arguments are needed"

        return [SimpleNamespace(is_supported_config=is_supported_config)]

    names = vars(sys.modules[select.__module__])
    with suppress(Exception), in_tables([(names, _resolver(names), noting)]):
        select(*args, **named)  # raises, or returns no class
    return asked


def _classes(module: str, backend: Any) -> list[type]:
    """Return vLLM's classes of a backend; empty if it is for other schemes or not installed."""
    names = _names(module)
    try:
        found: list[type] = names[_resolver(names)](backend)
    except Exception:
        return []
    return found


def _names(module: str) -> Mapping[str, Any]:
    """Return the names of vLLM's module for a scheme; empty if it cannot be imported."""
    try:
        return vars(import_module(f"{ORACLES}.{module}"))
    except Exception:  # an older release, or a module that fails
        return {}


def _resolver(names: Mapping[str, Any]) -> str:
    """Return the name of a module's function that returns the classes of a backend."""
    own = (name for name in names if name.endswith(CLASSES))
    return max(own, key=lambda name: names[name].__module__ == names["__name__"])
