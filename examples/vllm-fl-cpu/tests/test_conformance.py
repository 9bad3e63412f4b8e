"""Run the conformance kit."""

from __future__ import annotations

from vllm_fl_tools.testing import OpConformance


class TestCpu(OpConformance):
    backend = "vendor.cpu"
