"""Command-line options for pytest. Every run of pytest imports this module, so keep imports few."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--require-available`: a test fails if the implementation is not available."""
    parser.getgroup("vllm-fl").addoption(
        "--require-available",
        action="store_true",
        help="fail if an implementation is not available, instead of skipping its tests",
    )
