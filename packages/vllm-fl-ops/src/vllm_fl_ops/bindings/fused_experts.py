"""Binding of `fused_experts`.

On CUDA the target is a method in vLLM's Triton backend for experts. On the CPU it is an operator.
Another operator packs the weights once, after loading. If the op is planned, that operator leaves
the weights unpacked, so there is one copy, in the contract's layout.

On a plugin's device vLLM has no experts. If the op is planned, the Triton backend is used there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionTarget, OperatorTarget, put
from vllm_fl.errors import StartError

from ..contracts.fused_experts import EXPERT_ACTIVATIONS
from ..contracts.rules import HIDDEN
from ._experts import EXPERT_COUNT, EXPERT_INTERMEDIATE, EXPERTS_OF_A_TOKEN, may_have_experts
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor

ALONE = "vLLM's experts can only run inside a call of their layer"


class _Thread(threading.local):
    """The arguments of the call from vLLM that this thread computes."""

    call: tuple[Any, ...] | None = None


_thread = _Thread()


@contextmanager
def _answering(call: tuple[Any, ...]) -> Iterator[None]:
    before, _thread.call = _thread.call, call
    try:
        yield
    finally:
        _thread.call = before


def _weights(topk_weights: Tensor, on_input: bool) -> Tensor:
    """The weights for the op: 1 if vLLM has already multiplied the input by the weights."""
    return topk_weights.new_ones(topk_weights.shape) if on_input else topk_weights


def _from_triton(op: Bound) -> Bound:
    def apply(*call: Any) -> Any:
        experts, output, x, w1, w2, topk_weights, topk_ids, activation, _, expert_map, *_ = call
        on_input = call[-1]
        if not _is_plain(experts, x, w1, activation):
            return NotImplemented
        with _answering(call):
            result = op(
                x,
                w1,
                w2,
                *_of_tokens(_weights(topk_weights, on_input), topk_ids),
                activation.value,
                False,
                -1 if expert_map is None else expert_map.numel(),
                expert_map,
                experts.w1_bias,
                experts.w2_bias,
            )
        put(output, result)
        return None

    return apply


def _is_plain(experts: Any, x: Tensor, w1: Tensor, activation: Any) -> bool:
    """Return whether these experts compute only the op: no LoRA, quantisation, limit or other
    activation."""
    quantised = experts.quant_config
    more = getattr(experts, "activation_config", quantised)
    limit = getattr(more, "clamp_limit", None) or getattr(quantised, "gemm1_clamp_limit", None)
    return (
        getattr(experts, "_lora_context", None) is None
        and quantised.quant_dtype is None
        and quantised.weight_quant_dtype is None
        and not getattr(experts, "quantization_emulation", False)
        and x.dtype == w1.dtype
        and limit is None
        and activation.value in EXPERT_ACTIVATIONS
    )


def _of_tokens(topk_weights: Tensor, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the id -1, which routers may assign to padding tokens, by id 0 with weight 0."""
    import vllm.envs
    from vllm.forward_context import get_forward_context, is_forward_context_available

    skips = getattr(vllm.envs, "VLLM_MOE_SKIP_PADDING", False) and is_forward_context_available()
    if not skips or getattr(get_forward_context(), "is_padding", None) is None:
        return topk_weights, topk_ids
    return topk_weights.masked_fill(topk_ids < 0, 0.0), topk_ids.clamp(min=0)


def _in_triton(replaced: Bound) -> Bound:
    def op(*_: Any) -> Tensor:
        call = _thread.call
        if call is None:
            raise NotImplementedError(ALONE)
        replaced(*call)
        output: Tensor = call[1]
        return output

    return op


def _given(_: Bound) -> Bound:
    def select_unquantized_moe_backend(moe_config: Any) -> tuple[Any, Any]:
        from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
        from vllm.model_executor.layers.fused_moe.oracle import unquantized

        backend, experts = unquantized.select_unquantized_moe_backend(moe_config)
        if backend is unquantized.UnquantizedMoeBackend.OOT:
            return unquantized.UnquantizedMoeBackend.TRITON, TritonExperts
        return backend, experts

    return select_unquantized_moe_backend


def _from_cpu(op: Bound) -> Bound:
    def cpu_fused_moe(*call: Any) -> None:
        output, x, w13, w2, w13_bias, w2_bias, topk_weights, topk_id, on_input, act, _ = call
        with _answering(call):
            weights = _weights(topk_weights, on_input)
            result = op(x, w13, w2, weights, topk_id, act, False, -1, None, w13_bias, w2_bias)
        put(output, result)

    return cpu_fused_moe


def _in_cpu(replaced: Bound) -> Bound:
    def op(*_: Any) -> Tensor:
        from torch import empty_like, ops

        call = _thread.call
        if call is None:
            raise NotImplementedError(ALONE)
        output, x, w13, w2, *rest = call
        packed = []
        for weight in (w13, w2):
            packed.append(empty_like(weight))
            ops._C.prepack_moe_weight(weight, packed[-1], rest[-1])
        replaced(output, x, *packed, *rest)
        result: Tensor = output
        return result

    return op


def _unpacked(_: Bound) -> Bound:
    def prepack_moe_weight(weight: Tensor, packed_weight: Tensor, isa: str) -> Any:
        if _thread.call is not None:  # an implementation packs for its kernel
            return NotImplemented
        _refuse_expert_parallelism()
        packed_weight.copy_(weight)
        return None

    return prepack_moe_weight


def _refuse_expert_parallelism() -> None:
    from vllm.config import get_current_vllm_config

    if get_current_vllm_config().parallel_config.enable_expert_parallel:
        raise StartError(
            "Op 'fused_experts' cannot run under expert parallelism: vLLM's CPU build does not "
            "pass expert placement to its kernel. Set VLLM_FL_PER_OP='fused_experts=stock', or "
            "start without expert parallelism.",
            op="fused_experts",
        )


def _prepares(_: Bound) -> Bound:
    def op(*_: Any) -> Tensor:
        raise NotImplementedError(ALONE)  # packing and selection do not call the op

    return op


def _may_serve(config: Any) -> bool:
    if config.device_config.device_type == "cpu" and config.parallel_config.enable_expert_parallel:
        return False
    return may_have_experts(config)


BINDING = Binding(
    targets=(
        FunctionTarget(
            ("vllm.model_executor.layers.fused_moe.experts.triton_moe.TritonExperts.apply",),
            names(
                "self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, "
                "global_num_experts, expert_map, a1q_scale, a2_scale, workspace13, workspace2, "
                "expert_tokens_meta, apply_router_weight_on_input"
            ),
            _from_triton,
            _in_triton,
            tokens="hidden_states",
            within=True,
        ),
        FunctionTarget(
            (
                "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
                ".select_unquantized_moe_backend",
            ),
            ("moe_config",),
            _given,
            _prepares,
            within=True,
        ),
        # Without `tokens`: the replaced kernel needs packed weights, which calls do not have while
        # the op is planned.
        OperatorTarget(
            "_C::cpu_fused_moe",
            names(
                "output, input, w13, w2, w13_bias, w2_bias, topk_weights, topk_id, skip_weighted, "
                "act, isa"
            ),
            _from_cpu,
            _in_cpu,
            within=True,
        ),
        OperatorTarget(
            "_C::prepack_moe_weight",
            ("weight", "packed_weight", "isa"),
            _unpacked,
            _prepares,
            within=True,
        ),
    ),
    sizes=(HIDDEN, EXPERT_COUNT, EXPERTS_OF_A_TOKEN, EXPERT_INTERMEDIATE),
    not_reached=(
        "experts that do not use Triton: FlashInfer, AITER, DeepGEMM, Marlin, zentorch, batched "
        "experts fed by all-to-all kernels, and PyTorch experts of older CPU builds",
        "quantised experts, and experts with LoRA",
        "experts with another activation, or with an activation limit (MiniMax-M3, DeepSeek V4)",
        "vLLM's CPU build under expert parallelism",
    ),
    when=_may_serve,
    formerly=("invoke_fused_moe_triton_kernel",),
    calls_operators=True,
)
