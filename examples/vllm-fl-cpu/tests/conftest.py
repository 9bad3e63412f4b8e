"""Fixtures of this backend's tests."""

from __future__ import annotations

import pytest
import torch

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@pytest.fixture(
    params=[
        pytest.param(dtype, id=name, marks=[pytest.mark.slow] * (name != "bf16"))
        for dtype, name in NAMES.items()
    ]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
