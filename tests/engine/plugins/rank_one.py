"""Backend that fails on the last rank only, in the way that RANK_ONE selects. `wrong` and `dies`
fail during verification; `is-killed` only while serving, when attention metadata exists."""

from __future__ import annotations

import os
import signal

import correct
import torch.distributed as dist
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    result = correct.silu_and_mul(x)
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


register_ops = correct.registers("rankone", silu_and_mul)
