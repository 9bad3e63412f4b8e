"""Phrases that several bindings share, and names written as text."""

from __future__ import annotations

__all__ = ["EXPERTS", "GELU_TANH", "HW_AGNOSTIC", "names"]

EXPERTS = (
    "experts whose kernel computes the activation, too: vLLM's quantised ones, and its CPU build's"
)
GELU_TANH = "`gelu_pytorch_tanh`, the same function by one operator of PyTorch's"
HW_AGNOSTIC = (
    "the Transformers backend under VLLM_USE_HW_AGNOSTIC=1, where this vLLM has a "
    "hardware-agnostic layer for the op: of these only SiluAndMul is a place"
)


def names(text: str) -> tuple[str, ...]:
    """The parameters of a vLLM function, written as in a signature: `x, weight, bias`."""
    return tuple(text.split(", "))
