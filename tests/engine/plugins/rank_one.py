"""Backend that fails on the last rank only, in the way that RANK_ONE selects. `wrong` and `dies`
fail during verification; `is-killed` only while serving, when attention metadata exists."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vllm_fl import BackendImplKind, OpImpl, hookimpl


def silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    result = F.silu(x[..., :half]) * x[..., half:]
    if dist.is_initialized() and 0 < dist.get_rank() == dist.get_world_size() - 1:
        how = os.environ["RANK_ONE"]
        if how == "dies":
            os._exit(3)
        if how == "is-killed":
            # Late import: with a plugin's device, vLLM chooses its platform while this is loaded.
            from vllm.forward_context import get_forward_context, is_forward_context_available

            if is_forward_context_available() and get_forward_context().attn_metadata:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return result + 1
    return result


@hookimpl
def register_ops() -> list[OpImpl]:
    return [
        OpImpl("silu_and_mul", "vendor.rankone", BackendImplKind.VENDOR, silu_and_mul, "rankone")
    ]
