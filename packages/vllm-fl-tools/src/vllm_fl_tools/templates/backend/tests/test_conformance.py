"""The backend keeps every contract; what it knowingly does otherwise stands in xfails.toml."""

from __future__ import annotations

from ....testing import OpConformance


class TestAcme(OpConformance):
    backend = "vendor.acme"
