"""Loggers with a handler for stderr, because vLLM configures only its own logger."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from .text import INDENTED, clean, quote

ROOT = "vllm_fl"

SAID_AT_MOST = 1000
"""Maximum number of distinct events to log. Reasons may contain sizes, and a server runs for
months."""


class _Cleaned(logging.Filter):
    """Removes secrets, escape sequences and forged lines from records. The loggers have this
    filter, so every handler gets cleaned records."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an argument that cannot be printed
            # A text, such as the id of an implementation, is printed; other types by name.
            parts = (arg if type(arg) is str else type(arg).__name__ for arg in record.args or ())
            text = f"{record.msg} ({', '.join(parts)}: {quote(error)})"
        record.msg, record.args = clean(text, INDENTED), ()
        return True


_cleaned = _Cleaned()


class _Stderr(logging.Handler):
    """Writes to stderr, unless the program has configured logging (the root logger has
    handlers)."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger `vllm_fl` or a child: `get_logger("dispatch")` is `vllm_fl.dispatch`."""
    root = logging.getLogger(ROOT)
    if not root.handlers:
        handler = _Stderr()
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s", "%m-%d %H:%M:%S")
        )
        root.addHandler(handler)
        root.setLevel(logging.INFO)
    is_root = not name or name == ROOT
    logger = root if is_root else root.getChild(str(name).removeprefix(f"{ROOT}."))
    logger.addFilter(_cleaned)
    return logger


def set_log_level(level: int | str, name: str | None = None) -> None:
    """Set the level of `get_logger(name)`: a number, or DEBUG, INFO, WARNING, ERROR.

    Raises:
        ValueError: the level is unknown.
    """
    get_logger(name).setLevel(level.upper() if isinstance(level, str) else level)


def speaks_for_all() -> bool:
    """Whether the user started this process. The other processes of an engine are its children.
    Only this process logs messages about all processes."""
    from multiprocessing import parent_process  # takes 5 ms, and few processes need it

    return parent_process() is None


def quiet(level: int) -> AbstractContextManager[None]:
    """In the block, hide vllm-fl's records up to this level, regardless of the settings."""
    return _filtered(get_logger().handlers, lambda record: record.levelno > level)


def silence(*, ours: bool = True) -> AbstractContextManager[None]:
    """In the block, hide this thread's records of all loggers, except errors. Other threads can
    still log, such as the watchdog for slow code."""
    thread = threading.get_ident()

    def is_heard(record: logging.LogRecord) -> bool:
        spared = not ours and record.name.partition(".")[0] == ROOT
        return spared or record.thread != thread or record.levelno >= logging.ERROR

    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return _filtered({*found, *filter(None, [logging.lastResort])}, is_heard)


@contextmanager
def _filtered(
    handlers: Iterable[logging.Handler], is_heard: Callable[[logging.LogRecord], bool]
) -> Iterator[None]:
    with ExitStack() as stack:
        for handler in handlers:
            handler.addFilter(is_heard)
            stack.callback(handler.removeFilter, is_heard)
        yield
