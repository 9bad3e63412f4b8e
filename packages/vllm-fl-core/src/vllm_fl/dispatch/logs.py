"""Logging. vLLM configures only its own logger; ours must reach a server's stderr all the same."""

from __future__ import annotations

import logging
import sys

__all__ = ["get_logger", "set_log_level"]

ROOT = "vllm_fl"


class _Stderr(logging.Handler):
    """Writes to stderr where nobody else would: a program that set up logging gets it there."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def get_logger(name: str | None = None) -> logging.Logger:
    """The logger `vllm_fl`, or a child of it: `get_logger("dispatch")` is `vllm_fl.dispatch`."""
    root = logging.getLogger(ROOT)
    if not root.handlers:
        handler = _Stderr()
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S")
        )
        root.addHandler(handler)
        root.setLevel(logging.INFO)
    if not name or name == ROOT:
        return root
    return root.getChild(name.removeprefix(f"{ROOT}."))


def set_log_level(level: int | str, name: str | None = None) -> None:
    """Set the level of `get_logger(name)`: a number, or DEBUG, INFO, WARNING, ERROR.

    Raises:
        ValueError: no such level.
    """
    get_logger(name).setLevel(level.upper() if isinstance(level, str) else level)
