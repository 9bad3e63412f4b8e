"""The communicator for CUDA; vLLM captures graphs only through its own class."""

from __future__ import annotations

import threading
from typing import Any

import torch
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from .collectives import Collectives

__all__ = ["LEAVING", "FlagcxCudaCommunicator"]

LEAVING = 5.0
"""Seconds to wait when leaving a group; vLLM also waits 5 s for its groups."""


class FlagcxCudaCommunicator(Collectives, CudaCommunicator):  # type: ignore[misc]
    """vLLM's CUDA communicator with every collective on FlagCX.

    It keeps the managers of experts, and resources for other kernels in vLLM.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flagcx_join()

    def _log_all_reduce_backend_selection(self) -> None:
        """Log nothing, because vLLM's line lists libraries that are not used here."""

    def _leave(self, comm: Any) -> None:
        """Leave the group in another thread.

        NCCL waits until all graphs that were captured with the group are deleted. vLLM deletes its
        graphs after its groups, in this thread. Errors are printed on standard error.
        """

        def leave() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            super(FlagcxCudaCommunicator, self)._leave(comm)

        leaving = threading.Thread(target=leave, daemon=True, name=f"FlagCX leaves{self._where}")
        leaving.start()
        leaving.join(LEAVING)
