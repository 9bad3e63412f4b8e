"""Binding of `moe_align_block_size`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionTarget, Route

from ._experts import EXPERT_COUNT, EXPERTS_OF_A_TOKEN
from ._models import has_experts
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS = "vllm.model_executor.layers.fused_moe"
_CALLERS = (
    f"{_EXPERTS}.moe_align_block_size",
    f"{_EXPERTS}.fused_moe",
    f"{_EXPERTS}.experts.fused_humming_moe",
    f"{_EXPERTS}.experts.marlin_moe",
    f"{_EXPERTS}.experts.mxfp8_native_moe",
    f"{_EXPERTS}.experts.nvfp4_emulation_moe",
    f"{_EXPERTS}.experts.rdna3_moe",
    f"{_EXPERTS}.experts.triton_moe",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    ".compressed_tensors_moe_wna16_rdna3",  # before vLLM 0.32
)


def _has_signed_ids(topk_ids: Tensor) -> bool:
    """Return whether the contract allows the dtype of ids. Some all-to-all kernels return unsigned
    ids.
    """
    import torch

    return topk_ids.ndim == 2 and topk_ids.dtype in (torch.int32, torch.int64)


BINDING = Binding(
    targets=(
        FunctionTarget(
            tuple(f"{module}.moe_align_block_size" for module in _CALLERS),
            names(
                "topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, "
                "ignore_invalid_experts"
            ),
            Route(only=_has_signed_ids),
            tokens="topk_ids",
        ),
    ),
    sizes=(EXPERT_COUNT, EXPERTS_OF_A_TOKEN),
    not_reached=(
        "experts of `fused_experts`, if that op is planned: its implementations do their own "
        "sorting",
        "experts with a kernel that also sorts (FlashInfer, DeepGEMM, AITER), batched experts, and "
        "experts with LoRA",
        "small batches of vLLM's Triton experts, where each row is a block, and calls that also "
        "request the position of each row (`return_scatter_idx`)",
        "vLLM's CPU build: its experts use no blocks",
    ),
    when=has_experts,
)
