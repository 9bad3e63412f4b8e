"""The backend conforms to every contract."""

from __future__ import annotations

from vllm_fl_tools.testing import OpConformance


class TestReference(OpConformance):
    backend = "reference.torch"
