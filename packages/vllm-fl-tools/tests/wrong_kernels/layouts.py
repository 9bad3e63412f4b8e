"""Kernels that fail on strided features, or return a strided result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .corpus import GELU, NORM, ROTARY, wrong_for
from .faults import changed, damaged, each, packed

EXPERTS, CACHE = "fused_experts", "reshape_and_cache"
MLA, QK = "concat_and_cache_mla", "qk_norm_rope"
MROPE, CONV = "multimodal_rotary_embedding", "causal_conv1d"
UPDATE, CHUNKS = "causal_conv1d_update", "chunk_gated_delta_rule"
RECURRENT, MERGE = "recurrent_gated_delta_rule", "merge_attn_states"


def _apart(x: Any) -> bool:
    """Whether the elements of a row are not adjacent in memory."""
    return isinstance(x, Tensor) and x.ndim > 1 and x.shape[-1] > 1 and x.stride(-1) != 1


@wrong_for(
    *((RECURRENT, "a"), (RECURRENT, "b"), (RECURRENT, "v"), (CHUNKS, "g"), (CHUNKS, "k")),
    *(("gdn_gating", "a"), ("gdn_gating", "b"), (NORM, "residual"), (ROTARY, "key")),
    *((QK, "qkv"), (MROPE, "query"), (MERGE, "suffix_output"), (MERGE, "prefix_lse")),
    *(("linear", "x"), ("layer_norm", "x"), ("moe_topk", "gating_output"), (EXPERTS, "topk_ids")),
    *((EXPERTS, "topk_weights"), ("rms_norm_gated", "z"), (CONV, "x"), (UPDATE, "x")),
    *((CACHE, "value"), (MLA, "k_pe"), ("quant_fp8", "x"), ("quant_int8", "x"), ("xielu", "x")),
    *(("grouped_topk", "gating_output"), ("moe_sum", "topk_ids"), (GELU, "x"), ("relu2", "x")),
    sees="nonsense in models that compute on transposed tensors",
    by=changed,
)
def features_apart(argument, a):
    """Reads strided rows of {} as if they were contiguous."""
    if _apart(a[argument]):
        a[argument] = packed(a[argument])


@wrong_for(
    *(NORM, "gdn_gating", "quant_int8", "gelu_fast", "rms_norm_gated", "xielu"),
    sees="code that expects a contiguous result reads nonsense",
    start=False,
    kit="values",
    why="for inputs with such strides, which no vLLM layer passes, startup compares only values: "
    "plain PyTorch keeps the strides as well",
    by=damaged,
)
def result_lies_as_its_input(got, x, *rest):
    """Returns a result with the strides of its input instead of a contiguous one."""
    if not _apart(x):
        return got

    def as_input(part: Tensor) -> Tensor:
        if part.shape != x.shape:
            return part
        return torch.empty_like(x, dtype=part.dtype).copy_(part)

    return each(got, as_input)
