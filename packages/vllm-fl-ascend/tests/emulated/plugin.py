"""The emulation in child processes of tests, loaded by VLLM_FL_PLUGIN_MODULES. vllm-fl-ascend's
plugin is unchanged except for the classes of its device profile, which compute on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import vllm_fl_ascend.plugin as ascend
from vllm_fl import OpImpl, WorkerContext, WorkerReport, hookimpl

from . import VERSION, activate

activate()
ascend.PROFILE = dataclasses.replace(
    ascend.PROFILE,
    platform_class="emulated.platform.EmulatedPlatform",
    worker_class="emulated.worker.EmulatedWorker",
    dist_backend="gloo",
)


@hookimpl
def register_ops() -> Iterable[OpImpl]:
    """Provide nothing; let the installed backend run here, even if it is imported again."""
    from vllm_fl_ascend.plugin import MODULES

    for impl in (impl for module in MODULES for impl in module.OPS):
        device, *others = impl.takes  # the emulated operators compute on the CPU
        object.__setattr__(impl, "takes", (device.replace("npu", "cpu"), *others))
    return ()


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport:
    """Log that no NPU is used."""
    return WorkerReport((f"emulated: torch_npu {VERSION}'s operators, on the CPU",))
