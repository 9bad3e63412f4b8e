"""Bindings: an op's targets in vLLM, its sizes in a model, and the code that is not covered.

A binding refers to vLLM's classes, operators and functions by string, and imports vllm and torch
only inside functions. The command line and the documentation can therefore read it without vllm.
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
"""Maximum number of positions in a sample's table: 128 MiB in float32 for 128 features. Each sample
has its own table. The limit is necessary because VLLM_ALLOW_LONG_MAX_MODEL_LEN allows any
length."""


@dataclass(frozen=True)
class SizeRule:
    """How to get one size of the served model, for samples with the model's shapes.

    Args:
        name: a field of `ModelSizes`, or a key of `ModelSizes.more`.
        ask: vLLM's VllmConfig -> the size on one rank (features, heads or experts), or a number
            such as the epsilon of the norms. If it raises any exception, the size is unknown.
        typical: the size without a model, for `vllm-fl verify` and the conformance kit.
        few: a smaller size that saves memory and makes no difference for a kernel; None for
            `typical`. `vllm-fl verify` uses it to compare the bits of rows, and for the timed call.
        in_kit: whether the conformance kit makes calls of this size if a backend's test does not
            set it; False if such calls are slow and the contract's samples test the same.
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
        targets: the locations in vLLM where the op can be replaced.
        sizes: the sizes that the contract's `served` needs.
        not_reached: code in vLLM that computes the op but is not a target; one phrase each.
        when: vLLM's VllmConfig -> whether the served model may have the op; an exception means yes.
            If the model cannot have the op, it is planned and verified only if the user's settings
            refer to it. If `when` is None, any model may have the op.
        between_graphs: whether vLLM calls the op between the pieces of its piecewise CUDA graphs
            (`splitting_ops`: attention, linear attention). In a prefill step the host then launches
            the op even at captured sizes, so `vllm-fl tune` includes the launch time.
        formerly: ops of vllm-plugin-FL with the same target and different parameters. If a setting
            contains such a name, a warning suggests this op.
        former_layers: the op's layers in vllm-plugin-FL's lists of layers. If the installed vLLM
            lacks the layer, a setting with such a name causes a warning instead of an error.
        batch_invariant: the vLLM code that VLLM_BATCH_INVARIANT requires instead of the op, such as
            `vLLM's own kernel`; empty for none. If the variable is set, the op stays `stock`.
        needs: names that the targets call or read, such as `vllm.package.module:Class.method`. If
            the installed vLLM lacks a name, the op stays `stock`, and the reason is reported. The
            classes and functions of the targets need not be listed.
        shared: dictionaries with the op's layers of all models of a process, such as
            `vllm.package.module:TABLE`. They are required like `needs`. They are emptied before a
            model is built.
        products: whether the op is a matrix product of the model. Matrix products are most of the
            device's work in large batches. If they take longer than the host needs for a layer,
            `vllm-fl tune` ignores launch times. It is False for an op that includes the product of
            another op, because the product would be counted twice.
        calls_operators: whether vLLM's implementation of the op calls operators that are targets of
            other ops. A model with this op may then use those ops without having their layers, and
            `vllm-fl tune` does not assume that they are compiled separately for ranges of sizes.
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
        """The names of its targets, such as `operator _C::silu_and_mul`. Only one op can have each
        name. The names of a `GraphTarget` include its `parts`, if it has any."""
        return tuple(dict.fromkeys(name for target in self.targets for name in target.claims))

    def routed(self, spec: OpSpec) -> Binding:
        """Return the binding with functions instead of declared routes; see `Target.routed`."""
        return replace(self, targets=tuple(target.routed(spec) for target in self.targets))


@dataclass(frozen=True)
class Contract:
    """An op that a plugin provides.

    Args:
        spec: the contract.
        binding: the module that defines `BINDING`, such as `acme.bindings.acme_op`. `BINDING` is a
            Binding, or a mapping from ops to bindings. It is None for an op without a target in
            vLLM, which only scripts call.
    """

    spec: OpSpec
    binding: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.spec, OpSpec):
            raise TypeError(f"Contract: spec is {self.spec!r}; expected an OpSpec")
        if not re.fullmatch("[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"Contract: the oracle's name is {self.name!r}; expected lower-case letters, "
                "digits and underscores"
            )

    @property
    def name(self) -> str:
        """The op's name."""
        return self.spec.name


def new_node(graph: Graph, target: Callable[..., Any], *args: Any) -> Node:
    """Add a call of `target` to a graph, with the `meta["val"]` that later passes read."""
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
    """Return the served model's sizes, from the rules of the bindings of all ops. `config` is
    vLLM's VllmConfig. If several rules have the same name, the first is used."""
    rules = by_name(rule for binding in bindings for rule in binding.sizes)
    return replace(
        with_values({name: _size(rule, config) for name, rule in rules.items()}),
        tokens=(1, int(config.scheduler_config.max_num_batched_tokens)),
        max_position=min(int(config.model_config.max_model_len), LONGEST),
    )


def by_name(rules: Iterable[SizeRule]) -> dict[str, SizeRule]:
    """Index the rules by name. The first rule with a name is kept."""
    found: dict[str, SizeRule] = {}
    for rule in rules:
        found.setdefault(rule.name, rule)
    return found


def with_values(values: Mapping[str, float | None]) -> ModelSizes:
    """Return `ModelSizes` with these values. Names that are not fields are added to `more`."""
    own = {field.name for field in fields(ModelSizes)} - {"tokens", "max_position", "more"}
    known: dict[str, Any] = {n: v for n, v in values.items() if n in own and v is not None}
    return ModelSizes(**known, more={n: v for n, v in values.items() if n not in own})


def _size(rule: SizeRule, config: Any) -> float | None:
    try:
        return rule.ask(config)
    except Exception:  # configuration classes differ by model, and may lack any attribute
        return None
