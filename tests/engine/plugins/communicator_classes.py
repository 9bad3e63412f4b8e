"""Classes of the plugin `communicators`; vLLM imports them only in its workers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase


class CountingCommunicator(DeviceCommunicatorBase):
    said = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if not CountingCommunicator.said:
            CountingCommunicator.said = True
            print(f"communicators: rank {dist.get_rank()} reduces", flush=True)
        return super().all_reduce(input_)


class WrongCommunicator(DeviceCommunicatorBase):
    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(input_) + dist.get_rank()
