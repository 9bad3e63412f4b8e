"""What several bindings say of where vLLM goes past them."""

from __future__ import annotations

__all__ = ["HW_AGNOSTIC", "MOE"]

MOE = "MoE experts: vLLM's fused_moe calls its own kernels, the activation included"
HW_AGNOSTIC = (
    "the Transformers backend under VLLM_USE_HW_AGNOSTIC=1 (vLLM 0.28 on): its layers have a "
    "registry of their own"
)
