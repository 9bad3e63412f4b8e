"""What of an op vLLM computes past us, by op: data for `vllm-fl explain` and the documentation.

Imports no vllm, so that the command line may read it anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["BYPASSES"]

_MOE = "MoE experts: vLLM's fused_moe calls its own kernels, the activation included"
_HW_AGNOSTIC = (
    "the Transformers backend under VLLM_USE_HW_AGNOSTIC=1 (vLLM 0.28 on): its layers have a "
    "registry of their own"
)
_FUSED_ACTIVATION = (
    "quantised models: vLLM's passes and kernels that fuse activation and quantisation take both"
)

BYPASSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "silu_and_mul": (_MOE, _FUSED_ACTIVATION, _HW_AGNOSTIC),
        "gelu_and_mul": (_MOE, _HW_AGNOSTIC),
        "attention_backend": (
            "layers for which vLLM is told a backend: --attention-backend, a backend per kind of "
            "layer, a model's or a drafter's own",
            "attention that asks no platform: Mamba and linear attention, vision encoders, models "
            "that bring their own backend",
        ),
        "rms_norm": (
            "norms that a fusion pass of vLLM matched (with quantisation, all-reduce, or rope), in "
            "compiled mode on CUDA: the pass puts its own kernel there",
            "in eager mode subclasses of RMSNorm and GemmaRMSNorm (the Transformers backend's, "
            "K2-Horizon's) and direct calls of vllm.ir",
            "gated norms of Mamba and linear attention, and LayerNorm: other formulas",
        ),
        "rotary_embedding": (
            "multimodal rope (MRotaryEmbedding and its subclasses)",
            "ropes with a forward of their own: DeepSeek's, Phi-3's long, dual-chunk, Fourier, "
            "Llama 4's vision; vision encoders use ApplyRotaryEmb",
            "ropes that a fusion pass of vLLM matched (with qk-norm, or the KV-cache write), in "
            "compiled mode on CUDA",
            _HW_AGNOSTIC,
        ),
    }
)
"""Op -> the paths on which vLLM uses code of its own, whatever the policy says."""
