"""Where vLLM runs an op: its targets there, the sizes that it has in a model, what is not reached.

A binding is data and small functions. It names vLLM's classes, operators and functions by strings
and imports vllm and torch inside functions only, so that the command line and the documentation
read bindings where neither is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .routes import Bound, Route, by_contract, by_target, put
from .spec import OpSpec

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = [
    "AttentionTarget",
    "Binding",
    "Bound",
    "Contract",
    "FunctionTarget",
    "FusionTarget",
    "GraphTarget",
    "IrTarget",
    "LayerTarget",
    "OperatorTarget",
    "Target",
    "Route",
    "SizeRule",
    "new_node",
    "put",
]

ATTENTION_BACKEND = "the attention backend"
"""What `Binding.claims` calls the one `AttentionTarget`, which is no contract's."""

DERIVED = Route()
"""The native of a target whose declared route tells the way back, too."""


@dataclass(frozen=True)
class LayerTarget:
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


@dataclass(frozen=True)
class OperatorTarget:
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

    name: str
    parameters: tuple[str, ...]
    route: Callable[[Bound], Bound]
    native: Callable[[Bound], Bound] = DERIVED
    grants: tuple[str, ...] = ()
    tokens: str = ""
    on_cpu: bool = False
    within: bool = False

    def __post_init__(self) -> None:
        _check_tokens(self)


@dataclass(frozen=True)
class FunctionTarget:
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

    paths: tuple[str, ...]
    parameters: tuple[str, ...]
    route: Callable[[Bound], Bound]
    native: Callable[[Bound], Bound] = DERIVED
    grants: tuple[str, ...] = ()
    tokens: str = ""
    within: bool = False

    def __post_init__(self) -> None:
        _check_tokens(self)

    @property
    def name(self) -> str:
        """The function, as the report and the digest name it."""
        return self.paths[0]


def _check_tokens(target: OperatorTarget | FunctionTarget) -> None:
    if target.tokens and target.tokens not in target.parameters:
        raise ValueError(
            f"{type(target).__name__} {target.name}: tokens is {target.tokens!r}; expected one of "
            f"its parameters, {', '.join(target.parameters)}"
        )


@dataclass(frozen=True)
class IrTarget:
    """An op of vLLM's IR (`vllm.ir`, in the releases that have it).

    Args:
        name: the IR op, as `fused_add_rms_norm`.
        route: how the IR op's arguments are the contract's; or the op by the contract's parameters
            -> the same by the IR op's own.
        grants: the contract's arguments that a provider may overwrite.
        parameters: the IR op's, where the route is declared.
    """

    name: str
    route: Callable[[Bound], Bound]
    grants: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionTarget:
    """The attention backends of a model's layers, which vLLM is given by class path."""


@dataclass(frozen=True)
class FusionTarget:
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
        unfused: operator -> the code that vLLM compiles in its place while `layers` are off, by the
            operator's parameters. It returns what the operator writes over, in the order of its
            schema. Graphs have it, of sizes at which the op is left to vLLM.
        own: (a graph, a node of it, the op's operator) -> whether the node was the last of the
            op's parts, and the operator was put there: on a plugin's device, where vLLM lacks the
            pass, one of ours asks it of every node. It finds `parts` as ops of vLLM's IR, or as
            operators of ours. None where nothing does it.
        in_ir: those of `parts` that `own` finds as ops of vLLM's IR alone.
        begins: (a layer of vLLM's, its VllmConfig) -> whether the op may begin with it. A model
            that makes no such layer does not have the op. None where that tells nothing.
    """

    path: str
    flag: str
    parts: tuple[str, ...]
    layers: tuple[str, ...] = ()
    native: Bound | None = None
    apart: Bound | None = None
    unfused: Mapping[str, Bound] = field(default_factory=dict)
    own: Callable[[Any, Any, Any], bool] | None = None
    in_ir: tuple[str, ...] = ()
    begins: Callable[[Any, Any], bool] | None = None


@dataclass(frozen=True)
class GraphTarget:
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

    operators: tuple[str, ...]
    find: Callable[[Any], tuple[Any, ...] | None]
    native: Bound
    parts: tuple[str, ...] = ()


Target = (
    LayerTarget
    | OperatorTarget
    | FunctionTarget
    | IrTarget
    | AttentionTarget
    | FusionTarget
    | GraphTarget
)


@dataclass(frozen=True)
class SizeRule:
    """A size of the served model, for the samples of its own shapes.

    Args:
        name: a field of `ModelSizes`, or a name of the binding's own, which goes to its `more`.
        ask: vLLM's VllmConfig -> the size on one rank, in whole features, heads or experts, or a
            number such as the norms' epsilon. Whatever it raises means that the configuration does
            not tell the size.
        typical: what `vllm-fl verify` and the conformance kit take, where there is no model.
        few: what `vllm-fl verify` takes where it compares the bits of rows, if fewer are the same
            to a kernel and less memory, and for the call that it times; None for `typical`.
        in_kit: whether the conformance kit makes calls of this size where a backend's test does not
            tell it. Not if such calls take long, and the contract's samples show as much.
    """

    name: str
    ask: Callable[[Any], float]
    typical: float
    few: float | None = None
    in_kit: bool = True


@dataclass(frozen=True)
class Binding:
    """An op's targets in vLLM.

    Args:
        targets: where vLLM calls it.
        sizes: the sizes that the contract's `served` needs.
        not_reached: where vLLM computes the same past every target; one phrase each.
        when: vLLM's VllmConfig -> whether the served model may have the op; None for an op that any
            model may have. What it raises means that the model may have it. One that a model cannot
            have is neither planned nor verified, unless the user's settings name it.
        between_graphs: whether vLLM calls the op in what its piecewise CUDA graphs leave out (its
            `splitting_ops`: attention, linear attention). In a step that prefills the host launches
            it then, at sizes of which graphs are captured, too, and `vllm-fl tune` counts that.
        formerly: ops of vllm-plugin-FL whose target the op has, with other parameters: who orders
            one of them is told this op's name.
        former_layers: names of the op's layers that vllm-plugin-FL's lists of layers hold: a vLLM
            that lacks such a layer is said to, and the start goes on.
        fused_by: the fields of vLLM's PassConfig that turn on passes which match the op and put a
            kernel of vLLM's there. While one is on, compiled code has vLLM's own form, unless the
            op is one of vLLM's IR there.
        batch_invariant: what of vLLM's own VLLM_BATCH_INVARIANT asks for where the op would run, as
            `vLLM's own kernel`: the op is left to vLLM then. Empty where it asks for nothing.
        needs: names that the targets call or read, as `vllm.package.module:Class.method`. A release
            that lacks one has no target for the op, which is left to vLLM, and said to be. What a
            target itself names (a class, a function) is asked for without being told here.
        shared: where vLLM keeps layers of the op that all models of a process share, as
            `vllm.package.module:TABLE`: dictionaries, which are emptied before a model is built.
            Each counts as needed, too.
        products: whether the op is the model's matrix products, which are most of what the device
            does in a large batch. Where they keep it busy for longer than the host takes for a
            layer, `vllm-fl tune` counts no launches. An op that takes in a product of another op's
            is none of them: that product would count twice.
        calls_operators: whether vLLM's own form of the op calls operators that are targets of other
            ops: of a model that has it, those are not ordered by range of sizes.
    """

    targets: tuple[Target, ...] = ()
    sizes: tuple[SizeRule, ...] = ()
    not_reached: tuple[str, ...] = ()
    when: Callable[[Any], bool] | None = None
    between_graphs: bool = False
    formerly: tuple[str, ...] = ()
    former_layers: tuple[str, ...] = ()
    fused_by: tuple[str, ...] = ()
    batch_invariant: str = ""
    needs: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    products: bool = False
    calls_operators: bool = False

    @property
    def claims(self) -> tuple[str, ...]:
        """Its targets by name, as `operator _C::silu_and_mul`: each can be only one op's. Operators
        of graphs are told apart by the part that is looked for behind them."""
        return tuple(dict.fromkeys(name for target in self.targets for name in _claims(target)))

    def routed(self, spec: OpSpec) -> Binding:
        """The same binding, with functions in the place of declared routes.

        Raises:
            TypeError: a declared route does not fit its target, or the contract.
        """
        return replace(self, targets=tuple(_routed(target, spec) for target in self.targets))


def _routed(target: Target, spec: OpSpec) -> Target:
    if not isinstance(target, OperatorTarget | FunctionTarget | IrTarget):
        return target
    changed: dict[str, Any] = {}
    native = None if isinstance(target, IrTarget) else target.native
    if isinstance(target.route, Route):
        changed["route"] = partial(by_target, target.route, target.parameters, spec)
        changed["grants"] = target.grants or target.route.written(spec)
        native = target.route if native is DERIVED else native
    if isinstance(native, Route):
        changed["native"] = partial(by_contract, native, target.parameters, spec)
    return replace(target, **changed) if changed else target


def _claims(target: Target) -> list[str]:
    """What a target takes of vLLM, by the names under which vLLM has one of each."""
    match target:
        case LayerTarget():
            return [f"layer {target.cls}"]  # vLLM's registry knows a layer by this name
        case OperatorTarget():
            return [f"operator {target.name}"]
        case FunctionTarget():
            return [f"function {path}" for path in target.paths]
        case IrTarget():
            return [f"IR op {target.name}"]
        case FusionTarget():
            return [f"pass {target.path}", f"pass_config.{target.flag}"]
        case GraphTarget():
            behind = [f" behind {part}" for part in target.parts] or [""]
            return [f"operator {n}{part} in graphs" for n in target.operators for part in behind]
        case AttentionTarget():
            return [ATTENTION_BACKEND]


@dataclass(frozen=True)
class Contract:
    """An op that a plugin brings.

    Args:
        spec: what the op is.
        binding: the module that has its `BINDING`, as `acme.bindings.acme_op`; None for an op that
            vLLM has no target for, and that scripts call.
    """

    spec: OpSpec
    binding: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.spec, OpSpec):
            raise TypeError(f"Contract: spec is {self.spec!r}; expected an OpSpec")
        if not re.fullmatch("[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"Contract: the op's name, which is its oracle's, is {self.name!r}; expected "
                "lower-case letters, digits and underscores"
            )
        if not isinstance(self.binding, str | None):
            raise TypeError(
                f"Contract of {self.name}: binding is {self.binding!r}; expected a module's path, "
                "as 'acme.bindings.acme_op', or None"
            )

    @property
    def name(self) -> str:
        """The op's name."""
        return self.spec.name


def new_node(graph: Graph, target: Callable[..., Any], *args: Any) -> Node:
    """A call of `target` in a graph, for `FusionTarget.own` and `GraphTarget.find`: it has what
    later passes read of it."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.node import map_arg

    node = graph.call_function(target, args)
    values: Any = map_arg(args, lambda of: of.meta["val"])
    fake: Any = detect_fake_mode(values)
    with unset_fake_temporarily(), fake:
        node.meta["val"] = target(*values)
    return node
