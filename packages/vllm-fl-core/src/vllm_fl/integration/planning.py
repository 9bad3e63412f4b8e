"""Make the plan from vLLM's configuration, and change the configuration for the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..contracts.binding import Binding, model_sizes
from ..dispatch import get_default_manager
from ..dispatch.startup import read_settings
from ..engine.facts import EngineFacts
from ..engine.plan import Plan, make_plan
from ..errors import InvalidSettingError, PluginError, SettingsError, StartError
from ..logs import get_logger
from ..plugins.reserved import unread, unverified
from ..plugins.types import KERNEL_OPS, NAMED_CLASSES
from ..settings.names import check_names
from ..settings.schema import Settings
from .carried import KEY, carried_entry, is_planned
from .compat import hide_our_variables, missing_requirement
from .graphs import ranges
from .patching import PATCHERS, merged, why_not
from .targets import installed_bindings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger("engine")


def facts_of(vllm_config: VllmConfig) -> EngineFacts:
    """Read the engine's facts from its configuration. Raises SettingsError for an invalid setting,
    and PluginError like `load_plugins`."""
    from vllm import envs
    from vllm.config import CompilationMode

    try:
        settings = _settings_of(vllm_config)
    except InvalidSettingError as error:
        # pydantic validates vLLM's configuration and wraps a ValueError in an error of its own. The
        # message is complete without the first traceback.
        raise SettingsError(
            error.message, key=error.key, origin=error.origin, op=error.op, code=error.code
        ) from None
    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    backend = vllm_config.attention_config.backend
    entry = carried_entry(vllm_config)
    compiled = compilation.mode not in (None, CompilationMode.NONE)
    requests = merged(lambda each: each.request(vllm_config, settings, compiled=compiled))
    facts = EngineFacts(
        settings,
        "compiled" if compiled else "eager",
        dtype=model.dtype if model else None,
        sizes=model_sizes(vllm_config, installed_bindings().values()) if model else None,
        custom_ops=tuple(compilation.custom_ops),
        attention_backend=None if backend is None else backend.name,
        batch_invariant=bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)),
        compile_backend=compilation.backend,
        absent=frozenset(
            op
            for op, binding in installed_bindings().items()
            if model and is_excluded_by_config(vllm_config, op, binding)
        )
        | frozenset(KERNEL_OPS if model and model.quantization is None else ()),
        captured=tuple(compilation.cudagraph_capture_sizes or ()),
        by_range=ranges.is_compiled_by_range(vllm_config),
        device=platform_device_name() if settings.by_device or settings.tuned else "",
        **entry.get("user", {}),
        **requests,
    )
    return facts.with_checked_table()


def platform_device_name() -> str:
    """Return the device name of vLLM's platform without opening the device; empty if unknown."""
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except Exception as error:  # a platform may be third-party code
        log.debug("cannot determine the platform's device: %s", error)
        return ""


def is_excluded_by_config(vllm_config: VllmConfig, op: str, binding: Binding) -> bool:
    try:
        return binding.when is not None and not binding.when(vllm_config)
    except Exception as error:  # a model's configuration may lack any attribute
        log.debug("cannot determine from the model configuration whether it has %s: %s", op, error)
        return False


def _settings_of(vllm_config: VllmConfig) -> Settings:
    """Return the engine's settings. The process that makes the engine's configuration reads them
    and stores them in `additional_config`, because a worker may not inherit the environment, and
    engines of one process may have different settings."""
    from vllm.platforms import current_platform

    settings = load_plugins(vllm_config)
    manager = get_default_manager()
    startup = manager.startup
    assert startup is not None
    if settings is None:
        if is_planned(vllm_config):
            return startup.settings  # the engine's are removed; files may no longer exist
        entry = carried_entry(vllm_config)
        settings = _read_settings(current_platform.vllm_fl_platform, entry.orders)
        _check_loaded(settings)
        entry.settings = settings
    if startup.problem is not None:
        manager.use_startup(replace(startup, settings=settings, problem=None), manager.registry)
    return settings


def load_plugins(vllm_config: VllmConfig) -> Settings | None:
    """Load the plugins that the engine's settings allow, once per process, and register their
    variables with vLLM. Raises PluginError if this process has already loaded different plugins.
    Errors in the settings of this process are deferred until they are needed: a worker gets its
    engine's settings with the configuration, and files may no longer exist."""
    from vllm.platforms import current_platform

    settings = carried_entry(vllm_config).settings
    manager = get_default_manager()
    manager.ensure_initialized(
        current_platform.vllm_fl_platform, defer_errors=True, engine=settings
    )
    declared = [spec for plugin in manager.registry.plugins for spec in plugin.settings]
    hide_our_variables(spec.variable for spec in declared)
    if settings is not None:
        _check_loaded(settings)
    return settings


def _check_loaded(settings: Settings) -> None:
    startup = get_default_manager().startup
    if startup is None or startup.loaded_under(settings):
        return

    def describe(allowed: Sequence[str] | None, modules: Sequence[str]) -> str:
        names = "all" if allowed is None else ",".join(allowed) or "none"
        return f"{names} and modules {','.join(modules) or 'none'}"

    raise PluginError(
        "vllm-fl: this process has loaded the plugins that its environment allows "
        f"({describe(startup.allowed, startup.modules)}), but its engine's configuration allows "
        f"{describe(settings.plugins, settings.plugin_modules)}. Set VLLM_FL_PLUGINS and "
        "VLLM_FL_PLUGIN_MODULES to the same values in all processes of an engine, before the first "
        "use of vllm-fl: a plugin's device and earlier calls of a script use the environment.",
        plugin="fl",
    )


def _read_settings(platform: str, orders: Mapping[str, object]) -> Settings:
    registry = get_default_manager().registry
    settings = read_settings(registry, platform=platform, orders=orders)
    if not settings.oot_enabled:
        log.info("vllm-fl is disabled for layers: %s (environment)", settings["oot_enabled"].named)
    listed = {*(settings.oot_whitelist or ()), *settings.oot_blacklist}
    layers = frozenset[str]()
    for patcher in PATCHERS:
        if not layers or not layers.issuperset(listed):  # later patchers read vLLM's source
            layers |= patcher.layer_names()
    return check_names(
        settings,
        op={*registry.snapshot().ops, *NAMED_CLASSES},
        layer=layers,
        bindings=installed_bindings(),
    )


def plan_for(facts: EngineFacts, demoted: Mapping[tuple[str, str], str] | None = None) -> Plan:
    """Make the plan of an engine. The user's settings of vLLM have priority. `demoted` has the
    implementations that are disabled or were rejected by a measurement, with the reasons."""
    facts = facts.ordered
    found = why_not(facts)
    plan = make_plan(
        get_default_manager(),
        facts,
        demoted={**found.impls, **(demoted or {})},
        notes={**found.ops, **_kept_by_vllm(facts)},
        kept_layers=found.layers,
    )
    kept = merged(lambda each: each.keep_stock(plan))
    entries = {op: replace(plan.entries[op], note=why) for op, why in kept.items()}
    return replace(plan, entries={**plan.entries, **entries})


def refuse_unverified(facts: EngineFacts) -> None:
    """Raise a StartError if no plugin verifies the planned ops or reads a setting."""
    startup, settings = get_default_manager().startup, facts.settings
    plugins = startup.plugins if startup else ()
    why = unread({key: each.value for key, each in settings.items()}, plugins)
    if why is None and unverified(settings.preflight, plugins, plans_others=True):
        entries = plan_for(facts).entries.values()
        others = any(entry.is_planned for entry in entries)
        why = unverified(settings.preflight, plugins, plans_others=others)
    if why is not None:
        raise StartError(f"vllm-fl: engine startup failed: {why}")


def plan_now() -> Plan | None:
    """Make the plan for vLLM's current configuration, for calls before the worker makes it. Return
    None if a script made the configuration before the overlay was installed in place."""
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    extra = vllm_config.additional_config
    if not isinstance(extra, dict) or KEY not in extra:
        return None
    return plan_for(facts_of(vllm_config))


def apply(plan: Plan, vllm_config: VllmConfig) -> None:
    """Configure vLLM for a plan: custom ops, compiler passes and compile ranges. Changes for an
    earlier plan are undone. All other settings of vLLM and the user are kept."""
    custom_ops = vllm_config.compilation_config.custom_ops
    entry = carried_entry(vllm_config)
    for name in entry.get("enabled", ()):
        if name in custom_ops:
            custom_ops.remove(name)
    wanted = (name for each in PATCHERS for name in each.configure(plan, vllm_config, entry))
    added = [
        f"+{name}"
        for name in dict.fromkeys(wanted)
        if f"+{name}" not in custom_ops and "all" not in custom_ops
    ]
    custom_ops += added
    entry["enabled"] = added


def _kept_by_vllm(facts: EngineFacts) -> dict[str, str]:
    """Return op -> why vLLM keeps it: batch invariance, a missing name, or no target."""
    placed = {op for patcher in PATCHERS for op in patcher.ops()}
    found, table = {}, installed_bindings()
    for op in get_default_manager().registry.snapshot().contracts:
        binding = table.get(op, Binding())
        if facts.batch_invariant and binding.batch_invariant:
            found[op] = f"VLLM_BATCH_INVARIANT requires {binding.batch_invariant}"
        elif missing := missing_requirement(binding):
            found[op] = f"this vLLM has no {missing}, which its targets need"
        elif op not in placed:
            which = "this vLLM" if binding.targets else "vLLM"
            found[op] = f"{which} has no target for it"
    return found


def note_user_priority(vllm_config: VllmConfig) -> None:
    """Save the user's `ir_op_priority` and disabled passes, before vLLM changes both."""
    entry = carried_entry(vllm_config)
    if "user" not in entry:
        entry["user"] = merged(lambda each: each.note_user(vllm_config))
