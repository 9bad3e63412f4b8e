"""A stand-in for VllmConfig with the attributes that vllm-fl reads, for tests without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["engine_config"]


def engine_config(
    entry: object = None, *, mode: object = None, head_size: int | Exception = 64, **fields: Any
) -> Any:
    """Configuration of an engine for a model with 8 query heads.

    Args:
        entry: vllm-fl's entry in `additional_config`, if any.
        mode: the compilation mode; None for eager.
        head_size: the model's head size, or an exception raised when it is read.
        fields: `custom_ops`, `pass_config`, `ir_op_priority`, `backend` (of attention),
            `tensor_parallel_size`; all others are fields of the model's text configuration.
    """

    def size_of_heads() -> int:
        if isinstance(head_size, Exception):
            raise head_size
        return head_size

    priority = {"rms_norm": [], "fused_add_rms_norm": [], **fields.pop("ir_op_priority", {})}
    passes = fields.pop("pass_config", {})
    custom_ops = fields.pop("custom_ops", [])
    backend = fields.pop("backend", None)
    parallel = fields.pop("tensor_parallel_size", 1)
    return SimpleNamespace(
        additional_config={} if entry is None else {"vllm_fl": entry},
        attention_config=SimpleNamespace(backend=backend),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        compilation_config=SimpleNamespace(
            mode=mode,
            custom_ops=custom_ops,
            cudagraph_capture_sizes=None,
            backend="",
            pass_config=SimpleNamespace(**passes),
            static_forward_context={},
        ),
        kernel_config=SimpleNamespace(ir_op_priority=SimpleNamespace(**priority)),
        speculative_config=None,
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            quantization=None,
            hf_text_config=SimpleNamespace(**fields),
            max_model_len=4096,
            use_mla=False,
            get_head_size=size_of_heads,
            get_hidden_size=lambda: 512,
            get_num_attention_heads=lambda parallel: 8 // parallel.tensor_parallel_size,
            get_num_kv_heads=lambda parallel: 2 // parallel.tensor_parallel_size,
        ),
        lora_config=None,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=parallel,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            enable_expert_parallel=False,
            worker_cls="acme.Worker",
        ),
        quant_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
    )
