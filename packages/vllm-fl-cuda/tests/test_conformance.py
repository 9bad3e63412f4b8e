"""The backend conforms to every contract; without a GPU, load on_cpu_kernels.py."""

from __future__ import annotations

from vllm_fl_tools.testing import OpConformance


class TestCuda(OpConformance):
    backend = "vendor.cuda"
