"""Collectives between NPUs."""

from __future__ import annotations

import torch
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

__all__ = ["AscendCommunicator"]


class AscendCommunicator(DeviceCommunicatorBase):  # type: ignore[misc]
    """vLLM's plain communicator on torch.distributed, without operations that HCCL lacks."""

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Gather tensors along `dim` on rank `dst` of the group; return None on other ranks.

        Uses an all-gather, since torch_npu's ProcessGroupHCCL has no gather.
        """
        gathered: torch.Tensor = self.all_gather(input_, dim)
        return gathered if self.rank_in_group == dst else None
