"""Finds the environment variables that an implementation reads while a compiler traces it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.digest import BENEATH
from vllm_fl.engine.opaque import is_opaque

from .subject import Subject, fresh

OTHERS = frozenset((*BENEATH, "vllm_fl", "vllm_fl_tools"))
"""Packages that may read any variable, in addition to Python's standard library."""

READERS = ("os", "collections")
"""Modules that read a variable for their caller."""


def undeclared(subject: Subject, dtype: str) -> str:
    """Return a problem with the variables that a compiler would read; empty if there is none.

    A compiler reads them once, while tracing, and vLLM caches the compiled code. The digest of the
    plan, which identifies that code, only includes variables that plugins declare.
    """
    impl, names = subject.impl, set[str]()
    for each in () if is_opaque(impl) else subject.patterns(dtype):
        with reading() as read, suppress(Exception):  # other checks report other faults
            impl.fn(*fresh(each).args)
        names |= read
    plugins = get_default_manager().registry.plugins if names else ()
    names -= {spec.variable for p in plugins for spec in p.settings}
    if not names:
        return ""
    listed = ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")
    return (
        f"it reads the variable {listed} while a compiler traces it, and no plugin declares it: "
        "code that vLLM caches would also run with another value. Declare it in the hook "
        "`settings`, or return it from `worker_start`"
    )


@contextmanager
def reading() -> Iterator[set[str]]:
    """Collect the variables that this thread reads, except in `OTHERS` and Python."""
    found: set[str] = set()
    environment: Any = type(os.environ)
    plain, thread = environment.__getitem__, threading.get_ident()

    def seen(self: Any, key: Any) -> Any:
        if threading.get_ident() == thread and _is_somebodys():
            found.add(os.fsdecode(key))
        return plain(self, key)

    environment.__getitem__ = seen
    try:
        yield found
    finally:
        environment.__getitem__ = plain


def _is_somebodys() -> bool:
    """Return whether the variable is read outside of `OTHERS` and Python's standard library."""
    frame = sys._getframe(2)
    while frame is not None:
        top = str(frame.f_globals.get("__name__")).partition(".")[0]
        if top not in READERS:
            return top not in OTHERS and top not in sys.stdlib_module_names
        frame = frame.f_back  # type: ignore[assignment]
    return False
