"""Adds the workers' metrics to vLLM's `/metrics`: the API server reads the workers' files.

vLLM serves prometheus_client's registry. With several API servers or PROMETHEUS_MULTIPROC_DIR, it
serves another registry, with only a `MultiProcessCollector`. This module adds the metrics to both.
Workers do not use the files of prometheus_client: these are mapped into memory, and a full disk
kills the process that writes them.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_fl.logs import get_logger
from vllm_fl.text import quote

PATIENCE = 1.0
"""Seconds that a scrape waits for the files: the server does not answer requests in this time."""

OURS = "vllm_fl_"

Written = tuple[str, int, int]
"""A version of a file: (path, inode, modification time in ns)."""

log = get_logger("engine")

_shown: dict[str, Scraped] = {}
"""The user's path -> the collector of this process for it."""


def show(named: str) -> None:
    """Add the workers' metrics to the output of prometheus_client in this process; once.

    Has no effect if prometheus_client is missing or unsupported. `named` is VLLM_FL_METRICS.
    """
    if named in _shown:
        return
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.multiprocess import MultiProcessCollector

        scraped = _shown[named] = Scraped(named)
        collector: Any = MultiProcessCollector
        plain = collector.collect

        @functools.wraps(plain)
        def collect(self: Any) -> Iterator[Any]:
            yield from plain(self)
            yield from scraped.collect()

        REGISTRY.register(scraped)
        collector.collect = collect
    except Exception as error:  # an exception from a general plugin would stop vLLM
        log.debug("VLLM_FL_METRICS: not on /metrics: %s", quote(error))


class Scraped:
    """A collector of the metrics that workers on this machine have written to the user's path."""

    def __init__(self, named: str) -> None:
        path = Path(named)
        self._folder = path.parent
        own = rf"{re.escape(path.stem)}(\.dp\d+)?\.rank\d+{re.escape(path.suffix)}"
        self._is_workers = re.compile(own).fullmatch
        self._left: frozenset[Written] = frozenset()
        with suppress(OSError):
            self._left = frozenset(self._written())
        self._thread: threading.Thread | None = None
        self._read: dict[str, Any] = {}

    def collect(self) -> Iterable[Any]:
        """Return the metric families of all workers' files.

        An exception would hide vLLM's metrics. Unreadable files are therefore skipped, and the
        result is empty if the file system does not respond within `PATIENCE`.
        """
        try:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._reread, daemon=True)
                self._thread.start()
            self._thread.join(PATIENCE)
            return [] if self._thread.is_alive() else [*self._read.values()]
        except Exception as error:
            log.debug("VLLM_FL_METRICS: not on /metrics: %s", quote(error))
            return []

    def _reread(self) -> None:
        families: dict[str, Any] = {}
        with suppress(OSError):
            # Earlier files are from engines that were killed.
            for written in sorted(set(self._written()) - self._left):
                try:
                    found = _families(Path(written[0]).read_text(encoding="utf-8"))
                except Exception as error:
                    log.debug(
                        "VLLM_FL_METRICS: %s is not on /metrics: %s", written[0], quote(error)
                    )
                    continue
                for name, family in found.items():
                    known = families.setdefault(name, family)
                    if known is not family:
                        known.samples.extend(family.samples)
        self._read = families

    def _written(self) -> Iterator[Written]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if self._is_workers(entry.name) and entry.is_file():
                    at = entry.stat()
                    yield entry.path, at.st_ino, at.st_mtime_ns


def _families(text: str) -> dict[str, Any]:
    """Parse a worker's file: metric name -> family.

    Raises:
        ValueError: the file has a metric of another program.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = {family.name: family for family in text_string_to_metric_families(text)}
    if strange := [name for name in found if not name.startswith(OURS)]:
        raise ValueError(strange[0])
    return found
