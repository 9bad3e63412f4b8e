"""Silence log lines that repeat what a verb shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ..logs import get_logger

__all__ = ["quiet"]


@contextmanager
def quiet(level: int) -> Iterator[None]:
    """In the block, nothing of this level or below is logged, whatever the settings say."""

    def louder(record: logging.LogRecord) -> bool:
        return record.levelno > level

    handlers = tuple(get_logger().handlers)
    for handler in handlers:
        handler.addFilter(louder)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(louder)
