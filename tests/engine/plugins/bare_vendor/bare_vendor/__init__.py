"""fl-bare-cpu's hardware by a platform plugin of vLLM's, as a vendor's of an empty build is."""

from __future__ import annotations


def register() -> str:
    return "bare_vendor.platform.BareVendorPlatform"
