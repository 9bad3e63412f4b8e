"""The workers' metrics on vLLM's own `/metrics`: the API server's process reads their files.

vLLM shows prometheus_client's registry there. Where there are several API servers, or the user sets
PROMETHEUS_MULTIPROC_DIR, it shows another one, which has a `MultiProcessCollector` alone. Both get
what the files say. A worker writes nothing but its file: prometheus_client's own files are mapped
into memory, and a disk that is full would end the process that writes them.
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
"""Seconds that a scrape waits for the files: the server answers no request meanwhile."""

OURS = "vllm_fl_"

Written = tuple[str, int, int]
"""A file as it was written once: its path, its number and its time."""

log = get_logger("engine")

_shown: dict[str, Scraped] = {}
"""What the user has named -> what this process shows of it."""


def show(named: str) -> None:
    """Let whatever this process shows of prometheus_client have the workers' metrics; once.

    Without prometheus_client nothing is shown, nor where it is another than we know.

    Args:
        named: the file of VLLM_FL_METRICS.
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
    except Exception as error:  # vLLM dies of what a general plugin raises
        log.debug("VLLM_FL_METRICS: not on /metrics: %s", quote(error))


class Scraped:
    """A collector of what the workers of this machine have written.

    Args:
        named: the file that the user names.
    """

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
        """The families of all workers' files. It never raises, since vLLM's own would be lost:
        a file that cannot be read gives none, nor does a file system that does not answer."""
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
            # What lay there before this process is of an engine that was killed.
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
    """A worker's file by the names of its metrics, all of which are ours.

    Raises:
        ValueError: it is no worker's.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = {family.name: family for family in text_string_to_metric_families(text)}
    if strange := [name for name in found if not name.startswith(OURS)]:
        raise ValueError(strange[0])
    return found
