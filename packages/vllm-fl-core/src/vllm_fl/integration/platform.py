"""The overlay: vLLM's own platform class with the few methods that the plan needs.

The class keeps its enum, so that vLLM's attention, graphs, compile passes and collectives stay.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["PlatformOverlay", "is_overlay", "overlay_path", "platform_name"]

PREFIX = "Overlay__"

KNOWN = {
    "CpuPlatform": "cpu",
    "ZenCpuPlatform": "cpu",
    "CudaPlatform": "cuda",
    "NvmlCudaPlatform": "cuda",
}
"""vLLM's platform classes that we lay ourselves over, with the name that settings use."""


class PlatformOverlay:
    """What we change of a platform. Mixed in before vLLM's own class."""

    vllm_fl_platform: str

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Register the installed norms as providers of vLLM's IR ops."""
        super().import_ir_kernels()  # type: ignore[misc]
        from .ir import register_providers

        register_providers()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> Any:
        """The order of IR providers that the plan gives."""
        from .ir import prioritise
        from .planning import note_user_priority, plan_for

        note_user_priority(vllm_config)
        # vLLM 0.26 and 0.27 hash the priorities before they import the kernels.
        cls.import_ir_kernels()
        default = cls.vllm_fl_stock_priority(vllm_config)
        if vllm_config.model_config is None:
            return default
        return prioritise(default, plan_for(vllm_config))

    @classmethod
    def vllm_fl_stock_priority(cls, vllm_config: VllmConfig) -> Any:
        """The order that vLLM's own class gives."""
        return super().get_default_ir_op_priority(vllm_config)  # type: ignore[misc]

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Turn on the custom ops whose implementation is ours, and put our worker in."""
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        if vllm_config.model_config is None:
            return  # a configuration without a model runs nothing
        from .planning import apply, plan_for
        from .worker import wrap_worker

        apply(plan_for(vllm_config), vllm_config)
        wrap_worker(vllm_config)


def is_overlay(platform: object) -> bool:
    """Whether vLLM's platform is one of ours."""
    return isinstance(platform, PlatformOverlay)


def platform_name(platform: object) -> str:
    """The name of a platform of ours, as settings files use it."""
    return str(platform.vllm_fl_platform)  # type: ignore[attr-defined]


def overlay_path() -> str | None:
    """The path of the overlay over the platform that vLLM would choose; None for an unknown one."""
    from vllm.platforms import builtin_platform_plugins

    for detect in builtin_platform_plugins.values():
        path = detect()
        if path is not None:
            module, _, name = path.rpartition(".")
            if name in KNOWN or module.endswith(".cuda"):
                return f"{__name__}.{PREFIX}{path.replace('.', '__')}"
    return None


def __getattr__(name: str) -> type:
    """Only a path travels to vLLM and to its workers: the class is made from it on demand."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, cls = name.removeprefix(PREFIX).replace("__", ".").rpartition(".")
    base = getattr(import_module(module), cls)
    overlay = type(
        f"{cls}FL",
        (PlatformOverlay, base),
        {"__module__": __name__, "__qualname__": name, "vllm_fl_platform": KNOWN.get(cls, "cuda")},
    )
    globals()[name] = overlay
    return overlay
