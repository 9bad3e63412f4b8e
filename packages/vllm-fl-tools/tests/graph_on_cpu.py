"""A captured CUDA graph emulated on the CPU: the operators of a call, without its Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["captured", "is_capturing"]


class _Recorded(TorchDispatchMode):
    """The called operators, each with its arguments and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            if isinstance(result, Tensor) and not torch._C._is_alias_of(again, result):
                result.copy_(again)


def captured(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Replaces `vllm_fl_verify.graphs.captured`."""
    run()
    with _Recorded() as recorded:
        result = run()
    return recorded.replay, result


def is_capturing() -> bool:
    """Whether a call is being captured, here or on CUDA."""
    on_cuda = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return on_cuda or any(isinstance(m, _Recorded) for m in _get_current_dispatch_mode_stack())
