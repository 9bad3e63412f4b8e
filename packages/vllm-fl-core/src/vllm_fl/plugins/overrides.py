"""ATen's operators that plugins' code overrides from Python: noted as they run, while an engine
starts.

An override is called by torch, in the place of its own kernel, and no plan knows it. What fails in
one ends the start without its name; what a device faults in is seen some operators later. So each
call is noted until the engine serves: in a library of ours over the plugins' own, which is taken
off then, so that torch calls theirs as if ours had never been.

torch tells nobody which function overrides what. `watched` sees it said, while a plugin's code
runs. What compiled code registers is not seen.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ..logs import get_logger
from . import breadcrumb

log = get_logger("plugins")

STANDS = (
    "What it called stands in the place of operators of PyTorch's; a device may report a fault "
    "some calls late."
)
SPARE = "Leave out the operator at fault, by the settings of its plugin."
"""What a note with calls means, and what to do."""


@dataclass(frozen=True)
class _Override:
    """One function that a plugin has registered.

    Args:
        library: torch's `Library` that holds it.
        name: the operator in `aten`, with its overload: `mm.out`.
        key: the dispatch key.
        fn: the function.
        how: the other arguments of the registration.
        owner: the distribution and its version.
    """

    library: Any
    name: str
    key: str
    fn: Callable[..., Any]
    how: dict[str, Any]
    owner: str

    @property
    def stands(self) -> bool:
        """Whether its library has not been taken off."""
        return self.library.m is not None

    @property
    def label(self) -> str:
        """`aten::mm.out by acme.ops.mm_out of vllm-fl-acme 1.0`."""
        code = self.fn if hasattr(self.fn, "__qualname__") else type(self.fn)
        by = f"{code.__module__}.{code.__qualname__}"
        return f"aten::{self.name} by {by}" + f" of {self.owner}" * bool(self.owner)


class _Start:
    """What is noted of one part of an engine's start."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.held = ExitStack()
        self.library: Any = None
        self.watchdog = breadcrumb.Watchdog(log)

    @property
    def owner(self) -> str:
        """Whose overrides run; empty where they are several distributions'."""
        owners = {override.owner for override in _known.values()}
        return next(iter(owners)) if len(owners) == 1 else ""

    def note(self, override: _Override) -> None:
        """Note the calls of this override until the part ends."""
        if self.library is None:
            self.library = _torch_library().Library("aten", "IMPL")
            self.held.callback(self.library._destroy)
            self.held.enter_context(
                breadcrumb.running(self.what, self.owner, named=False, beneath=True)
            )
            self.held.enter_context(self.watchdog)
        fn = breadcrumb.noting(override.label, override.fn, self.watchdog)
        how = {**override.how, "allow_override": True}
        impl = watched.plain or type(self.library).impl  # ours is none to be noted
        with warnings.catch_warnings():
            # torch says so at the first override of a process, and never again.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            impl(self.library, override.name, fn, override.key, **how)


_known: dict[tuple[str, str], _Override] = {}
"""(operator, dispatch key) -> the last override of it."""

_starts: list[_Start] = []
"""Those that run, the innermost last."""


class _Watch:
    """Sees what is registered while the code of any plugin runs, in any thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.lock = threading.Lock()
        self.plain: Any = None
        self.ours: Any = None

    def __enter__(self) -> None:
        with self.lock:
            self.depth += 1
            module = _torch_library()
            if self.plain is None and module is not None:
                self.plain = module.Library.impl
                self.ours = module.Library.impl = self._seeing(self.plain)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0 and self.plain is not None:
                library = _torch_library().Library
                if library.impl is self.ours:  # another one's may stand over it
                    library.impl = self.plain
                self.plain = None

    def _seeing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **how: Any) -> Any:
            done = plain(library, op_name, fn, dispatch_key, **how)
            name = op_name if isinstance(op_name, str) else op_name.name()
            key = dispatch_key or library.dispatch_key
            # What only tells shapes, and what hands a call on, runs nothing on a device.
            idle = key == "Meta" or fn is _torch_library().fallthrough_kernel
            if library.ns == "aten" and not idle:
                name, owner = name.removeprefix("aten::"), breadcrumb.owner_now()
                _known[name, key] = override = _Override(library, name, key, fn, how, owner)
                for start in _starts[-1:]:
                    start.note(override)
            return done

        return impl


watched = _Watch()
"""While a block under it runs a plugin's code, the overrides that this registers are seen."""


def _torch_library() -> Any:
    """The module `torch.library`; None where nothing has imported torch."""
    return sys.modules.get("torch.library")


@contextmanager
def noted(what: str, *, is_last: bool) -> Iterator[None]:
    """While the block runs, a part of an engine's start, each call of an override is noted.

    An error that an override has raised, or that a device may have reported late, is logged with
    the calls before it, and left for the next process.

    Args:
        what: which part.
        is_last: whether the engine serves behind it, and nothing of its start can fail any more.
    """
    start = _Start(what)
    _starts.append(start)
    try:
        with start.held:
            for override in list(_known.values()):
                if override.stands:
                    start.note(override)
            yield
    except Exception as error:
        crumb = breadcrumb.outlive(what, start.owner, error)
        if crumb is not None:
            told = f"{what[:1].upper()}{what[1:]} has failed ({crumb.error}){crumb.where}"
            log.error("%s. %s %s [FL216]", told, STANDS, SPARE)
        breadcrumb.forget_calls()
        raise
    else:
        if is_last:
            breadcrumb.forget_calls()
    finally:
        _starts.remove(start)
