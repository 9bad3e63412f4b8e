"""The backend keeps every contract. Known exceptions are listed in xfails.toml."""

from __future__ import annotations

from vllm_fl_tools.testing import OpConformance


class TestAcme(OpConformance):
    backend = "vendor.acme"
