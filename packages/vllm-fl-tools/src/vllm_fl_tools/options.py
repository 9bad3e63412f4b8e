"""What pytest takes of us on its command line: imported wherever pytest runs, so nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--require-available`: a conformance test fails where the implementation cannot run."""
    parser.getgroup("vllm-fl").addoption(
        "--require-available",
        action="store_true",
        help="fail where an implementation is not available, in place of skipping all its tests",
    )
