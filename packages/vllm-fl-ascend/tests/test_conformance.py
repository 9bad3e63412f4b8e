"""The backend conforms to every contract, on the emulation."""

from __future__ import annotations

from vllm_fl_tools.testing import OpConformance


class TestAscend(OpConformance):
    backend = "vendor.ascend"
    device = "cpu"  # device of the emulated operators
