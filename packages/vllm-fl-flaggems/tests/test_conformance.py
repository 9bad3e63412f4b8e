"""The backend conforms to every contract; without a GPU, load on_interpreter.py."""

from __future__ import annotations

import os

from vllm_fl.plugins import breadcrumb
from vllm_fl_tools.testing import ModelSizes, OpConformance

SMALL = ModelSizes(64, 96, 2, 1, 32, 32, tokens=(1, 7, 20))
"""The interpreter needs seconds for microseconds of a GPU."""

if "TRITON_INTERPRET" in os.environ:
    breadcrumb.SLOW = 600.0  # a startup disables kernels with calls of more than ten seconds


class TestFlagGems(OpConformance):
    backend = "default.flagos"
    sizes = SMALL if os.environ.get("TRITON_INTERPRET") else OpConformance.sizes


class TestFewTokens(OpConformance):
    backend = "flagos.few_tokens"
    sizes = TestFlagGems.sizes
