"""FlagCX's C library: finding, loading and checking it, and calls that raise on errors.

The functions are bound here, because FlagCX's Python wrapper has two faults: it ignores errors when
it loads the library, and starts groups without passing a communicator.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

__all__ = ["FlagcxError", "Library", "LibraryError", "find", "load_library", "loaded_library"]

FILE = "libflagcx.so"
BELOW = ("build/lib", "lib")
"""Folders of the library in FLAGCX_PATH: in a build, and in an installation."""

ID_BYTES = 256

POINTER, INT, SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t

PROTOTYPES: dict[str, tuple[type, ...]] = {
    "flagcxDeviceHandleInit": (POINTER,),
    "flagcxDeviceHandleFree": (POINTER,),
    "flagcxGetVersion": (POINTER,),
    "flagcxGetUniqueId": (POINTER,),
    "flagcxCommInitRank": (POINTER, INT, POINTER, INT),
    "flagcxCommDestroy": (POINTER,),
    "flagcxAllReduce": (POINTER, POINTER, SIZE, INT, INT, POINTER, POINTER),
    "flagcxReduce": (POINTER, POINTER, SIZE, INT, INT, INT, POINTER, POINTER),
    "flagcxAllGather": (POINTER, POINTER, SIZE, INT, POINTER, POINTER),
    "flagcxReduceScatter": (POINTER, POINTER, SIZE, INT, INT, POINTER, POINTER),
    "flagcxBroadcast": (POINTER, POINTER, SIZE, INT, INT, POINTER, POINTER),
    "flagcxSend": (POINTER, SIZE, INT, INT, POINTER, POINTER),
    "flagcxRecv": (POINTER, SIZE, INT, INT, POINTER, POINTER),
    "flagcxGroupStart": (POINTER,),
    "flagcxGroupEnd": (POINTER,),
}
"""The functions that are called, as declared in `flagcx.h` of FlagCX 0.13."""

OLDER = "flagcxHandleInit"
"""Name of `flagcxDeviceHandleInit` before FlagCX 0.13."""

STREAM_COPY, STREAM_FREE = 12, 13
"""Indices of these functions in `flagcxDeviceHandle`."""


class LibraryError(Exception):
    """FlagCX cannot be used. The message has path and reason, in one line."""


class FlagcxError(RuntimeError):
    """A FlagCX call failed.

    Attributes:
        function: the C function's name.
        code: its return value.
    """

    def __init__(self, message: str, function: str, code: int) -> None:
        super().__init__(message)
        self.function, self.code = function, code


def find(folder: str | None) -> Path:
    """Return the path of the library.

    Args:
        folder: value of FLAGCX_PATH; None to search the installed package `flagcx`.

    Raises:
        LibraryError: it was not found.
    """
    if folder is not None:
        for below in BELOW:
            path = Path(folder, below, FILE)
            if path.is_file():
                return path
        raise LibraryError(f"FLAGCX_PATH={folder} has no {FILE} in {' or '.join(BELOW)}")
    spec = find_spec("flagcx")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for below in (".", *BELOW):
            path = Path(root, below, FILE)
            if path.is_file():
                return path
    raise LibraryError("FlagCX is not installed, and FLAGCX_PATH is not set")


class Library:
    """A loaded library.

    Attributes:
        version: FlagCX's version number.

    Raises:
        LibraryError: it cannot be loaded, is older than FlagCX 0.13, or lacks a function.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise LibraryError(
                f"{path} cannot be loaded: {' '.join(str(error).split())}"
            ) from error
        lacks = [name for name in PROTOTYPES if not hasattr(self._lib, name)]
        if "flagcxDeviceHandleInit" in lacks and hasattr(self._lib, OLDER):
            raise LibraryError(f"{path} is older than FlagCX 0.13, and has other functions")
        if lacks:
            raise LibraryError(
                f"{path} is not a complete FlagCX library: it lacks {', '.join(lacks)}"
            )
        for name, types in PROTOTYPES.items():
            function = getattr(self._lib, name)
            function.argtypes, function.restype = types, INT
        if hasattr(self._lib, "flagcxGetErrorString"):
            self._lib.flagcxGetErrorString.argtypes = (INT,)
            self._lib.flagcxGetErrorString.restype = ctypes.c_char_p
        version = INT()
        self.call("flagcxGetVersion", ctypes.byref(version))
        self.version = version.value
        self._device = POINTER()
        self.call("flagcxDeviceHandleInit", ctypes.byref(self._device))
        self._table = ctypes.cast(self._device, ctypes.POINTER(POINTER))

    @property
    def digest(self) -> str:
        """Return a short hash of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    def call(self, name: str, *arguments: object, where: str = "") -> None:
        """Call a function.

        Args:
            name: name of the function.
            arguments: according to its prototype.
            where: group and rank, for the error message.

        Raises:
            FlagcxError: it did not succeed.
        """
        code = getattr(self._lib, name)(*arguments)
        if code != 0:
            raise FlagcxError(f"{name} failed{where}: {self._words(code)}", name, code)

    def _words(self, code: int) -> str:
        if not hasattr(self._lib, "flagcxGetErrorString"):
            return f"result {code}"
        text: bytes | None = self._lib.flagcxGetErrorString(code)
        return f"{(text or b'?').decode(errors='replace')} (result {code})"

    def unique_id(self) -> bytes:
        """Create the id for the ranks of a new group."""
        buffer = ctypes.create_string_buffer(ID_BYTES)
        self.call("flagcxGetUniqueId", buffer)
        return buffer.raw

    def join(self, unique_id: bytes, rank: int, size: int, where: str) -> ctypes.c_void_p:
        """Join a group; all its ranks must call this at the same time."""
        comm = POINTER()
        buffer = ctypes.create_string_buffer(unique_id, ID_BYTES)
        self.call("flagcxCommInitRank", ctypes.byref(comm), size, buffer, rank, where=where)
        return comm

    @contextmanager
    def group(self, comm: ctypes.c_void_p, where: str) -> Iterator[None]:
        """Collect the block's calls and run them together at its end."""
        self.call("flagcxGroupStart", comm, where=where)
        try:
            yield
        finally:
            self.call("flagcxGroupEnd", comm, where=where)

    def stream(self, raw: int | None) -> ctypes.c_void_p:
        """Convert a device stream for FlagCX; release the result with `free_stream`."""
        copy = self._of_device(STREAM_COPY, POINTER, POINTER)
        found = POINTER()
        code = copy(ctypes.byref(found), POINTER(raw))
        if code != 0:
            raise FlagcxError(f"streamCopy failed: {self._words(code)}", "streamCopy", code)
        return found

    def free_stream(self, stream: ctypes.c_void_p) -> None:
        """Release the result of `stream`; the device's stream is not affected."""
        self._of_device(STREAM_FREE, POINTER)(stream)

    def _of_device(self, place: int, *types: type) -> ctypes._CFunctionType:
        prototype = ctypes.CFUNCTYPE(INT, *types)
        return prototype(self._table[place])


_loaded: dict[Path, Library] = {}
_loading = threading.Lock()


def load_library(path: Path) -> Library:
    """Return the library at this path; a process can load only one.

    Raises:
        LibraryError: it cannot be used, or the process has loaded another library.
    """
    path = Path(os.path.realpath(path))
    with _loading:
        others = [other for other in _loaded if other != path]
        if others:
            raise LibraryError(f"cannot load {path}: this process has already loaded {others[0]}")
        if path not in _loaded:
            _loaded[path] = Library(path)
        return _loaded[path]


def loaded_library() -> Library | None:
    """Return the library that this process has loaded, or None."""
    return next(iter(_loaded.values()), None)
