"""Mixtures of experts, on the Triton kernels of FlagGems, or of this package for few tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from ..loading import flag_gems_module
from . import implementation
from .routing import check_ids, in_powers, of_experts

ROWS = 4
"""Weight rows per program of the kernels for few tokens. The fastest, with their blocks, on an H200
for one token and the experts of six models (2026-11-30)."""

MOST_TOKENS = 64
"""Maximum number of tokens of these kernels. They are the fastest for one and two tokens only,
because each token reads the weights of its experts."""


def fused_experts(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run FlagGems's `fused_experts_impl`. Intermediate results are rounded; the sum is in fp32.

    Not supported: float32, activations other than "silu", biases together with weights on the
    input. `global_num_experts` is ignored. An invalid id raises IndexError on the CPU only.
    """
    count = len(w13) if expert_map is None else len(expert_map)
    ids, absent = of_experts(topk_ids, count)
    out: torch.Tensor = _kernels().fused_experts_impl(
        hidden_states.contiguous(),
        w13.contiguous(),
        w2.contiguous(),
        # The kernels ignore strides of the routing, and write outside their memory for an invalid
        # id. A position with an invalid id gets a valid id, with weight 0.
        topk_weights.masked_fill(absent, 0.0).contiguous(),
        ids.contiguous(),
        activation=activation,
        apply_router_weight_on_input=apply_router_weight_on_input,
        global_num_experts=-1 if expert_map is None else expert_map.numel(),
        expert_map=expert_map,
        w1_bias=w13_bias,
        w2_bias=w2_bias,
    )
    return out


def of_few_tokens(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute each token's experts by itself, in two kernels. Sums are in fp32, rounded once.

    Not supported: float32, activations other than "silu", weights on the input, biases. An invalid
    id raises IndexError on the CPU only.

    Raises:
        NotImplementedError: there are more than `MOST_TOKENS` tokens.
    """
    if len(hidden_states) > MOST_TOKENS:
        raise NotImplementedError(f"the kernels support at most {MOST_TOKENS} tokens")
    from ..triton_kernels import experts_inner_kernel, experts_outer_kernel

    known = len(w13) if expert_map is None else len(expert_map)
    check_ids(topk_ids, known)
    x, w13, w2 = hidden_states.contiguous(), w13.contiguous(), w2.contiguous()
    weights, ids = topk_weights.contiguous(), topk_ids.contiguous()
    (tokens, k), features, width = ids.shape, w2.shape[1], w2.shape[2]
    out, inner = torch.empty_like(x), x.new_empty((tokens * k, width), dtype=torch.float32)
    if not tokens:
        return out
    sizes = k, known, width, features
    block, outer_block = 512, 1024 if width > 512 else 512
    whole = width % ROWS == 0 and features % block == 0
    with torch.cuda.device(x.device):
        experts_inner_kernel[(-(-width // ROWS) * tokens * k,)](
            x, w13, ids, expert_map, inner, *sizes, ROWS, block, whole
        )
        experts_outer_kernel[(-(-features // ROWS) * tokens,)](
            inner, w2, weights, ids, expert_map, out, *sizes, ROWS, outer_block
        )
    return out


@cache
def _kernels() -> Any:
    """Return FlagGems's module.

    The module repeats its warnings in every call; each is logged only once. It sorts rows by
    `in_powers`, in whole blocks, because its own function compiles kernels for each number of rows.
    """
    module = flag_gems_module("fused.fused_moe")
    module.moe_align_block_size = partial(in_powers, pad_sorted_ids=True)
    said: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return message not in said and not said.add(message)  # type: ignore[func-returns-value]

    logging.getLogger(module.__name__).addFilter(is_new)
    return module


CONDITIONS = ("hidden_states.dtype != torch.float32", "activation == 'silu'")
"""Conditions of both implementations. FlagGems's kernels would use TF32, with 10 bits. The kernels
for few tokens do not replace them in a model that they do not support."""

OPS = (
    replace(
        implementation(
            of_few_tokens,
            *CONDITIONS,
            "not apply_router_weight_on_input",
            "w13_bias is None and w2_bias is None",
            own=True,
        ),
        op_name="fused_experts",
        impl_id="flagos.few_tokens",
        priority=100,  # after the kernels of FlagGems, which are faster for many tokens
    ),
    implementation(
        fused_experts,
        *CONDITIONS,
        # The kernels also multiply the bias by the weight, which belongs only to the input.
        "not apply_router_weight_on_input or w13_bias is None",
    ),
)
