"""Mask arguments of `npu_fused_infer_attention_score`."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["EDGE", "sight", "template"]

EDGE = 2048
"""Size of the mask that `sparse_mode` 3 and 4 read, independent of sequence lengths."""


@functools.cache
def template(device: torch.device) -> torch.Tensor:
    """Return the kernel's causal mask: (2048, 2048) int8, where 1 hides a key."""
    return torch.ones(EDGE, EDGE, dtype=torch.int8, device=device).triu_(1)


def sight(causal: bool, window: int | None, device: torch.device) -> dict[str, Any]:
    """Return the kernel arguments that define which keys a query can attend to.

    In the kernel's modes 3 and 4, the diagonal ends in the lower right corner, so the last query of
    a sequence is at its last key. Therefore the same arguments are correct for a prompt, its later
    chunks, a prompt after a cached prefix, and a decoded token.

    Args:
        causal: whether later keys are hidden.
        window: maximum number of visible keys, including the query's own; None for all.
        device: device of the mask.

    Raises:
        NotImplementedError: a window without causality.

    Source: the table of `sparse_mode` in torch_npu's documentation of the operator.
    """
    if not causal:
        if window is not None:
            raise NotImplementedError(
                "AscendAttentionBackend does not support windows that are not causal"
            )
        return {"sparse_mode": 0}
    mask = template(device)
    if window is None:
        return {"atten_mask": mask, "sparse_mode": 3}
    # The kernel's window excludes the key of the query.
    return {"atten_mask": mask, "sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
