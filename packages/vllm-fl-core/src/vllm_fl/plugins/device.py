"""Hardware without a vLLM platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import DeviceError
from ..logs import get_logger
from .answers import Availability, answered, check_path
from .breadcrumb import noting
from .calling import HookResults, results_of_each
from .plugin import Plugin

log = get_logger("plugins")


@dataclass(frozen=True)
class DeviceProfile:
    """The classes that an engine needs on hardware without a vLLM platform.

    They are imported when the device is chosen.

    Args:
        name: the platform's name in settings (`ascend`), a lower-case identifier.
        platform_class: a vLLM `Platform` subclass with `_enum = PlatformEnum.OOT`, `device_name`,
            `device_type` and `dispatch_key`.
        worker_class: the worker, which creates the model runner. A user's `worker_cls` replaces it.
        communicator_class: a vLLM `DeviceCommunicatorBase` subclass; None for the communicator of
            the platform class.
        dist_backend: the torch.distributed backend between ranks (`hccl`); None for the backend of
            the platform class.
        detect: () -> True, or the reason why this machine does not have the device. It is called in
            every process while vLLM looks for its platform. It must not initialize the device or
            import vllm.

    Raises:
        ValueError: the name is not a lower-case identifier, or a path is not `module.Class`.
    """

    name: str
    platform_class: str
    worker_class: str
    communicator_class: str | None = None
    dist_backend: str | None = None
    detect: Callable[[], Availability] = field(kw_only=True)

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
            raise ValueError(f"DeviceProfile({name!r}): the name must be a lower-case identifier")
        for which in ("platform_class", "worker_class", "communicator_class"):
            path = getattr(self, which)
            if path is not None or which != "communicator_class":
                check_path(f"DeviceProfile({name!r})", which, path)

    def detection(self) -> Availability:
        """Call `detect`. Return True, or why the machine has no such device."""
        with noting(f"the detection of the device {self.name}"):
            return answered("its detection", self.detect)


def devices(plugins: Sequence[Plugin]) -> HookResults:
    return results_of_each(plugins, "device", DeviceProfile)


def find_device(plugins: Sequence[Plugin], name: str | None = None) -> DeviceProfile | None:
    """Return the device of this machine, or None if no plugin supports it. `name` is a platform
    that the user forced; other devices are then ignored.

    Raises:
        DeviceError: several plugins detect their device, or the forced device is not detected.
        PluginError: no device was found and a device hook failed. The engine would otherwise run on
            another device without notice.
    """
    known, errors = devices(plugins)
    asked = [(owner, profile) for owner, profile in known if name in (None, profile.name)]
    verdicts = [(owner, profile, profile.detection()) for owner, profile in asked]
    found = [(owner, profile) for owner, profile, verdict in verdicts if verdict is True]
    if len(found) > 1:
        names = ", ".join(f"{profile.name!r} of {owner.name}" for owner, profile in found)
        raise found[1][0].error(
            f" and {len(found) - 1} other claim this machine's device: {names}. Choose one with "
            "VLLM_FL_PLATFORM=<name>, or disable one with VLLM_FL_PLUGINS.",
            kind=DeviceError,
        )
    if name is not None and verdicts and not found:
        raise verdicts[0][0].error(
            f": VLLM_FL_PLATFORM={name} selects its device, which is missing: {verdicts[0][2]}. "
            "Unset VLLM_FL_PLATFORM to use the device that vLLM detects.",
            kind=DeviceError,
        )
    if not found and errors:
        raise errors[0]
    for error in errors:  # another plugin's device is available
        log.error("%s", error)
    return found[0][1] if found else None
