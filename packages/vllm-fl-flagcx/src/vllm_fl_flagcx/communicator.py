"""The communicator for devices of plugins."""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from .collectives import Collectives

__all__ = ["FlagcxCommunicator"]


class FlagcxCommunicator(Collectives, DeviceCommunicatorBase):  # type: ignore[misc]
    """vLLM's base communicator with its collectives on FlagCX.

    Expert parallelism uses `allgather_reducescatter`, which needs only these collectives.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flagcx_join()
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            if self.all2all_backend not in ("naive", "allgather_reducescatter"):
                raise NotImplementedError(
                    f"all2all_backend={self.all2all_backend}: FlagCX supports only "
                    "allgather_reducescatter for experts"
                )
            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate to vLLM's manager of the experts."""
        return self._experts.dispatch_router_logits(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate to vLLM's manager of the experts."""
        return self._experts.dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate to vLLM's manager of the experts."""
        return self._experts.combine(*args, **kwargs)

    @property
    def _experts(self) -> Any:
        if self.all2all_manager is None:
            raise NotImplementedError(f"group {self.unique_name} was created without experts")
        return self.all2all_manager
