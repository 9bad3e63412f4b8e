"""The communicator on CUDA, where vLLM captures graphs through its own class alone."""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from .collectives import Collectives

__all__ = ["FlagcxCudaCommunicator"]


class FlagcxCudaCommunicator(Collectives, CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator for CUDA with every collective on FlagCX.

    What vLLM's class makes beside them stays: managers of experts, and what its own kernels use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flagcx_join()
