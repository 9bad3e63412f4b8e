"""The FlagCX plugin: one function for each hook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_fl import (
    Availability,
    BackendImplKind,
    CommunicatorImpl,
    CommunicatorRequest,
    Finding,
    WorkerContext,
    WorkerReport,
    hookimpl,
)

from . import library


def supports(request: CommunicatorRequest) -> Availability:
    """Return True, or why FlagCX's library was not found; does not load it."""
    try:
        library.find(request.settings.flagcx_path)
    except library.LibraryError as error:
        return str(error)
    return True


def class_path(request: CommunicatorRequest) -> str:
    """Load the library and return the communicator class for the device.

    Raises:
        LibraryError: the library cannot be loaded or is incompatible.
    """
    library.load_library(library.find(request.settings.flagcx_path))
    if request.device_type == "cuda":
        return "vllm_fl_flagcx.cuda.FlagcxCudaCommunicator"
    return "vllm_fl_flagcx.communicator.FlagcxCommunicator"


@hookimpl
def communicator() -> list[CommunicatorImpl]:
    """FlagCX as `default.flagcx`; the library is in FLAGCX_PATH or an installed package."""
    return [
        CommunicatorImpl("default.flagcx", class_path, BackendImplKind.DEFAULT, supports=supports)
    ]


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport | None:
    """Report the library that this worker uses. Its hash enters the plan's digest."""
    used = library.loaded_library()
    if used is None:
        return None
    facts = {"version": used.version, "library": used.digest}
    return WorkerReport((f"FlagCX {used.version} of {used.path}",), facts)


@hookimpl
def doctor(settings: Any) -> Iterator[Finding]:
    """Report a FLAGCX_PATH without a library."""
    if "flagcx_path" not in settings.chosen:
        return
    try:
        library.find(settings.flagcx_path)
    except library.LibraryError as error:
        yield Finding(
            "flagcx",
            str(error) + ".",
            "Engines with several ranks use vLLM's communicator until FlagCX is built there or "
            "FLAGCX_PATH points to it.",
            "unset FLAGCX_PATH",
        )
