"""The kinds of targets: the locations in vLLM where an op can be replaced.

A target is data. Attributes and methods of its class give the behaviour of the kind. The patcher of
the kind (`integration/patchers/`) replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

from .routes import Bound, Route, by_contract, by_target
from .spec import OpSpec

__all__ = [
    "AttentionTarget",
    "FunctionTarget",
    "FusionTarget",
    "GraphTarget",
    "IrTarget",
    "LayerTarget",
    "OperatorTarget",
    "Target",
]

ATTENTION_BACKEND = "the attention backend"
"""The claim of the only `AttentionTarget`, which has no contract."""

DERIVED = Route()
"""The native of a target whose declared route tells the way back, too."""


@dataclass(frozen=True)
class Target:
    """A location in vLLM where an op can be replaced: the base of every kind."""

    reaches_compiler: ClassVar[bool] = False
    """Whether compiled code calls the op here. Otherwise no compiler sees the call."""

    seen_live: ClassVar[bool] = True
    """Whether an uncompiled run of the loaded model calls the op here."""

    needs_layer: ClassVar[bool] = False
    """Whether only a model with such a layer has the op here."""

    called_by_name: ClassVar[bool] = False
    """Whether vLLM's code calls an operator or a function here, in a layer or without one."""

    puts_operators: ClassVar[bool] = False
    """Whether a pass puts the op's operator into graphs here, in calls that only the pass makes."""

    on_cpu = False
    """Whether vLLM's layers call the operator on a CPU."""

    @property
    def claims(self) -> tuple[str, ...]:
        """The names in vLLM that only one op can have as a target."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return a phrase for people, without the release of vLLM that has it."""
        raise NotImplementedError

    @property
    def plain(self) -> Bound | None:
        """vLLM's implementation here, if it is PyTorch code, by the contract's parameters."""
        return None

    @property
    def apart(self) -> Bound | None:
        """The same with the results of vLLM's graph, if the op has to do more than that."""
        return None

    @property
    def grants(self) -> tuple[str, ...]:
        """The contract's arguments that an implementation may overwrite here."""
        return ()

    @property
    def profiled(self) -> tuple[str, ...]:
        """The names of calls in a profile of vLLM without us."""
        return ()

    def may_begin(self, layers: Iterable[object], vllm_config: Any) -> bool:
        """Return whether a model of these layers can have the op here."""
        return True

    def routed(self, spec: OpSpec) -> Self:
        """Return the same target, with functions instead of declared routes.

        Raises:
            TypeError: a declared route does not fit the target, or the contract.
        """
        return self


class _Routed(Target):
    """A target with a route from its arguments to the arguments of the contract."""

    route: Callable[[Bound], Bound]
    parameters: tuple[str, ...]
    grants: tuple[str, ...]
    native: Callable[[Bound], Bound] | None = None
    tokens: str = ""

    def __post_init__(self) -> None:
        if self.tokens and self.tokens not in self.parameters:
            raise ValueError(
                f"{self.describe()}: tokens is {self.tokens!r}; expected one of its parameters, "
                f"{', '.join(self.parameters)}"
            )

    def routed(self, spec: OpSpec) -> Self:
        changed: dict[str, Any] = {}
        native = self.native
        if isinstance(self.route, Route):
            changed["route"] = partial(by_target, self.route, self.parameters, spec)
            changed["grants"] = self.grants or self.route.written(spec)
            native = self.route if native is DERIVED else native
        if isinstance(native, Route):
            changed["native"] = partial(by_contract, native, self.parameters, spec)
        return replace(self, **changed) if changed else self


@dataclass(frozen=True)
class LayerTarget(Target):
    """A class of vLLM's layers (a CustomOp): a subclass takes its place, its forwards the op's.

    Args:
        path: the class, as `vllm.model_executor.layers.activation.SiluAndMul`.
        native: vLLM's own form of the op, by the contract's parameters: what runs when every
            candidate refused a call. Without it such a call is an error.
        grants: the arguments that the layer owns, so that an implementation may overwrite them.
        adapt: (layer, the op without the parameters that a layer provides) -> the method, for a
            layer whose own parameters are not the contract's.
        stand_in: layer -> what is asked in its place for the parameters that a layer provides, for
            a layer whose attributes mean something else than the contract's.
        subclasses: whether vLLM's own subclasses that inherit every forward are targets, too.
        enabled: whether vLLM is told (`custom_ops`) that the layer is on while the op is planned.
            Every forward is ours either way. Norms are not: that would change what vLLM fuses.
    """

    reaches_compiler: ClassVar[bool] = True
    needs_layer: ClassVar[bool] = True

    path: str
    native: Bound | None = None
    grants: tuple[str, ...] = ()
    adapt: Callable[[Any, Bound], Bound] | None = None
    stand_in: Callable[[Any], object] | None = None
    subclasses: bool = False
    enabled: bool = True

    @property
    def cls(self) -> str:
        """The class's name, as `SiluAndMul`."""
        return self.path.rpartition(".")[2]

    @property
    def claims(self) -> tuple[str, ...]:
        return (f"layer {self.cls}",)  # vLLM's registry knows a layer by this name

    def describe(self) -> str:
        more = ", and vLLM's subclasses of it that inherit its forwards"
        return f"layer {self.cls}{more * self.subclasses}"

    @property
    def plain(self) -> Bound | None:
        return self.native


@dataclass(frozen=True)
class OperatorTarget(_Routed):
    """A torch operator of vLLM's: its kernel is overridden while an engine's plan has the op.

    Only pure operators may be named: no collective, and nothing that computes more than the op.

    Args:
        name: the operator, as `_C::silu_and_mul`.
        parameters: the operator's parameters, in its schema's order. A release may have further
            ones behind them; a call that gives one of these another value than its default is left
            to the replaced kernel.
        route: how the operator's arguments are the contract's. Where that cannot be declared: the
            op by the contract's parameters -> a kernel with `parameters`. It leaves the results
            where the operator does (`put`). It returns NotImplemented for a call that is not the
            op: the replaced kernel runs then.
        native: the replaced kernel, with `parameters` -> the op by the contract's parameters: what
            runs when every candidate refused a call. A declared route tells it, too.
        grants: the contract's arguments that the operator overwrites, so that an implementation
            may, too. Of a declared route those are its `out`.
        tokens: the parameter whose first dimension is the op's number of tokens, in every call that
            `route` takes. Calls of sizes that the plan leaves to vLLM then reach the replaced
            kernel as they came. Empty where no parameter is so, or where the kernel must not have
            vLLM's own calls while the op is planned: they go through `route` and `native`.
        on_cpu: whether vLLM's layers call it on a CPU, too. Most compute with plain PyTorch there,
            though vLLM has the operator.
        within: whether `native` runs inside of a call of the target alone, and by itself refuses.
    """

    called_by_name: ClassVar[bool] = True

    name: str
    parameters: tuple[str, ...]
    route: Callable[[Bound], Bound]
    native: Callable[[Bound], Bound] = DERIVED
    grants: tuple[str, ...] = ()
    tokens: str = ""
    on_cpu: bool = False
    within: bool = False

    @property
    def claims(self) -> tuple[str, ...]:
        return (f"operator {self.name}",)

    def describe(self) -> str:
        return f"operator {self.name}"

    @property
    def profiled(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class FunctionTarget(_Routed):
    """A Python function or method of vLLM's, for calls from code that vLLM does not compile.

    Mixtures of experts and linear attention call such functions inside one operator that a compiler
    takes whole. A compiler that traces a call takes vLLM's own function.

    Args:
        paths: where vLLM's callers look the function up, as
            `vllm.model_executor.layers.fused_moe.fused_moe.fused_experts`, each module that imports
            it by name included; a method by its class. The first one names the function; of the
            others, those that a release lacks are left out.
        parameters: the function's parameters, in its order, for a method `self` too. A release may
            have further ones behind them; a call that gives one of these another value than its
            default is left to vLLM's function.
        route, native, grants: as for an `OperatorTarget`; a function returns what vLLM's does.
        tokens: the parameter whose first dimension is the op's number of tokens, in every call that
            `route` takes. Calls of sizes that the plan leaves to vLLM then reach its function as
            they came. Empty where no parameter is so, or where the function must not have vLLM's
            own calls while the op is planned: they go through `route` and `native`.
        within: as for an `OperatorTarget`.
    """

    called_by_name: ClassVar[bool] = True

    paths: tuple[str, ...]
    parameters: tuple[str, ...]
    route: Callable[[Bound], Bound]
    native: Callable[[Bound], Bound] = DERIVED
    grants: tuple[str, ...] = ()
    tokens: str = ""
    within: bool = False

    @property
    def name(self) -> str:
        """The function, as the report and the digest name it."""
        return self.paths[0]

    @property
    def claims(self) -> tuple[str, ...]:
        return tuple(f"function {path}" for path in self.paths)

    def describe(self) -> str:
        return f"function {self.name.removeprefix('vllm.')}"


@dataclass(frozen=True)
class IrTarget(_Routed):
    """An op of vLLM's IR (`vllm.ir`).

    Args:
        name: the IR op, as `fused_add_rms_norm`.
        route: how the IR op's arguments are the contract's; or the op by the contract's parameters
            -> the same by the IR op's own.
        grants: the contract's arguments that a provider may overwrite.
        parameters: the IR op's, where the route is declared.
    """

    reaches_compiler: ClassVar[bool] = True

    name: str
    route: Callable[[Bound], Bound]
    grants: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    @property
    def claims(self) -> tuple[str, ...]:
        return (f"IR op {self.name}",)

    def describe(self) -> str:
        return f"vllm.ir.{self.name}"

    @property
    def profiled(self) -> tuple[str, ...]:
        return (f"vllm_ir::{self.name}",)


@dataclass(frozen=True)
class AttentionTarget(Target):
    """The attention backends of a model's layers, which vLLM is given by class path."""

    @property
    def claims(self) -> tuple[str, ...]:
        return (ATTENTION_BACKEND,)

    def describe(self) -> str:
        return "the attention layers, by class path"


@dataclass(frozen=True)
class FusionTarget(Target):
    """A pass of vLLM's compiler that finds the op in a graph and puts an operator there.

    While the op is planned, the pass is turned on, and what it looks for is left to vLLM. The
    operator is an `OperatorTarget` of the same binding: the pass decides where the op runs, and the
    operator which implementation does.

    Args:
        path: the pass's class, as `vllm.compilation.passes.fusion.…Pass`.
        flag: the field of vLLM's PassConfig that turns it on.
        parts: the ops that it looks for in vLLM's own form.
        layers: the layers (by the names in `custom_ops`) that must be on for that.
        native: what vLLM computes where the pass is off, by the contract's parameters.
        apart: the same with the results as vLLM's graph has them, where the op's are more than that
            (put together in one tensor, say): what `vllm-fl tune` takes the time of.
        begins: (a layer of vLLM's, its VllmConfig) -> whether the op may begin with it. A model
            that makes no such layer does not have the op. None where that tells nothing.
    """

    seen_live: ClassVar[bool] = False
    puts_operators: ClassVar[bool] = True

    path: str
    flag: str
    parts: tuple[str, ...]
    layers: tuple[str, ...] = ()
    native: Bound | None = None
    apart: Bound | None = None
    begins: Callable[[Any, Any], bool] | None = None

    @property
    def claims(self) -> tuple[str, ...]:
        return f"pass {self.path}", f"pass_config.{self.flag}"

    def describe(self) -> str:
        return f"where vLLM's pass {self.path.rpartition('.')[2]} finds it"

    @property
    def plain(self) -> Bound | None:
        return self.native

    def may_begin(self, layers: Iterable[object], vllm_config: Any) -> bool:
        begins = self.begins
        return begins is None or any(begins(layer, vllm_config) for layer in layers)


@dataclass(frozen=True)
class GraphTarget(Target):
    """An operator in graphs that vLLM compiles: a pass of ours puts the op there.

    In the graphs of sizes at which the op is planned, an implementation stands in the operator's
    place; in all others, and in eager mode, the operator stays.

    Args:
        operators: PyTorch's, as `aten.mm.default`, or vLLM's, as `_C.cutlass_scaled_mm.default`. Of
            an op that takes several in, the last one, whose result is the op's. One that writes
            over its result, and returns nothing, is found in its functional form
            (`auto_functionalized`), which has its arguments by name. One that this vLLM does not
            have is passed over.
        find: a node of a graph (`torch.fx.Node`) that calls one of them -> the op's arguments, by
            the contract's parameters: nodes, numbers, words and None; None for a call that is not
            the op. It may make the nodes that it returns (`new_node`).
        native: what the operator computes, by the contract's parameters.
        parts: the ops that `find` looks for in vLLM's own form. While one of them is planned, the
            op is left to vLLM. Ops with other parts may share an operator.
    """

    reaches_compiler: ClassVar[bool] = True
    seen_live: ClassVar[bool] = False

    operators: tuple[str, ...]
    find: Callable[[Any], tuple[Any, ...] | None]
    native: Bound
    parts: tuple[str, ...] = ()

    @property
    def claims(self) -> tuple[str, ...]:
        behind = [f" behind {part}" for part in self.parts] or [""]
        return tuple(f"operator {n}{part} in graphs" for n in self.operators for part in behind)

    def describe(self) -> str:
        return f"compiled graphs, where the op is found at {', '.join(self.operators)}"

    @property
    def plain(self) -> Bound | None:
        return self.native

    @property
    def profiled(self) -> tuple[str, ...]:
        own = () if self.parts else self.operators
        return tuple("::".join(name.split(".")[:2]) for name in own)
