"""The overlay: vLLM's own platform class, or a device plugin's, with what the plan needs.

vLLM's own class keeps its enum, so that its attention, graphs, compile passes and collectives stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..engine.plan import active_plan
from ..errors import DeviceError, OwnerError
from ..plugins.types import DeviceProfile
from ..settings.loading import load_startup
from ..text import quote
from .compat import leave_out_cuda_fusions
from .device import IN_TREE, detect_device, other_platforms, profile_named
from .seams.lookups import laid_over, named, over_class, path_over

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["PlatformOverlay", "is_overlay", "overlay_path"]

PREFIX = "Overlay__"
DEVICE = "Device__"

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
    """The platform's name, as settings files use it."""

    vllm_fl_device: DeviceProfile | None = None

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Register our provider of vLLM's IR ops."""
        super().import_ir_kernels()  # type: ignore[misc]
        from ..dispatch import get_default_manager
        from .seams.ir import register_provider

        get_default_manager().ensure_initialized(cls.vllm_fl_platform, defer_errors=True)
        register_provider()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> Any:
        """The order of IR providers that the plan gives."""
        from .planning import facts_of, is_sealed, load_plugins, note_user_priority, plan_for
        from .seams.ir import prioritise

        # A configuration that was made from a sealed engine's, as vLLM's drafters do.
        if is_sealed(vllm_config):
            return cls.vllm_fl_stock_priority(vllm_config)
        load_plugins(vllm_config)
        note_user_priority(vllm_config)
        # Not every release imports the kernels before it hashes the priorities.
        cls.import_ir_kernels()
        default = cls.vllm_fl_stock_priority(vllm_config)
        if vllm_config.model_config is None:
            return default
        if cls.vllm_fl_device is not None:
            leave_out_cuda_fusions(vllm_config)
        return prioritise(default, plan_for(facts_of(vllm_config)))

    @classmethod
    def vllm_fl_stock_priority(cls, vllm_config: VllmConfig) -> Any:
        """The order that vLLM's own class gives."""
        return super().get_default_ir_op_priority(vllm_config)  # type: ignore[misc]

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Turn on the custom ops whose implementation is ours, and put our worker in."""
        parallel = vllm_config.parallel_config
        if cls.vllm_fl_device is not None and parallel.worker_cls == "auto":
            parallel.worker_cls = cls.vllm_fl_device.worker_class
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        from .nodes import carry_startup
        from .planning import apply, facts_of, is_sealed, plan_for, refuse_batch_invariance
        from .worker import wrap_worker

        # A configuration without a model runs nothing. vLLM also comes here a second time, after
        # the workers have loaded: in one process with them, the plan is sealed by then.
        if vllm_config.model_config is None or is_sealed(vllm_config):
            return
        if cls.vllm_fl_device is None:  # a plugin's device may have a mode of its own
            refuse_batch_invariance(cls.vllm_fl_platform)
        apply(plan_for(facts_of(vllm_config)), vllm_config)
        wrap_worker(vllm_config)
        carry_startup(vllm_config.parallel_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The attention backend that the plan gives; vLLM's own answer where it gives none."""
        from vllm.config import get_current_vllm_config

        from .planning import facts_of, plan_for
        from .seams.attention import choose

        path = None
        # A worker of Ray's may have got this platform before it was told that its engine is stock.
        if load_startup().enabled:
            plan = active_plan() or plan_for(facts_of(get_current_vllm_config()))
            path = choose(plan, selected_backend, attn_selector_config, num_heads)
        if path is None:
            path = super().get_attn_backend_cls(  # type: ignore[misc]
                selected_backend, attn_selector_config, num_heads
            )
        return str(path)

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        """The platform's own pass manager, with passes of ours in it."""
        from .passes import manager_path

        return manager_path(cls.vllm_fl_stock_pass_manager())

    @classmethod
    def vllm_fl_stock_pass_manager(cls) -> str:
        """The manager of the platform class."""
        return str(super().get_pass_manager_cls())  # type: ignore[misc]

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """What makes the plan's, in a worker that is making its groups; else `stock`."""
        from .seams.communicator import FACTORY, groups_now

        return FACTORY if groups_now() is not None else cls.vllm_fl_stock_communicator()

    @classmethod
    def vllm_fl_stock_communicator(cls) -> str:
        """The communicator that a device plugin brings; else that of the platform class."""
        path = cls.vllm_fl_device and cls.vllm_fl_device.communicator_class
        return path or str(super().get_device_communicator_cls())  # type: ignore[misc]


def is_overlay(platform: object) -> bool:
    """Whether vLLM's platform is one of ours."""
    return isinstance(platform, PlatformOverlay)


def overlay_path(forced: str | None = None) -> str | None:
    """The path of the overlay for this machine; None where neither vLLM nor a plugin knows it.

    vLLM's own platform comes first, unless VLLM_FL_PLATFORM names a plugin's device.

    Args:
        forced: what VLLM_FL_PLATFORM says, or None.

    Raises:
        PluginError: two devices claim the machine, or the forced one is not there; or another
            distribution's platform plugin answers too, at which vLLM would end its start.
    """
    path = _in_tree_path()
    if path is None or (forced is not None and forced not in IN_TREE):
        profile = detect_device(None if forced in IN_TREE else forced)
        if profile is not None:
            path = f"{__name__}.{DEVICE}{profile.name}"
    others = other_platforms() if path is not None else ()
    if others:
        raise OwnerError(f"vllm-fl: {others[0]}", plugin="fl", distribution=others[0].split()[0])
    return path


def _in_tree_path() -> str | None:
    from vllm.platforms import builtin_platform_plugins

    for detect in builtin_platform_plugins.values():
        path = detect()
        if path is not None:
            module, _, name = path.rpartition(".")
            if name in KNOWN or module.endswith(".cuda"):
                return path_over(__name__, PREFIX, path)
    return None


def __getattr__(name: str) -> type:
    """Only a path travels to vLLM and to its workers: the class is made from it on demand."""
    if name.startswith(DEVICE):
        base, own = _device_class(profile_named(name.removeprefix(DEVICE)))
        return laid_over(__name__, name, PlatformOverlay, base, **own)
    overlay: Any = over_class(__name__, PREFIX, name, PlatformOverlay)
    overlay.vllm_fl_platform = KNOWN.get(overlay.__bases__[1].__name__, "cuda")
    return overlay  # type: ignore[no-any-return]


def _device_class(profile: DeviceProfile) -> tuple[type, dict[str, Any]]:
    """(the profile's platform class, what the overlay over it sets)."""
    try:
        base: type = named(profile.platform_class)
    except Exception as error:
        raise DeviceError(
            f"Device {profile.name!r}: its platform class {profile.platform_class} cannot be "
            f"imported: {quote(error)}",
            plugin=profile.name,
            cause=error,
        ) from error
    own: dict[str, Any] = {"vllm_fl_platform": profile.name, "vllm_fl_device": profile}
    return base, own | ({"dist_backend": profile.dist_backend} if profile.dist_backend else {})
