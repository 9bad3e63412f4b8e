"""Backend that replaces PyTorch's `zeros`, `ones` and `full` with bitwise equal results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_fl import WorkerContext, WorkerReport, hookimpl

library = torch.library.Library("aten", "IMPL")


def filled(size: Sequence[int], value: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    dtype = dtype or (torch.get_default_dtype() if isinstance(value, float) else None)
    return torch.empty(size, dtype=dtype or torch.tensor(value).dtype, device=device).fill_(value)


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport:
    def zeros(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return filled(size, 0.0, dtype, device)

    def ones(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return filled(size, 1.0, dtype, device)

    def full(size: Any, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return filled(size, value, dtype, device)

    names = {"zeros": zeros, "ones": ones, "full": full}
    for name, function in names.items():
        library.impl(name, function, "CPU")
    return WorkerReport((), {"aten": [*names]})
