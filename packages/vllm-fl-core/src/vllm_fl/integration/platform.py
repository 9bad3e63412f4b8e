"""The overlay: a mixin that adds the plan's hooks to the platform class that vLLM uses.

The platform plugin of vllm-fl returns the overlay for platforms of vLLM and for devices of vllm-fl
plugins. If another distribution provides the platform, the overlay is installed in place. The
overlay keeps the enum of its base class, and therefore its attention, graphs, passes and
collectives.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from ..dispatch import get_default_manager
from ..dispatch.platforms import (
    foreign_platform,
    foreign_platforms,
    targets_cpu,
    too_many,
    vllm_platform,
)
from ..engine.plan import active_plan
from ..errors import DeviceError
from ..logs import get_logger, speaks_for_all
from ..plugins.device import DeviceProfile, find_device
from ..settings.loading import load_startup
from ..settings.values import IN_TREE
from ..text import quote
from .carried import carry_startup, is_planned
from .compat import leave_out_cuda_fusions
from .patchers.lookups import import_object, laid_over, log_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OVERLAY = "Overlay"

OWN = ("__", "_abc_", "vllm_fl_")
"""Prefixes of attributes that are set on the overlay class itself instead of its base."""

log = get_logger("engine")


class PlatformOverlay:
    vllm_fl_platform: str
    """The platform's name in settings files."""

    vllm_fl_device: DeviceProfile | None = None

    def __init_subclass__(cls) -> None:
        """Do not call the base class's method: it may register or reject subclasses."""

    @classmethod
    def pre_register_and_update(cls, *args: Any, **kwargs: Any) -> None:
        """Warn if a general plugin has replaced vLLM's platform after vllm-fl's plugin was called.
        vLLM calls this after all general plugins, on the platform that it had before them."""
        from vllm.platforms import current_platform

        if not is_overlay(current_platform) and speaks_for_all():
            log.warning(
                "vllm-fl is disabled, vLLM runs unmodified: another plugin replaced vLLM's "
                "platform with an object of %s after vllm-fl had wrapped it [FL213]",
                f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
            )
        super().pre_register_and_update(*args, **kwargs)  # type: ignore[misc]

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Register vllm-fl's provider of IR ops after the platform's kernels."""
        super().import_ir_kernels()  # type: ignore[misc]
        from .patchers.ir import register_provider

        get_default_manager().ensure_initialized(cls.vllm_fl_platform, defer_errors=True)
        register_provider()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> Any:
        stock = super().get_default_ir_op_priority  # type: ignore[misc]
        if is_planned(vllm_config):  # vLLM's drafters copy the configuration of an engine
            return stock(vllm_config)
        from .patchers.ir import prioritise
        from .planning import facts_of, load_plugins, note_user_priority, plan_for

        load_plugins(vllm_config)
        note_user_priority(vllm_config)
        # Some releases hash the priorities before they import the kernels.
        cls.import_ir_kernels()
        default = stock(vllm_config)
        if vllm_config.model_config is None:
            return default
        if cls.vllm_fl_device is not None:
            leave_out_cuda_fusions(vllm_config)
        return prioritise(default, plan_for(facts_of(vllm_config)))

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        if cls.vllm_fl_device is not None and parallel.worker_cls == "auto":
            parallel.worker_cls = cls.vllm_fl_device.worker_class
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        from .planning import apply, facts_of, plan_for, refuse_unverified
        from .worker import wrap_worker

        if vllm_config.model_config is None:  # an engine without a model
            return
        # vLLM calls this again after the workers have loaded, and the platform may have set its own
        # worker class again. The workers have the plan.
        wrap_worker(vllm_config)
        if is_planned(vllm_config):
            return
        facts = facts_of(vllm_config)
        refuse_unverified(facts)
        apply(plan_for(facts), vllm_config)
        carry_startup(vllm_config.parallel_config)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *request: Any, **more: Any) -> Any:
        """Return the class path of the attention backend: planned, or chosen by the platform. The
        parameters after `selected_backend` differ between releases and platforms."""
        from .patchers.attention import choose
        from .planning import plan_now

        path = None
        # A Ray worker may choose this platform before Ray sets the variable that disables vllm-fl.
        if load_startup().enabled and (plan := active_plan() or plan_now()) is not None:
            path = choose(plan, selected_backend, *request, **more)
        stock = super().get_attn_backend_cls  # type: ignore[misc]
        return path or stock(selected_backend, *request, **more)

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        from .graphs.passes import manager_path

        return manager_path(str(super().get_pass_manager_cls()))  # type: ignore[misc]

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the path of vllm-fl's factory while a worker makes rank groups, otherwise the
        stock path."""
        from .patchers.communicator import FACTORY, groups_now

        return FACTORY if groups_now() is not None else cls.vllm_fl_stock_communicator()

    @classmethod
    def vllm_fl_stock_communicator(cls) -> str:
        path = cls.vllm_fl_device and cls.vllm_fl_device.communicator_class
        return path or str(super().get_device_communicator_cls())  # type: ignore[misc]


def is_overlay(platform: object) -> bool:
    return isinstance(platform, PlatformOverlay)


class _Forwarding(type):
    """The metaclass of an overlay in place. It sets attributes on the platform's original class.
    Platforms cache values on the class of `current_platform`, but read them from the class that
    they define.
    """

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith(OWN):
            super().__setattr__(name, value)
        else:
            setattr(cls.__bases__[-1], name, value)

    def __delattr__(cls, name: str) -> None:
        if name.startswith(OWN):
            super().__delattr__(name)
        else:
            delattr(cls.__bases__[-1], name)


def overlay_path(forced: str | None = None) -> str | None:
    """Make the overlay for this machine and return its class path. A platform of vLLM has priority
    over devices of plugins, unless VLLM_FL_PLATFORM selects a device.

    Returns:
        None if another distribution's platform plugin answers (`lay_in_place` overlays its class),
            or if neither vLLM nor a plugin knows the machine.

    Raises:
        PluginError: two devices claim the machine; the forced device is missing, cannot be imported
            or is excluded by VLLM_TARGET_DEVICE=cpu; a device hook failed and no device was found;
            several platform plugins answer; or a platform plugin answers although a device is
            forced.
    """
    from vllm.platforms import builtin_platform_plugins

    others = foreign_platforms()
    if len(others) > 1:
        raise too_many(others)
    own = others[0].name if others else vllm_platform()
    asked = None if forced in (*IN_TREE, own) else forced
    profile = _device(asked) if own is None or asked is not None else None
    if others and profile is not None:
        raise too_many(others, profile.name)
    if profile is not None and targets_cpu():
        raise DeviceError(
            f"VLLM_FL_PLATFORM={forced} selects a plugin's device, but VLLM_TARGET_DEVICE=cpu "
            "makes vLLM ignore platform plugins. Unset one of them.",
            plugin=profile.name,
        )
    if profile is not None:
        return _laid(_class_of(profile), profile.name, profile)
    if others or own is None:
        return None
    return _laid(import_object(builtin_platform_plugins[own]()), own)


def lay_in_place(forced: str | None = None) -> None:
    """Overlay the class of `current_platform`, unless it has an overlay. Modules of vLLM refer to
    this object, so only its class is changed. If the class does not allow this, the error is
    logged. Arguments and errors are as for `overlay_path`."""
    from vllm.platforms import current_platform

    if is_overlay(current_platform):
        return
    overlay_path(forced)  # raises the error that vLLM has hidden
    foreign, base = foreign_platform(), type(current_platform)
    name = foreign.name if foreign is not None else vllm_platform()
    if name is None:
        return  # a machine that vLLM and the plugins do not know
    if foreign is not None and foreign.has_vllms_name and speaks_for_all():
        log.warning("%s [FL213]", foreign.named_like_vllms)
    try:
        made = _made_in_place(base, vllm_fl_platform=name)
        object.__setattr__(current_platform, "__class__", made)
    except Exception as error:  # its metaclass is third-party code
        log_refusal(base, error, logging.ERROR if speaks_for_all() else logging.DEBUG)


def _device(forced: str | None) -> DeviceProfile | None:
    manager = get_default_manager()
    manager.ensure_initialized(defer_errors=True)
    assert manager.startup is not None
    return find_device(manager.startup.plugins, forced)


def _class_of(profile: DeviceProfile) -> type:
    try:
        return import_object(profile.platform_class)  # type: ignore[no-any-return]
    except Exception as error:
        raise DeviceError(
            f"Device {profile.name!r}: its platform class {profile.platform_class} cannot be "
            f"imported: {quote(error)}",
            plugin=profile.name,
            cause=error,
        ) from error


def _laid(base: type, name: str, profile: DeviceProfile | None = None) -> str:
    own: dict[str, Any] = {"vllm_fl_platform": name, "vllm_fl_device": profile}
    if profile is not None and profile.dist_backend:
        own["dist_backend"] = profile.dist_backend
    laid_over(__name__, OVERLAY, PlatformOverlay, base, **own)
    return f"{__name__}.{OVERLAY}"


def _made_in_place(base: type, **own: Any) -> type:
    """Make the overlay of the class of a platform that is already in use. Cached class methods are
    called on the base class, so they are computed and cached only once."""
    for name in dir(base):
        held = inspect.getattr_static(base, name)
        is_cached = isinstance(held, classmethod) and hasattr(held.__func__, "cache_info")
        if is_cached and not hasattr(PlatformOverlay, name):
            own[name] = staticmethod(getattr(base, name))
    metaclass = type("Forwarding", (_Forwarding, type(base)), {})
    fields = {"__module__": __name__, "__qualname__": OVERLAY, **own}
    made: type = metaclass(base.__name__, (PlatformOverlay, base), fields)
    globals()[OVERLAY] = made
    return made


def __getattr__(name: str) -> type:
    """Make the overlay when it is unpickled in a process that has not chosen its platform yet."""
    if name != OVERLAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    lay_in_place(load_startup().platform)
    return type(current_platform)
