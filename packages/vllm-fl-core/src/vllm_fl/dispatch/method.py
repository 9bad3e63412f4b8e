"""`dispatch_method`: an op as a method of a layer class, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..contracts.routes import Bound
from ..plugins.types import BackendImplKind, OpImpl
from .chain import UseOriginal
from .context import Binder, current_binder
from .manager import get_default_manager
from .resolver import FOREIGN, STOCK

PLAN_ATTRIBUTE = "_vllm_fl_plan"
"""The attribute of a layer for the plan to which the layer is bound, or None."""


@dataclass(eq=False, repr=False)
class dispatch_method:
    """A descriptor that binds an op to a layer: `forward_oot = dispatch_method("rms_norm")`.

    Reading the attribute resolves the op and returns a function. vLLM reads the attribute once, in
    `CustomOp.__init__`, and keeps the function. A call then costs one attribute look-up. A layer
    that is built inside an engine binds to the engine's plan. If the op is `stock` in the plan, the
    attribute is the base class's method.

    Args:
        op: the op's name. The method has the contract's parameters without those in `from_layer`.
        grants: arguments that the layer owns and an implementation may therefore overwrite.
        adapt: (layer, the bound op) -> the method, for a layer with different parameters.
        last: vLLM's implementation, for a call that no candidate of a plan supports.
        stand_in: layer -> an object that replaces the layer as the source of the parameters in
            `from_layer`, and as the argument of implementations that need the layer. It is
            necessary if the layer lacks attributes that the contract expects.
        traces_own: whether compiled code gets vLLM's method, because the compiler gets the op in a
            different way. The method must have the parameters of the bound op.
        vllms: vLLM's class, if the base class is from another plugin. A call that no candidate
            supports then runs the method of the base class.
    """

    op: str
    grants: Iterable[str] = ()
    adapt: Callable[[Any, Bound], Bound] | None = field(default=None, kw_only=True)
    last: OpImpl | None = field(default=None, kw_only=True)
    stand_in: Callable[[Any], object] | None = field(default=None, kw_only=True)
    traces_own: bool = field(default=False, kw_only=True)
    vllms: type | None = field(default=None, kw_only=True)
    owner: type | None = field(default=None, init=False)
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.grants = frozenset(self.grants)

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, instance: Any, owner: type | None = None) -> Bound:
        if instance is None:
            return self  # type: ignore[return-value]  # read on the class: the descriptor
        plan: Binder | None = instance.__dict__.setdefault(PLAN_ATTRIBUTE, current_binder())
        provider = self.stand_in(instance) if self.stand_in else instance
        grants = frozenset(self.grants)
        base: OpImpl | None = None
        if plan is None:
            bound = get_default_manager().bind(self.op, provider, grants)
        elif plan.is_stock(self.op) or self._is_kept(plan):
            return self.original(instance)
        else:
            traced = not self.traces_own
            is_called = plan.mode == "eager" or not traced
            if is_called and (self.vllms is not None or plan.is_partly_stock(self.op)):
                pseudo, kind = STOCK if self.vllms is None else FOREIGN, BackendImplKind.REFERENCE
                base = OpImpl(self.op, pseudo.impl_id, kind, _use_original, consumes=grants)
            last = self.last if self.vllms is None or base is None else base
            bound = plan.bind(self.op, provider, grants, last=last, original=base, traced=traced)
        if self.adapt:
            bound = self.adapt(instance, bound)
        if base is not None:
            bound = partial(_or_original, self.original(instance), bound)
        if plan is not None and plan.mode == "compiled" and self.traces_own:
            from torch.compiler import is_compiling

            # A partial instead of a closure, because copies of the layer also copy the methods in
            # it.
            original = self.original(instance, self.vllms)
            return partial(_unless_compiling, is_compiling, original, bound)
        return bound

    def original(self, instance: Any, cls: type | None = None) -> Bound:
        """Return the method of the base class, or of `cls`, one of its bases."""
        mro = type(instance).__mro__
        after = self.owner if cls is None else mro[mro.index(cls) - 1]
        method: Bound = getattr(super(after, instance), self.name)
        return method

    def _is_kept(self, plan: Binder) -> bool:
        base = self.owner.__base__ if self.owner else None
        return base is not None and base.__name__ in plan.kept_layers

    def __repr__(self) -> str:
        return f"dispatch_method({self.op!r})"


def _use_original(*_: Any) -> Any:
    raise UseOriginal


def _or_original(original: Bound, bound: Bound, *args: Any, **kwargs: Any) -> Any:
    """Call `bound`. If it raises `UseOriginal`, call `original`. In that case nothing has been
    computed."""
    try:
        return bound(*args, **kwargs)
    except UseOriginal:
        return original(*args, **kwargs)


def _unless_compiling(
    compiling: Callable[[], bool], original: Bound, bound: Bound, *args: Any, **kwargs: Any
) -> Any:
    return original(*args, **kwargs) if compiling() else bound(*args, **kwargs)
