"""What this distribution brings: the plugin that the entry point `flagcx` names."""

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
    """Whether FlagCX's library lies here; it is not loaded."""
    try:
        library.find(request.settings.flagcx_path)
    except library.LibraryError as error:
        return str(error)
    return True


def class_path(request: CommunicatorRequest) -> str:
    """The class for this device; the library is loaded.

    Raises:
        LibraryError: it cannot be, or is not what it should be.
    """
    library.load(library.find(request.settings.flagcx_path))
    if request.device_type == "cuda":
        return "vllm_fl_flagcx.cuda.FlagcxCudaCommunicator"
    return "vllm_fl_flagcx.communicator.FlagcxCommunicator"


@hookimpl
def communicator() -> list[CommunicatorImpl]:
    """FlagCX as `default.flagcx`, where FLAGCX_PATH or an installed package has its library."""
    return [
        CommunicatorImpl("default.flagcx", class_path, BackendImplKind.DEFAULT, supports=supports)
    ]


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport | None:
    """Name the library that this worker's groups use. Its bytes enter the plan's digest."""
    used = library.loaded()
    if used is None:
        return None
    facts = {"version": used.version, "library": used.digest}
    return WorkerReport((f"FlagCX {used.version} of {used.path}",), facts)


@hookimpl
def doctor(settings: Any) -> Iterator[Finding]:
    """A FLAGCX_PATH that leads to no library."""
    if "flagcx_path" not in settings.chosen:
        return
    try:
        library.find(settings.flagcx_path)
    except library.LibraryError as error:
        yield Finding(
            "flagcx",
            str(error) + ".",
            "Engines of several ranks go on with vLLM's own communicator, until FlagCX is built "
            "there or FLAGCX_PATH leads to it.",
            "unset FLAGCX_PATH",
        )
