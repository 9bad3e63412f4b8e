"""Logging. vLLM configures only its own logger; ours must reach a server's stderr all the same."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from .text import INDENTED, clean, quote

ROOT = "vllm_fl"

SAID_AT_MOST = 1000
"""Different refusals that are logged: reasons may carry sizes, and a server runs for months."""


class _Cleaned(logging.Filter):
    """What a record says, without secrets, escape sequences and lines that look like others.

    It sits on the loggers, so that whoever handles our records gets them cleaned.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an argument that cannot be printed
            kinds = ", ".join(type(arg).__name__ for arg in record.args or ())
            text = f"{record.msg} ({kinds}: {quote(error)})"
        record.msg, record.args = clean(text, INDENTED), ()
        return True


_cleaned = _Cleaned()


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
    is_root = not name or name == ROOT
    logger = root if is_root else root.getChild(str(name).removeprefix(f"{ROOT}."))
    logger.addFilter(_cleaned)  # adding it again changes nothing
    return logger


def set_log_level(level: int | str, name: str | None = None) -> None:
    """Set the level of `get_logger(name)`: a number, or DEBUG, INFO, WARNING, ERROR.

    Raises:
        ValueError: no such level.
    """
    get_logger(name).setLevel(level.upper() if isinstance(level, str) else level)


def speaks_for_all() -> bool:
    """Whether this process is the one that the user started: an engine's others are its children.

    What holds for all of them is said here, once.
    """
    from multiprocessing import parent_process  # 5 ms, and few processes have anything to say

    return parent_process() is None


def quiet(level: int) -> AbstractContextManager[None]:
    """In the block, nothing of ours of this level or below is shown, whatever the settings say."""
    return _filtered(get_logger().handlers, lambda record: record.levelno > level)


def silence(*, ours: bool = True) -> AbstractContextManager[None]:
    """In the block, what this thread logs is not shown, whoever's logger it is; errors are.

    Other threads are heard, such as the one that names what takes long.

    Args:
        ours: whether our own loggers are silent, too.
    """
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
    """In the block, the handlers show the records that are heard, and no others."""
    with ExitStack() as stack:
        for handler in handlers:
            handler.addFilter(is_heard)
            stack.callback(handler.removeFilter, is_heard)
        yield
