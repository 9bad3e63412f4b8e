"""What several bindings say of where vLLM goes past them."""

from __future__ import annotations

__all__ = ["EXPERTS", "HW_AGNOSTIC"]

EXPERTS = (
    "experts whose kernel computes the activation, too: vLLM's quantised ones, and its CPU build's"
)
HW_AGNOSTIC = (
    "the Transformers backend under VLLM_USE_HW_AGNOSTIC=1 (vLLM 0.28 on): its layers have a "
    "registry of their own"
)
