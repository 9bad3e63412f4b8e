"""Which keys a query sees, in the terms of `npu_fused_infer_attention_score`."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["EDGE", "sight", "template"]

EDGE = 2048
"""The size of the one mask that `sparse_mode` 3 and 4 read, however long the sequences are."""


@functools.cache
def template(device: torch.device) -> torch.Tensor:
    """The causal mask that the kernel lays over any sequence, made once for a device.

    Returns:
        (2048, 2048) int8: 1, above the diagonal, hides a key.
    """
    return torch.ones(EDGE, EDGE, dtype=torch.int8, device=device).triu_(1)


def sight(causal: bool, window: int | None, device: torch.device) -> dict[str, Any]:
    """The arguments of the kernel that say which keys a query sees.

    The diagonal of the kernel's modes 3 and 4 ends in the lower right corner: the last query of a
    sequence is at its last key. So one set of arguments serves a prompt, its later chunks, a
    prompt behind a cached prefix, and a decoded token.

    Args:
        causal: a query sees no later key.
        window: how many keys it sees at most, its own included, as vLLM counts; None for all.
        device: where the mask lies.

    Raises:
        NotImplementedError: a window without causality.

    Source: the table of `sparse_mode` in torch_npu's documentation of the operator.
    """
    if not causal:
        if window is not None:
            raise NotImplementedError("AscendAttentionBackend has no window that is not causal")
        return {"sparse_mode": 0}
    mask = template(device)
    if window is None:
        return {"atten_mask": mask, "sparse_mode": 3}
    # The kernel does not count the query's own key.
    return {"atten_mask": mask, "sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
