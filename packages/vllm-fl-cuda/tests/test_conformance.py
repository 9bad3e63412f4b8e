"""The backend keeps every contract; where no GPU is, on_cpu_kernels.py can stand in for it."""

from __future__ import annotations

from vllm_fl_tools.testing import OpConformance


class TestCuda(OpConformance):
    backend = "vendor.cuda"
