"""From vLLM's configuration to the plan, and what of the configuration the plan changes."""

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
from ..plugins.types import NAMED_CLASSES
from ..settings.names import check_names
from ..settings.schema import Settings
from .carried import KEY, entry_of, is_sealed
from .compat import hide_our_variables
from .compat import lacks as lacks_names
from .graphs import ranges
from .patching import PATCHERS, by_range, merged, why_not
from .targets import installed_bindings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = get_logger("engine")


def facts_of(vllm_config: VllmConfig) -> EngineFacts:
    """What an engine's configuration says now. vLLM completes it step by step.

    A worker, whose configuration is complete, asks once and keeps the answer.

    Raises:
        SettingsError: a setting is wrong; the engine must not start with another meaning.
        PluginError: this process has loaded other plugins already than the settings allow.
    """
    from vllm import envs
    from vllm.config import CompilationMode

    try:
        settings = _settings_of(vllm_config)
    except InvalidSettingError as error:
        # vLLM's configuration is pydantic's, which dresses a ValueError up as an error of its own.
        # It says all that the first one does, whose traceback would only stand above it.
        raise SettingsError(
            error.message, key=error.key, origin=error.origin, op=error.op, code=error.code
        ) from None
    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    backend = vllm_config.attention_config.backend
    entry = entry_of(vllm_config)
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
            if model and lacks(vllm_config, op, binding)
        ),
        captured=tuple(compilation.cudagraph_capture_sizes or ()),
        by_range=ranges.is_compiled_by_range(vllm_config),
        device=device_name() if settings.by_device or settings.tuned else "",
        **entry.get("user", {}),
        **requests,
    )
    return facts.with_checked_table()


def device_name() -> str:
    """Return the name of vLLM's device, without opening it; empty if the platform has none."""
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except Exception as error:  # platforms are anybody's
        log.debug("the platform does not tell its device: %s", error)
        return ""


def lacks(vllm_config: VllmConfig, op: str, binding: Binding) -> bool:
    """Whether the served model cannot have the op."""
    try:
        return binding.when is not None and not binding.when(vllm_config)
    except Exception as error:  # configurations are the models' own, and anything may lack
        log.debug("the model's configuration does not tell whether it has %s: %s", op, error)
        return False


def _settings_of(vllm_config: VllmConfig) -> Settings:
    """The engine's settings: read once, where its configuration is made.

    They travel with `additional_config`, so that a worker that does not inherit the environment has
    them too, and so that two engines of one process have each their own. A process that could not
    read settings of its own takes the engine's over.
    """
    from vllm.platforms import current_platform

    settings = load_plugins(vllm_config)
    manager = get_default_manager()
    startup = manager.startup
    assert startup is not None  # the default manager finds its own plugins
    if settings is None:
        if is_sealed(vllm_config):
            return startup.settings  # the engine's own are gone, and its files may be: ask neither
        entry = entry_of(vllm_config)
        settings = _read_settings(current_platform.vllm_fl_platform, entry.orders)
        _check_loaded(settings)
        entry.settings = settings
    if startup.problem is not None:
        manager.use_startup(replace(startup, settings=settings, problem=None), manager.registry)
    return settings


def load_plugins(vllm_config: VllmConfig) -> Settings | None:
    """Load the plugins, once per process: those that its engine's settings allow, if it has them.

    What is wrong with the settings of a process of its own is raised where they are needed: a
    worker's come with its engine's configuration, and its files may be gone.

    The variables that the plugins declare are made known to vLLM, as core's own were before.

    Returns:
        The engine's settings, where its configuration has them.

    Raises:
        PluginError: this process has loaded others already.
    """
    from vllm.platforms import current_platform

    settings = entry_of(vllm_config).settings
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
    """An engine must not run with plugins that its settings leave out, nor without others."""
    startup = get_default_manager().startup
    if startup is None or startup.loaded_under(settings):
        return

    def told(allowed: Sequence[str] | None, modules: Sequence[str]) -> str:
        names = "all" if allowed is None else ",".join(allowed) or "none"
        return f"{names} and modules {','.join(modules) or 'none'}"

    raise PluginError(
        "vllm-fl: this process has loaded its plugins by VLLM_FL_PLUGINS "
        f"({told(startup.allowed, startup.modules)}), but its engine's configuration allows "
        f"{told(settings.plugins, settings.plugin_modules)}. Set VLLM_FL_PLUGINS and "
        "VLLM_FL_PLUGIN_MODULES alike wherever a process of one engine runs, and before the first "
        "use: a plugin's device, and what a script called before, are found by the environment.",
        plugin="fl",
    )


def _read_settings(platform: str, orders: Mapping[str, object]) -> Settings:
    """The settings of an engine that is being configured, its layers' names checked too."""
    registry = get_default_manager().registry
    settings = read_settings(registry, platform=platform, orders=orders)
    if not settings.oot_enabled:
        log.info("vllm-fl is off for layers: %s (environment)", settings["oot_enabled"].named)
    listed = {*(settings.oot_whitelist or ()), *settings.oot_blacklist}
    layers = frozenset[str]()
    for patcher in PATCHERS:
        if not layers or not layers.issuperset(listed):  # the later ones read vLLM's source
            layers |= patcher.layer_names()
    return check_names(
        settings,
        op={*registry.snapshot().ops, *NAMED_CLASSES},
        layer=layers,
        bindings=installed_bindings(),
    )


def plan_for(
    facts: EngineFacts,
    demoted: Mapping[tuple[str, str], str] | None = None,
) -> Plan:
    """The plan of an engine. What the user told vLLM stands.

    Args:
        facts: what the engine's configuration says.
        demoted: (op, impl id) -> why it is demoted for this engine, or rejected by what the start
            has measured.
    """
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
    """Refuse an engine if nothing here does what its settings ask for.

    Raises:
        StartError: nothing verifies what is planned, or nothing reads a setting.
    """
    startup, settings = get_default_manager().startup, facts.settings
    plugins = startup.plugins if startup else ()
    why = unread({key: each.value for key, each in settings.items()}, plugins)
    if why is None and unverified(settings.preflight, plugins, plans_others=True):
        entries = plan_for(facts).entries.values()
        others = any(impls for entry in entries for _, impls in entry.candidates)
        why = unverified(settings.preflight, plugins, plans_others=others)
    if why is not None:
        raise StartError(f"vllm-fl ends the start: {why}")


def plan_now() -> Plan | None:
    """The plan of the configuration that is current in vLLM, before a worker has made its own.

    None for one that was not made on our platform: an overlay in place may come later than a
    configuration that a script has made by hand.
    """
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    extra = vllm_config.additional_config
    if isinstance(extra, dict) and KEY not in extra:
        return None
    return plan_for(facts_of(vllm_config))


def apply(plan: Plan, vllm_config: VllmConfig) -> None:
    """Turn on the custom ops whose implementation is ours, and off those that we turned on before.

    The same for the passes that find an op of ours, and for where vLLM's ranges are split. The
    others stay as vLLM and the user have them.
    """
    custom_ops = vllm_config.compilation_config.custom_ops
    entry = entry_of(vllm_config)
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
    ranges.split(vllm_config, by_range(plan), entry)
    entry["enabled"] = added


def _kept_by_vllm(facts: EngineFacts) -> dict[str, str]:
    """Return op -> why this vLLM has no target for it, lacks a name, or keeps code of its own."""
    placed = {op for patcher in PATCHERS for op in patcher.ops()}
    found, table = {}, installed_bindings()
    for op in get_default_manager().registry.snapshot().contracts:
        binding = table.get(op, Binding())
        if facts.batch_invariant and binding.batch_invariant:
            found[op] = f"VLLM_BATCH_INVARIANT asks for {binding.batch_invariant}"
        elif missing := lacks_names(binding):
            found[op] = f"this vLLM has no {missing}, which its places need"
        elif op not in placed:
            which = "this vLLM" if binding.targets else "vLLM"
            found[op] = f"{which} has no place for it"
    return found


def note_user_priority(vllm_config: VllmConfig) -> None:
    """Keep what the user wrote in `ir_op_priority`, before vLLM appends its defaults to it.

    And which of the passes that find an op of ours he turned off, before vLLM turns off the others.
    """
    entry = entry_of(vllm_config)
    if "user" not in entry:
        entry["user"] = merged(lambda each: each.note_user(vllm_config))
