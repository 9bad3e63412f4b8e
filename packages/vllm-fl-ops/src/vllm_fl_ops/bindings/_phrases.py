"""What several bindings say of where vLLM goes past them."""

from __future__ import annotations

__all__ = ["EXPERTS", "GELU_TANH", "HW_AGNOSTIC"]

EXPERTS = (
    "experts whose kernel computes the activation, too: vLLM's quantised ones, and its CPU build's"
)
GELU_TANH = "`gelu_pytorch_tanh`, the same function by one operator of PyTorch's"
HW_AGNOSTIC = (
    "the Transformers backend under VLLM_USE_HW_AGNOSTIC=1 (vLLM 0.28 on): its layers have a "
    "registry of their own"
)
