"""The overlay: the platform class that vLLM runs on, with what the plan needs.

vLLM's own class and a plugin's device get it where vLLM asks for a platform. The class of another
distribution's platform plugin gets it in place: vLLM takes one plugin's, and that is theirs. The
class below keeps its enum, so that its attention, graphs, compile passes and collectives stay.
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
    vllms_own,
)
from ..engine.plan import active_plan
from ..errors import DeviceError
from ..logs import get_logger, speaks_for_all
from ..plugins.device import DeviceProfile, find_device
from ..settings.loading import load_startup
from ..settings.values import IN_TREE
from ..text import quote
from .compat import leave_out_cuda_fusions
from .patchers.lookups import laid_over, log_refusal, named

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OVERLAY = "Overlay"
"""What the process's overlay is called in this module."""

OWN = ("__", "_abc_", "vllm_fl_")
"""How the attributes begin that a class has for itself."""

log = get_logger("engine")


class PlatformOverlay:
    """What we change of a platform. Mixed in before vLLM's own class."""

    vllm_fl_platform: str
    """The platform's name, as settings files use it."""

    vllm_fl_device: DeviceProfile | None = None

    def __init_subclass__(cls) -> None:
        """Nothing: a class below that counts or refuses its subclasses is not asked about ours."""

    @classmethod
    def pre_register_and_update(cls, *args: Any, **kwargs: Any) -> None:
        """Say where a general plugin has replaced vLLM's platform after ours was called.

        vLLM asks for this when all of them were, and asks the object that it held before.
        """
        from vllm.platforms import current_platform

        if not is_overlay(current_platform) and speaks_for_all():
            log.warning(
                "vllm-fl steps aside, vLLM runs as stock: another plugin has replaced vLLM's "
                "platform, which vllm-fl lay over, by an object of %s [FL213]",
                f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
            )
        super().pre_register_and_update(*args, **kwargs)  # type: ignore[misc]

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Register our provider of vLLM's IR ops."""
        super().import_ir_kernels()  # type: ignore[misc]
        from .patchers.ir import register_provider

        get_default_manager().ensure_initialized(cls.vllm_fl_platform, defer_errors=True)
        register_provider()

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> Any:
        """The order of IR providers that the plan gives."""
        from .carried import is_sealed
        from .patchers.ir import prioritise
        from .planning import facts_of, load_plugins, note_user_priority, plan_for

        # vLLM's drafters make a configuration from a sealed engine's.
        is_final = is_sealed(vllm_config)
        if not is_final:
            load_plugins(vllm_config)
            note_user_priority(vllm_config)
            # Not every release imports the kernels before it hashes the priorities.
            cls.import_ir_kernels()
        default = super().get_default_ir_op_priority(vllm_config)  # type: ignore[misc]
        if is_final or vllm_config.model_config is None:
            return default
        if cls.vllm_fl_device is not None:
            leave_out_cuda_fusions(vllm_config)
        return prioritise(default, plan_for(facts_of(vllm_config)))

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Turn on the custom ops whose implementation is ours, and put our worker in."""
        parallel = vllm_config.parallel_config
        if cls.vllm_fl_device is not None and parallel.worker_cls == "auto":
            parallel.worker_cls = cls.vllm_fl_device.worker_class
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        from .carried import carry_startup, is_sealed
        from .planning import apply, facts_of, plan_for, refuse_unverified
        from .worker import wrap_worker

        if vllm_config.model_config is None:  # it runs nothing
            return
        # vLLM also comes here a second time, after the workers have loaded: in one process with
        # them, the plan is sealed by then. The platform may have put its own worker in again.
        wrap_worker(vllm_config)
        if is_sealed(vllm_config):
            return
        facts = facts_of(vllm_config)
        refuse_unverified(facts)
        apply(plan_for(facts), vllm_config)
        carry_startup(vllm_config.parallel_config)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *request: Any, **more: Any) -> Any:
        """The attention backend that the plan gives; the platform's own answer where it gives none.

        Releases and platforms differ in what follows the selected backend.
        """
        from .patchers.attention import choose
        from .planning import plan_now

        path = None
        # A worker of Ray's may have got this platform before it was told that its engine is stock.
        if load_startup().enabled and (plan := active_plan() or plan_now()) is not None:
            path = choose(plan, selected_backend, *request, **more)
        stock = super().get_attn_backend_cls  # type: ignore[misc]
        return path or stock(selected_backend, *request, **more)

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        """The platform's own pass manager, with passes of ours in it."""
        from .graphs.passes import manager_path

        return manager_path(str(super().get_pass_manager_cls()))  # type: ignore[misc]

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """What makes the plan's, in a worker that is making its groups; else `stock`."""
        from .patchers.communicator import FACTORY, groups_now

        return FACTORY if groups_now() is not None else cls.vllm_fl_stock_communicator()

    @classmethod
    def vllm_fl_stock_communicator(cls) -> str:
        """The communicator that a device plugin brings; else that of the platform class."""
        path = cls.vllm_fl_device and cls.vllm_fl_device.communicator_class
        return path or str(super().get_device_communicator_cls())  # type: ignore[misc]


def is_overlay(platform: object) -> bool:
    """Whether vLLM's platform is one of ours."""
    return isinstance(platform, PlatformOverlay)


class _Forwarding(type):
    """The class of an overlay in place: what is set on it is the class's below.

    Platforms keep what they find out on the class of `current_platform`, and their own code looks
    it up on the class that it knows.
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
    """The path of the overlay for this machine, which is made here.

    vLLM's own platform comes first, unless VLLM_FL_PLATFORM names a plugin's device.

    Args:
        forced: what VLLM_FL_PLATFORM says, or None.

    Returns:
        None where another distribution's platform plugin answers, whose class gets the overlay in
        place; and where neither vLLM nor a plugin knows the machine.

    Raises:
        PluginError: two devices claim the machine, or the forced one is not there, or vLLM does not
            ask for it; two other platform plugins answer, at which vLLM ends its start, or one
            beside a forced device.
    """
    from vllm.platforms import builtin_platform_plugins

    others = foreign_platforms()
    if len(others) > 1:
        raise too_many(others)
    own = others[0].name if others else vllms_own()
    asked = None if forced in (*IN_TREE, own) else forced
    profile = _device(asked) if own is None or asked is not None else None
    if others and profile is not None:
        raise too_many(others, profile.name)
    if profile is not None and targets_cpu():
        raise DeviceError(
            f"VLLM_FL_PLATFORM={forced} asks for a plugin's device, and VLLM_TARGET_DEVICE=cpu has "
            "vLLM run on the CPU and ask no plugin. Unset one of them.",
            plugin=profile.name,
        )
    if profile is not None:
        return _laid(_class_of(profile), profile.name, profile)
    if others or own is None:
        return None
    return _laid(named(builtin_platform_plugins[own]()), own)


def lay_in_place(forced: str | None = None) -> None:
    """Make vLLM's platform an overlay where vLLM took none from us.

    It is another plugin's then, or VLLM_TARGET_DEVICE has chosen. The object stays, since modules
    of vLLM's hold it: only its class changes. A class that does not let us runs as it is.

    Arguments and errors as for `overlay_path`.
    """
    from vllm.platforms import current_platform

    if is_overlay(current_platform):
        return
    overlay_path(forced)  # raises what vLLM has hidden
    foreign, base = foreign_platform(), type(current_platform)
    name = foreign.name if foreign is not None else vllms_own()
    if name is None:
        return  # neither vLLM nor a plugin knows the machine
    if foreign is not None and foreign.has_vllms_name and speaks_for_all():
        log.warning("%s [FL213]", foreign.named_like_vllms)
    try:
        made = _made_in_place(base, vllm_fl_platform=name)
        object.__setattr__(current_platform, "__class__", made)
    except Exception as error:  # its metaclass is anybody's code
        log_refusal(base, error, logging.ERROR if speaks_for_all() else logging.DEBUG)


def _device(forced: str | None) -> DeviceProfile | None:
    """The device that a plugin brings to this machine; arguments and errors as `find_device`."""
    manager = get_default_manager()
    manager.ensure_initialized(defer_errors=True)
    assert manager.startup is not None  # the default manager finds its own plugins
    return find_device(manager.startup.plugins, forced)


def _class_of(profile: DeviceProfile) -> type:
    try:
        return named(profile.platform_class)  # type: ignore[no-any-return]
    except Exception as error:
        raise DeviceError(
            f"Device {profile.name!r}: its platform class {profile.platform_class} cannot be "
            f"imported: {quote(error)}",
            plugin=profile.name,
            cause=error,
        ) from error


def _laid(base: type, name: str, profile: DeviceProfile | None = None) -> str:
    """The path of an overlay that vLLM makes its platform from."""
    own: dict[str, Any] = {"vllm_fl_platform": name, "vllm_fl_device": profile}
    if profile is not None and profile.dist_backend:
        own["dist_backend"] = profile.dist_backend
    laid_over(__name__, OVERLAY, PlatformOverlay, base, **own)
    return f"{__name__}.{OVERLAY}"


def _made_in_place(base: type, **own: Any) -> type:
    """The overlay over the class of a platform that has been used already.

    What the class caches by class is asked there, so that it is computed and kept once.
    """
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
    """The overlay of a process that has not asked for its platform, where it is unpickled."""
    if name != OVERLAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    lay_in_place(load_startup().platform)
    return type(current_platform)
