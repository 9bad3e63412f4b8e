"""Where vLLM runs an op: its targets there, the sizes that it has in a model, what is not reached.

A binding is data and small functions. It names vLLM's classes, operators and functions by strings
and imports vllm and torch inside functions only, so that the command line and the documentation
read bindings where neither is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from . import targets as _targets
from .routes import Bound, Route, put
from .spec import ModelSizes, OpSpec
from .targets import *  # noqa: F403
from .targets import Target

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = ["Binding", "Bound", "Contract", "Route", "SizeRule", "by_name", "model_sizes"]
__all__ += ["new_node", "put", "with_values"]
__all__ += _targets.__all__

LONGEST = 2**18
"""Positions of a made table at most: 128 MiB in float32, of 128 features. vLLM takes any length
under VLLM_ALLOW_LONG_MAX_MODEL_LEN, and each sample has a table of its own."""


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
    batch_invariant: str = ""
    needs: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    products: bool = False
    calls_operators: bool = False

    @property
    def claims(self) -> tuple[str, ...]:
        """Its targets by name, as `operator _C::silu_and_mul`: each can be only one op's. Operators
        of graphs are told apart by the part that is looked for behind them."""
        return tuple(dict.fromkeys(name for target in self.targets for name in target.claims))

    def routed(self, spec: OpSpec) -> Binding:
        """The same binding, with functions in the place of declared routes.

        Raises:
            TypeError: a declared route does not fit its target, or the contract.
        """
        return replace(self, targets=tuple(target.routed(spec) for target in self.targets))


@dataclass(frozen=True)
class Contract:
    """An op that a plugin brings.

    Args:
        spec: what the op is.
        binding: the module with its `BINDING`, such as `acme.bindings.acme_op`, or with a mapping
            from ops to bindings; None for an op that vLLM has no target for, and that scripts call.
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

    @property
    def name(self) -> str:
        """The op's name."""
        return self.spec.name


def new_node(graph: Graph, target: Callable[..., Any], *args: Any) -> Node:
    """Return a new call of `target` in a graph, with what later passes read of it."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.node import map_arg

    node = graph.call_function(target, args)
    values: Any = map_arg(args, lambda of: of.meta["val"])
    fake: Any = detect_fake_mode(values)
    with unset_fake_temporarily(), fake:
        node.meta["val"] = target(*values)
    return node


def model_sizes(config: Any, bindings: Iterable[Binding]) -> ModelSizes:
    """The served model's sizes, by the rules of the ops' bindings.

    Args:
        config: vLLM's VllmConfig.
        bindings: those of every op. Rules of one name are one: the first is asked.
    """
    rules = by_name(rule for binding in bindings for rule in binding.sizes)
    return replace(
        with_values({name: _size(rule, config) for name, rule in rules.items()}),
        tokens=(1, int(config.scheduler_config.max_num_batched_tokens)),
        max_position=min(int(config.model_config.max_model_len), LONGEST),
    )


def by_name(rules: Iterable[SizeRule]) -> dict[str, SizeRule]:
    """The rules by their names. Those of one name are one, the first."""
    found: dict[str, SizeRule] = {}
    for rule in rules:
        found.setdefault(rule.name, rule)
    return found


def with_values(values: Mapping[str, float | None]) -> ModelSizes:
    """Sizes of these values: those that `ModelSizes` has no field for are its `more`."""
    own = {field.name for field in fields(ModelSizes)} - {"tokens", "max_position", "more"}
    known: dict[str, Any] = {n: v for n, v in values.items() if n in own and v is not None}
    return ModelSizes(**known, more={n: v for n, v in values.items() if n not in own})


def _size(rule: SizeRule, config: Any) -> float | None:
    try:
        return rule.ask(config)
    except Exception:  # configurations are the models' own, and anything may be missing
        return None
