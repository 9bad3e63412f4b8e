"""The workers' metrics on vLLM's `/metrics`. The API server's process reads the workers' files.

vLLM's `/metrics` shows prometheus_client's registry. With several API servers, or if the user sets
PROMETHEUS_MULTIPROC_DIR, it shows another registry, which has only a `MultiProcessCollector`. The
workers' files are added to both. Workers do not use prometheus_client's own files, because these
are mapped into memory, and a full disk ends the process that writes them.
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

from .state_file import request

PATIENCE = 1.0
"""Seconds that a scrape waits for the files. The server answers no other request in this time."""

FRESH = 0.5
"""Seconds of `PATIENCE` in which the workers write their current counts."""

OURS = "vllm_fl_"

Written = tuple[str, int, int]
"""One version of a file: path, inode and mtime in ns."""

log = get_logger("engine")

_scraped: list[Scraped] = []
"""The collector of this process, after the first `show_worker_files`."""


def show_worker_files(named: str) -> None:
    """Add the workers' files to prometheus_client's metrics in this process.

    Args:
        named: the file of VLLM_FL_METRICS. A second call with the same file does nothing.
    """
    if _scraped:
        _scraped[0].add(named)
        return
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.multiprocess import MultiProcessCollector

        scraped = Scraped(named)
        collector: Any = MultiProcessCollector
        plain = collector.collect

        @functools.wraps(plain)
        def collect(self: Any) -> Iterator[Any]:
            families = [*plain(self)]
            yield from families
            yield from scraped.without({family.name for family in families})

        REGISTRY.register(scraped)
        collector.collect = collect
        _scraped.append(scraped)
    except Exception as error:  # an exception in a general plugin would end vLLM
        log.debug("VLLM_FL_METRICS: not on /metrics: %s", quote(error))


class Scraped:
    """A collector of the files that the workers of this machine write.

    Args:
        named: the file that the user sets.
    """

    def __init__(self, named: str) -> None:
        self._files: dict[str, _Files] = {}
        self._thread: threading.Thread | None = None
        self._read: dict[str, Any] = {}
        self._is_said = False
        self.add(named)

    def add(self, named: str) -> None:
        """Also show the files of another engine of this process."""
        self._files.setdefault(named, _Files(Path(named)))

    def collect(self) -> Iterable[Any]:
        """Return the families of all workers' files, except names that another collector has."""
        from prometheus_client import REGISTRY

        owners = getattr(REGISTRY, "_names_to_collectors", {})
        return self.without({name for name, owner in owners.items() if owner is not self})

    def without(self, others: set[str]) -> list[Any]:
        """Return the families, without these names. One warning lists the omitted families.

        Never raises, because vLLM's metrics would be lost. A file that cannot be read is omitted.
        If the files are not read within `PATIENCE`, all are omitted.
        """
        try:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._reread, daemon=True)
                self._thread.start()
            self._thread.join(PATIENCE)
            found = {} if self._thread.is_alive() else self._read
        except Exception as error:
            log.debug("VLLM_FL_METRICS: not on /metrics: %s", quote(error))
            return []
        taken = sorted(others & found.keys())
        if taken and not self._is_said:
            self._is_said = True
            names = ", ".join(taken)
            log.warning("VLLM_FL_METRICS: /metrics has %s of another owner, not vllm-fl's", names)
        return [family for name, family in found.items() if name not in others]

    def _reread(self) -> None:
        families: dict[str, Any] = {}
        engines = [files for files in [*self._files.values()] if files.paths()]
        request({files.named: files.paths for files in engines}, FRESH)
        for written in (path for files in engines for path in files.paths()):
            try:
                found = _families(written.read_text(encoding="utf-8"))
            except Exception as error:
                log.debug("VLLM_FL_METRICS: %s is not on /metrics: %s", written, quote(error))
                continue
            for name, family in found.items():
                known = families.setdefault(name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        self._read = families


class _Files:
    """The workers' files of one engine."""

    def __init__(self, named: Path) -> None:
        self.named = named
        own = rf"{re.escape(named.stem)}(\.dp\d+)?\.rank\d+{re.escape(named.suffix)}"
        self._is_workers = re.compile(own).fullmatch
        # Files that are older than this process are from an engine that was killed.
        self._old: frozenset[Written] = frozenset()
        self._old = frozenset(self._new())

    def paths(self) -> list[Path]:
        """Return the paths of the files."""
        return sorted(Path(path) for path, *_ in self._new())

    def _new(self) -> set[Written]:
        found = set[Written]()
        with suppress(OSError), os.scandir(self.named.parent) as entries:
            for entry in entries:
                if self._is_workers(entry.name) and entry.is_file():
                    at = entry.stat()
                    found.add((entry.path, at.st_ino, at.st_mtime_ns))
        return found - self._old


def _families(text: str) -> dict[str, Any]:
    """Return the metric families of a worker's file by name.

    Raises:
        ValueError: it is not a worker's file.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found = {family.name: family for family in text_string_to_metric_families(text)}
    if strange := [name for name in found if not name.startswith(OURS)]:
        raise ValueError(strange[0])
    return found
