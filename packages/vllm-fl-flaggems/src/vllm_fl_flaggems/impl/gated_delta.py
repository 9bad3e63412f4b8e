"""The gated delta rule in decode, on FlagGems's Triton kernels.

The chunked rule for prefill is not used. In FlagGems 5.0.2, the kernel that solves the triangle of
each chunk stores a matrix to global memory, and other threads load it without a barrier (seen in
the code for compute capability 9.0 with 2, 4 and 8 warps). These threads may read values that are
not written yet, and no test would find that reliably.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..loading import flag_gems_module
from . import implementation

LENGTH_EPSILON = 1e-6
"""The number that the kernels add to the squared length of a head when they normalise it."""

MOST_WITH_KEYS_FIRST = 64
"""Maximum number of tokens with states (key, value) in FlagGems 5.0.2. With more tokens, they are
(value, key).
"""


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gates with PyTorch and the rule with a kernel, both in fp32; round once.

    The kernel works on copies of the states, because it does not support padding, and its state
    layout depends on the number of tokens. Epsilon must be None or 1e-6.
    """
    tokens = len(q)
    if not tokens:
        return v.new_empty(v.shape), state
    kernels = flag_gems_module("fused.FLA.fused_recurrent")
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    rows = state_indices.long()
    before = state.index_select(0, rows)
    keys_first = tokens <= MOST_WITH_KEYS_FIRST
    after = before.mT.contiguous() if keys_first else before.clone()
    out, _ = kernels.fused_recurrent_gated_delta_rule_fwd(
        *(x.contiguous()[None] for x in (q, k, v)),
        g.contiguous()[None],  # the kernel ignores strides of the gates
        b.float().sigmoid().contiguous()[None],
        q.shape[-1] ** -0.5,
        after,
        cu_seqlens=torch.arange(tokens + 1, dtype=torch.int32, device=q.device),
        ssm_state_indices=torch.arange(tokens, dtype=torch.int32, device=q.device),
        use_qk_l2norm_in_kernel=epsilon is not None,
    )
    real = (rows != 0)[:, None, None]
    # All rows of padding restore slot 0's old value, so the order of the writes does not matter.
    kept = torch.where(real[..., None], after.mT if keys_first else after, before)
    state.index_copy_(0, rows, kept)
    return out[0].masked_fill(~real, 0.0), state


OPS = (
    implementation(
        recurrent_gated_delta_rule,
        f"epsilon in (None, {LENGTH_EPSILON})",
        consumes=frozenset({"state"}),
    ),
)
