"""The kinds of targets: the locations in vLLM where an op can be replaced.

A target is data. Its class defines the behaviour of its kind. The patcher of the kind
(`integration/patchers/`) replaces the target.
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
"""The name of the only `AttentionTarget`. The op of this target has no contract."""

DERIVED = Route()
"""Value of `native` for a target that derives it from its declared route."""


@dataclass(frozen=True)
class Target:
    reaches_compiler: ClassVar[bool] = False
    """Whether compiled code calls the op at this target. Otherwise no compiler sees the call."""

    seen_live: ClassVar[bool] = True
    """Whether an uncompiled run of the loaded model calls the op at this target."""

    needs_layer: ClassVar[bool] = False
    """Whether only a model with such a layer can have the op at this target."""

    called_by_name: ClassVar[bool] = False
    """Whether vLLM's code calls this operator or function by name, inside or outside a layer.
    """

    puts_operators: ClassVar[bool] = False
    """Whether a pass adds the op's operator to graphs. Only the pass makes such calls."""

    on_cpu = False
    """Whether vLLM's layers call the operator on a CPU."""

    @property
    def claims(self) -> tuple[str, ...]:
        """The names in vLLM of this target. Only one op can have each name."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return a phrase for messages, without vLLM's version."""
        return self.claims[0]

    @property
    def plain(self) -> Bound | None:
        """vLLM's implementation at this target, with the contract's parameters; None if it is not
        PyTorch code."""
        native: Bound | None = getattr(self, "native", None)
        return native

    @property
    def apart(self) -> Bound | None:
        """Like `plain`, but with results as in vLLM's graph; None if they are the same."""
        return None

    @property
    def grants(self) -> tuple[str, ...]:
        """The contract's arguments that an implementation may overwrite at this target."""
        return ()

    @property
    def profiled(self) -> tuple[str, ...]:
        """The names that calls of this target have in a profile of vLLM without vllm-fl."""
        return ()

    def may_begin(self, layers: Iterable[object], vllm_config: Any) -> bool:
        return True

    def routed(self, spec: OpSpec) -> Self:
        """Return the target with functions instead of declared routes. Raises TypeError if a
        declared route does not fit the target or the contract."""
        return self


class _Routed(Target):
    route: Callable[[Bound], Bound]
    parameters: tuple[str, ...]
    grants: tuple[str, ...]
    native: Callable[[Bound], Bound] | None = None
    tokens: str = ""
    plain = None  # `native` converts calls of a kernel

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
    """A layer class of vLLM (a CustomOp). A subclass with forward methods for the op replaces it.

    Args:
        path: the class, such as `vllm.model_executor.layers.activation.SiluAndMul`.
        native: vLLM's implementation with the contract's parameters, for calls that no candidate
            supports. If it is None, such a call is an error.
        grants: the arguments that the layer owns and an implementation may therefore overwrite.
        adapt: (layer, the op without the parameters that a layer provides) -> the forward method.
            It is necessary if the layer has different parameters than the contract.
        stand_in: layer -> an object with the attributes that the contract expects of a layer.
            It is necessary if the layer has different attributes.
        subclasses: whether vLLM's subclasses that inherit every forward method are also targets.
        enabled: whether the layer is enabled in vLLM's `custom_ops` while the op is planned. The
            forward methods are always replaced. It is false for norms, because enabling them would
            change vLLM's fusions.
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
        """The name of the class."""
        return self.path.rpartition(".")[2]

    @property
    def claims(self) -> tuple[str, ...]:
        return (f"layer {self.cls}",)  # the key of vLLM's table of replacements

    def describe(self) -> str:
        more = ", and vLLM's subclasses that inherit its forward methods"
        return f"layer {self.cls}{more * self.subclasses}"


@dataclass(frozen=True)
class OperatorTarget(_Routed):
    """A torch operator of vLLM. Its kernel is overridden while the op is in an engine's plan. The
    operator must not be a collective, and must compute only the op.

    Args:
        name: the operator, such as `_C::silu_and_mul`.
        parameters: the operator's parameters, in the order of its schema. A release of vLLM may
            have more parameters at the end. A call that sets any of these to a different value than
            its default runs the replaced kernel.
        route: the conversion from the operator's arguments to the contract. If it cannot be
            declared, a function: (the op with the contract's parameters) -> a kernel with
            `parameters`. The kernel writes the results to the operator's tensors (`put`). For a
            call that does not compute the op, the kernel returns NotImplemented, and the replaced
            kernel runs.
        native: (the replaced kernel, with `parameters`) -> the op with the contract's parameters,
            for calls that no candidate supports. By default it is derived from a declared route.
        grants: the contract's arguments that the operator overwrites. An implementation may
            overwrite them as well. By default they are the `out` of a declared route.
        tokens: the parameter with the op's number of tokens as its first dimension, in every call
            that `route` accepts. If the plan assigns this number to `stock`, the replaced kernel
            runs directly. It is empty if there is no such parameter, or if `route` and `native`
            must convert every call while the op is planned.
        on_cpu: whether vLLM's layers also call the operator on a CPU. Most layers use plain PyTorch
            on a CPU, even if the operator exists.
        within: whether `native` only works inside a call of the target, and raises elsewhere.
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

    @property
    def profiled(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class FunctionTarget(_Routed):
    """A Python function or method of vLLM, for calls from code that vLLM does not compile.

    Mixtures of experts and linear attention call such functions inside one operator that is opaque
    to a compiler. A compiler that traces a call sees vLLM's function.

    Args:
        paths: all locations where vLLM's callers look the function up, such as
            `vllm.model_executor.layers.fused_moe.fused_moe.fused_experts`. Include each module that
            imports the function by name. A method is listed with its class. The first path is the
            function's name. Other paths that a release of vLLM lacks are ignored.
        parameters: the function's parameters, in order, including `self` for a method. See
            `OperatorTarget`.
        route, native, grants: see `OperatorTarget`. The routed function returns the same kind of
            result as vLLM's function.
        tokens: see `OperatorTarget`.
        within: see `OperatorTarget`.
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
        """The function's name in the worker report and the digest."""
        return self.paths[0]

    @property
    def claims(self) -> tuple[str, ...]:
        return tuple(f"function {path}" for path in self.paths)

    def describe(self) -> str:
        return f"function {self.name.removeprefix('vllm.')}"


@dataclass(frozen=True)
class IrTarget(_Routed):
    """An op in vLLM's IR (`vllm.ir`).

    Args:
        name: the IR op, such as `fused_add_rms_norm`.
        route: the conversion from the IR op's arguments to the contract; or a function: (the op
            with the contract's parameters) -> the op with the IR op's parameters.
        grants: the contract's arguments that a provider may overwrite.
        parameters: the IR op's parameters; required for a declared route.
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
    """The attention backends of a model's layers. vLLM loads them by class path."""

    @property
    def claims(self) -> tuple[str, ...]:
        return (ATTENTION_BACKEND,)

    def describe(self) -> str:
        return "the attention layers, by class path"


@dataclass(frozen=True)
class FusionTarget(Target):
    """A pass of vLLM's compiler that replaces matches of the op in a graph by an operator.

    While the op is planned, the pass is enabled, and the ops that it looks for stay `stock`. The
    operator is an `OperatorTarget` of the same binding. The pass decides where the op runs; the
    operator decides which implementation runs.

    Args:
        path: the pass's class, such as `vllm.compilation.passes.fusion.…Pass`.
        flag: the PassConfig field in vLLM that enables the pass.
        parts: the ops that the pass looks for, in vLLM's implementation.
        layers: the layers (by their names in `custom_ops`) that must be enabled for the pass.
        native: vLLM's computation without the pass, with the contract's parameters.
        apart: like `native`, but with results as in vLLM's graph. `vllm-fl tune` times it if the op
            does additional work, such as joining its results in one tensor.
        begins: (a layer of vLLM, the VllmConfig) -> whether the op may begin with this layer. A
            model without such a layer does not have the op. If it is None, this cannot be
            determined.
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
        return f"compiled graphs, at matches of vLLM's {self.path.rpartition('.')[2]}"

    def may_begin(self, layers: Iterable[object], vllm_config: Any) -> bool:
        begins = self.begins
        return begins is None or any(begins(layer, vllm_config) for layer in layers)


@dataclass(frozen=True)
class GraphTarget(Target):
    """An operator in compiled graphs. A pass of vllm-fl replaces it by the op.

    The pass replaces it only in graphs for sizes with an implementation in the plan. In all other
    graphs, and in eager mode, the operator is not replaced.

    Args:
        operators: operators of PyTorch, such as `aten.mm.default`, or of vLLM, such as
            `_C.cutlass_scaled_mm.default`. If the op replaces several operators, list the last one,
            which has the op's result. An operator that overwrites an argument and returns nothing
            is found in its functional form (`auto_functionalized`), with arguments by name.
            Operators that the installed vLLM lacks are ignored.
        find: a node of a graph (`torch.fx.Node`) that calls one of the operators -> the op's
            arguments in the order of the contract (nodes, numbers, strings and None), or None if
            the call does not compute the op. It may create nodes (`new_node`).
        native: the computation that is replaced, with the contract's parameters.
        parts: the ops that `find` looks for, in vLLM's implementation. While any of them is
            planned, the op stays `stock`. Ops with different parts may share an operator.
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
        return f"compiled graphs, at matching calls of {', '.join(self.operators)}"

    @property
    def profiled(self) -> tuple[str, ...]:
        own = () if self.parts else self.operators
        return tuple("::".join(name.split(".")[:2]) for name in own)
