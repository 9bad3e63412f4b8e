"""Phrases that several bindings share, and a function that splits a list of names."""

from __future__ import annotations

EXPERTS = (
    "experts with a kernel that also computes the activation: vLLM's quantised experts, and "
    "experts of its CPU build"
)
GELU_TANH = "`gelu_pytorch_tanh`, which computes the same function by a PyTorch operator"
HW_AGNOSTIC = (
    "the Transformers backend under VLLM_USE_HW_AGNOSTIC=1, if vLLM has a hardware-agnostic layer "
    "for the op: only SiluAndMul is a target there"
)


def names(text: str) -> tuple[str, ...]:
    """Split a vLLM function's parameters, written as in its signature: `x, weight, bias`."""
    return tuple(text.split(", "))
