"""Startup of a process: load plugins, detect the platform and read settings, in this order."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from ..errors import PluginError, SettingsError
from ..logs import get_logger, set_log_level, speaks_for_all
from ..plugins import breadcrumb, discovery
from ..plugins import loading as plugin_loader
from ..plugins.calling import asking, in_hook, policy_files, results_of
from ..plugins.device import DeviceProfile, devices
from ..plugins.installed import canonical
from ..plugins.plugin import Plugin
from ..plugins.registry import OpRegistry
from ..plugins.snapshot import EMPTY
from ..plugins.types import NAMED_CLASSES
from ..settings.loading import load_settings, load_startup
from ..settings.names import check_names
from ..settings.schema import RESERVED_NAMES, Settings
from ..settings.values import PLATFORMS
from .platforms import foreign_platform, torch_platform, vllm_platform

log = get_logger("plugins")


@dataclass(frozen=True)
class Startup:
    """The loaded plugins and the effective settings. If the settings could not be read, `settings`
    has the defaults and `problem` the error. The error is not raised at once, because a worker gets
    the settings of its engine. `allowed` are the distributions that may load (VLLM_FL_PLUGINS; None
    for all), `modules` the additional modules (VLLM_FL_PLUGIN_MODULES)."""

    plugins: tuple[Plugin, ...]
    settings: Settings
    problem: SettingsError | None = None
    allowed: tuple[str, ...] | None = None
    modules: tuple[str, ...] = ()

    def loaded_under(self, settings: Settings) -> bool:
        """Whether these settings would load the same plugins."""
        return (_names(self.allowed), self.modules) == (
            _names(settings.plugins),
            settings.plugin_modules,
        )


def _names(allowed: Sequence[str] | None) -> frozenset[str] | None:
    return None if allowed is None else frozenset(map(canonical, allowed))


def detect_platform(plugins: Sequence[Plugin] = ()) -> str:
    """Return the name of this machine's platform in settings files, as in a vLLM engine.

    It is the first of: the platform plugin of another package (by its entry point), vLLM's built-in
    platform, the device of a vllm-fl plugin, the device of torch (`ascend` by its extension), cpu.
    torch is not imported, because a process without torch cannot run a kernel on a device.
    """
    foreign = foreign_platform()
    if foreign is not None:
        return foreign.name
    own = vllm_platform()
    if own is None:
        for profile in _profiles(plugins):
            if profile.detection() is True:
                return profile.name
    npu = getattr(sys.modules.get("torch"), "npu", None)
    if own is None and npu is not None and npu.is_available():
        return "ascend"
    return own or torch_platform() or "cpu"


def is_foreign(platform: str) -> bool:
    """Whether vLLM uses a platform of another package here, with the name `platform` in
    settings."""
    foreign = foreign_platform()
    return foreign is not None and foreign.name == platform


def known_platforms(plugins: Sequence[Plugin]) -> tuple[str, ...]:
    """Return the platforms for which settings files may exist, including plugins' devices. Devices
    are not detected."""
    brought = (profile.name for profile in _profiles(plugins))
    return tuple(dict.fromkeys((*PLATFORMS, *brought)))


def _profiles(plugins: Sequence[Plugin]) -> list[DeviceProfile]:
    known, errors = devices(plugins)
    for error in errors:
        _report(error)
    return [profile for _, profile in known]


def start(
    registry: OpRegistry,
    env: Mapping[str, str] = os.environ,
    *,
    platform: str | None = None,
    engine: Settings | None = None,
) -> Startup:
    """Load the plugins into `registry` and read the settings. Raises SettingsError if a variable
    that is needed for startup is invalid.

    Args:
        platform: the platform, if the caller knows it. VLLM_FL_PLATFORM overrides it.
        engine: in a worker, the settings of its engine, which determine the plugins instead of this
            process's environment.
    """
    early = load_startup(env)
    set_log_level("DEBUG" if early.debug else early.log_level)
    asked = early if engine is None else engine
    found = discovery.discover(asked.plugin_modules)
    warnings = discovery.unmatched_plugins([each.owner for each in found], asked.plugins)
    crumbs = [f"An earlier {crumb}. Run `vllm-fl doctor` for more." for crumb in breadcrumb.lost()]
    _warn(warnings, "FL110")
    _warn(crumbs, "FL216")
    plugins = plugin_loader.load(registry, found, only=asked.plugins, variables=RESERVED_NAMES)
    for plugin in plugins:
        _report(plugin.error)
    # Only the process that logs warnings needs them. Availability checks would also open the device
    # of a worker too early.
    asks = engine is None and speaks_for_all()
    settings, problem = try_settings(registry, env, platform=platform, asks=asks)
    if problem is None:
        _warn(settings.warnings, "FL110")
    return Startup(plugins, settings, problem, asked.plugins, asked.plugin_modules)


@cache
def begin_process() -> None:
    """Call the hook `process_start` of the installed extensions, once in this process. Only
    extensions are imported. Errors of the hook are logged, except errors of core other than
    PluginError (`SettingsError`), which are raised. `start` logs errors of loading."""
    found = [each for each in discovery.discover() if each.kind == "extension"]
    plugins = plugin_loader.load(OpRegistry(EMPTY), found, variables=RESERVED_NAMES)
    for plugin in asking(plugins, "process_start"):
        try:
            with in_hook(plugin, "process_start", passing=True):
                results_of(plugin, "process_start", object)
        except PluginError as error:
            log.error("%s", error)


def _warn(warnings: Sequence[str], code: str) -> None:
    if warnings and speaks_for_all():
        for warning in warnings:
            log.warning("%s [%s]", warning, code)


def try_settings(
    registry: OpRegistry,
    env: Mapping[str, str] = os.environ,
    *,
    platform: str | None = None,
    asks: bool = True,
) -> tuple[Settings, SettingsError | None]:
    """Return the effective settings, or the defaults and the error. The arguments are as for
    `start`."""
    early = load_startup(env)
    platform = platform or _detected(early, registry.plugins)
    try:
        return read_settings(registry, env, platform=platform, asks=asks), None
    except SettingsError as error:
        only = {"VLLM_FL_PLATFORM": early.platform} if early.platform else {}
        return load_settings(only, platform=platform), error


def _detected(early: Settings, plugins: Sequence[Plugin]) -> str | None:
    return None if early.platform else detect_platform(plugins)


def read_settings(
    registry: OpRegistry,
    env: Mapping[str, str] = os.environ,
    *,
    platform: str | None = None,
    asks: bool = True,
    orders: Mapping[str, object] = MappingProxyType({}),
) -> Settings:
    """Return the effective settings with the installed plugins; see `start`.

    If another package's platform has the name of a vllm-fl device, the settings file of that device
    is read only if VLLM_FL_PLATFORM selects the device.

    Args:
        asks: whether to warn about orders with implementations that are not available here.
        orders: as for `load_settings`.
    """
    early, plugins = load_startup(env), registry.plugins
    platform = platform or _detected(early, plugins)
    where = early.platform or platform
    assert where is not None
    files, errors = policy_files(plugins, where)
    foreign = is_foreign(where)
    if foreign and not early.platform:
        owners = {owner.name for owner, profile in devices(plugins)[0] if profile.name == where}
        files = [(name, path) for name, path in files if name not in owners]
    for error in errors:
        _report(error)
    snapshot = registry.snapshot()
    known: Sequence[str] = PLATFORMS
    if not files and early.platform and early.platform not in known:  # a possible typing error
        known = known_platforms(plugins)
    settings = load_settings(
        env,
        platform=platform,
        platform_files=files,
        brought={
            op: [(snapshot.owners[op, impl.impl_id].name, impl) for impl in impls]
            for op, impls in snapshot.impls_by_op.items()
        },
        groups=snapshot.groups,
        plugins=[spec for plugin in plugins for spec in plugin.settings],
        platforms=known,
        foreign=foreign,
        orders=orders,
    )

    return check_names(
        settings,
        op={*snapshot.ops, *NAMED_CLASSES},
        group=snapshot.groups,
        vendor={v for impls in snapshot.impls_by_op.values() for i in impls for v in i.vendors},
        impls=snapshot.impls_by_op if asks else None,
        bindings=snapshot.bindings,
        plugins=plugins,
    )


def _report(failure: PluginError | None) -> None:
    if failure is not None:
        log.error("%s", failure)
