"""What the tests of this backend share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

import vllm_fl_cuda.impl as shared
from vllm_fl_cuda.impl import activation, normalization, rotary


@pytest.fixture
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The implementations on the kernels of vLLM's CPU build, whose schemas are the same."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(shared, "load_kernels", CpuPlatform.import_kernels)
    for module in (activation, normalization, rotary):
        monkeypatch.setattr(module, "unsuitable", lambda name, x: None)
    shared.kernel.cache_clear()
    yield
    shared.kernel.cache_clear()


NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@pytest.fixture(params=list(NAMES), ids=NAMES.get)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype in which models are served."""
    chosen: torch.dtype = request.param
    return chosen
