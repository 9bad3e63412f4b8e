"""Binding of `linear`: products with unquantised weights, in the graphs that vLLM compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, GraphTarget, SizeRule

from ..contracts.rules import HEAD_SIZE, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS
from ._experts import EXPERT_COUNT, may_have_experts
from ._models import is_quantised

if TYPE_CHECKING:
    from torch import Tensor

OPERATORS = ("aten.mm.default", "aten.addmm.default", "aten.sum.dim_IntList")
"""PyTorch's operators for a product. The sum is Inductor's form of a product in a graph that is
compiled for one row only."""


def _native(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from torch.nn.functional import linear

    return linear(x, weight, bias)


def product_of(node: Any) -> tuple[Any, ...] | None:
    """x, weight and bias of a product if its weight is a transposed graph input, else None."""
    if node.kwargs:  # factors of a sum, or another result dtype
        return None
    x: Any
    bias = None
    match str(node.target):
        case "aten.mm.default":
            x, turned = node.args
        case "aten.addmm.default":
            bias, x, turned = node.args
        case _:
            x, turned = _factors(*node.args)
    weight = _transposed(turned)
    if weight is None or (bias is not None and len(bias.meta["val"].shape) != 1):
        return None
    return x, weight, bias


def _factors(product: Any, dims: list[int], keepdim: bool = False) -> tuple[Any, Any]:
    """x and transposed weight of `(x.unsqueeze(2) * turned.unsqueeze(0)).sum(1)`, or two None."""
    if dims == [1] and not keepdim and str(product.target) == "aten.mul.Tensor":
        match [(str(getattr(part, "target", "")), part) for part in product.args]:
            case [("aten.unsqueeze.default", x), ("aten.unsqueeze.default", turned)]:
                if (x.args[1], turned.args[1]) == (2, 0):
                    return x.args[0], turned.args[0]
    return None, None


def _transposed(turned: Any) -> Any:
    """Return the graph input that `turned` transposes, if its rows are contiguous; else None."""
    match str(getattr(turned, "target", "")):
        case "aten.permute.default" if list(turned.args[1]) == [1, 0]:
            weight = turned.args[0]
        case "aten.t.default":
            weight = turned.args[0]
        case _:
            return None
    value = weight.meta["val"]
    is_input = weight.op in ("placeholder", "get_attr") and value.ndim == 2
    return weight if is_input and value.stride(1) == 1 else None


def _dense_intermediate(config: Any) -> int:
    """Width of the MLP's gate projection; 0 for a mixture of experts, even if some layers have an
    MLP.
    """
    return 0 if may_have_experts(config) else int(INTERMEDIATE.ask(config))


DENSE_INTERMEDIATE = SizeRule(
    "dense_intermediate", _dense_intermediate, INTERMEDIATE.typical, in_kit=False
)


def _router_experts(config: Any) -> int:
    """The number of experts that a router chooses from; 0 without experts."""
    return int(EXPERT_COUNT.ask(config)) if may_have_experts(config) else 0


def _biased(config: Any) -> int:
    """Return a sum of flags for biases: 1 for queries, keys and values, 2 for the output of
    attention, 4 for the MLP."""
    text = config.model_config.hf_text_config

    def is_set(*names: str) -> bool:
        return any(getattr(text, name, None) is True for name in names)

    # Qwen2's configuration has no setting for the bias; the model's class adds it.
    is_qwen2 = str(getattr(text, "model_type", "")).startswith("qwen2")
    whole = is_set("attention_bias", "bias", "use_bias")
    own = whole or is_qwen2 or is_set("qkv_bias", "add_qkv_bias")
    return own + 2 * whole + 4 * is_set("mlp_bias", "use_bias")


def may_have(config: Any) -> bool:
    """Return whether the weights are not quantised, and not packed (as they are on CPUs)."""
    from vllm.platforms import current_platform

    return not is_quantised(config) and not current_platform.is_cpu()


BINDING = Binding(
    targets=(GraphTarget(OPERATORS, product_of, _native),),
    sizes=(
        HIDDEN,
        HEADS,
        KV_HEADS,
        HEAD_SIZE,
        DENSE_INTERMEDIATE,
        SizeRule("router_experts", _router_experts, EXPERT_COUNT.typical, in_kit=False),
        SizeRule("biased", _biased, 1),
    ),
    not_reached=(
        "eager mode, vLLM's CPU platform (its layers have packed weights), and plugin devices "
        "with a compiler that runs no vLLM passes",
        "quantised layers, and kernels that compute more than a product (experts, attention)",
        "the product for the logits, which is outside the compiled model",
    ),
    when=may_have,
    products=True,
)
