"""The communicator on CUDA, where vLLM captures graphs through its own class alone."""

from __future__ import annotations

import threading
from typing import Any

import torch
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from .collectives import Collectives

__all__ = ["LEAVING", "FlagcxCudaCommunicator"]

LEAVING = 5.0
"""Seconds to wait for a group to be left; as long as vLLM waits for its own."""


class FlagcxCudaCommunicator(Collectives, CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator for CUDA with every collective on FlagCX.

    What vLLM's class makes beside them stays: managers of experts, and what its own kernels use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flagcx_join()

    def _log_all_reduce_backend_selection(self) -> None:
        """Say nothing: vLLM's line names libraries that do not sum here."""

    def _leave(self, comm: Any) -> None:
        """Leave the group, beside this thread.

        NCCL waits until no graph is left that was captured with the group, and vLLM drops its
        graphs after its groups, in this thread. What fails is said on standard error.
        """

        def leave() -> None:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            super(FlagcxCudaCommunicator, self)._leave(comm)

        leaving = threading.Thread(target=leave, daemon=True, name=f"FlagCX leaves{self._where}")
        leaving.start()
        leaving.join(LEAVING)
