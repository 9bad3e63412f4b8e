"""The conformance tests of all implementations. Known exceptions are in xfails.toml."""

from __future__ import annotations

from vllm_fl_tools.testing import OpConformance


class TestAcme(OpConformance):
    backend = "vendor.acme"
