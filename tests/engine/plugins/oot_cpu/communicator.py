"""vLLM's CPU communicator; it prints a line on its first reduction."""

from __future__ import annotations

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class OotCpuCommunicator(CpuCommunicator):
    said = False

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if not OotCpuCommunicator.said:
            OotCpuCommunicator.said = True
            print("oot_cpu: all_reduce", flush=True)
        return super().all_reduce(input_)
