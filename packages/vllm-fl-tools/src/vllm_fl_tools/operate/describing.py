"""Describes what an engine would run, before verification.

Workers and verbs use the same functions. A worker uses its configuration, and a verb uses the
configuration that vLLM makes from the same arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.compat import obstacle
from vllm_fl.integration.models import completed, import_models
from vllm_fl.integration.planning import facts_of, plan_for
from vllm_fl.integration.platform import is_overlay
from vllm_fl.settings.loading import load_startup
from vllm_fl.settings.policy import Mode

from . import locking
from .described import Described

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def describe_any(mode: Mode) -> Described:
    """Describe an engine of an unknown model: every op is planned.

    Raises like `describe_engine`.
    """
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    eager = {"mode": CompilationMode.NONE} if mode == "eager" else {}
    return describe_engine(VllmConfig(compilation_config=CompilationConfig(**eager)))


def stands_aside() -> str:
    """Return why engines of this process run stock vLLM; empty if they use vllm-fl.

    Call it after vLLM has loaded its plugins.

    Raises:
        SettingsError: a startup variable is invalid.
    """
    from vllm.platforms import current_platform

    startup = load_startup()
    if not startup.enabled:
        return startup["enabled"].named
    if (problem := obstacle()) is not None:
        return problem
    if not is_overlay(current_platform):
        return "vLLM has not loaded vllm-fl (`vllm-fl doctor` shows why)"
    return ""


def describe_engine(config: VllmConfig) -> Described:
    """Describe the engine that would start on this machine with vLLM's configuration.

    Raises:
        SettingsError: a setting is invalid, and the engine would not start.
        PluginError: as at startup.
    """
    import torch
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    if aside := stands_aside():
        compiled = config.compilation_config.mode not in (None, CompilationMode.NONE)
        mode: Mode = "compiled" if compiled else "eager"
        settings = get_default_manager().settings
        assert settings is not None  # the default manager always loads settings
        model = config.model_config
        facts = EngineFacts(settings, mode, dtype=model.dtype if model else None)
        return Described(facts, Plan(mode, {}), aside=aside, config=config)
    import_models(config)
    facts, layers = completed(facts_of(config), config)
    device = torch.device(current_platform.device_type)
    differs: list[str] = []
    if (locked := facts.settings.locked) is not None:
        differs = locking.lock_differences(locked, locking.facts_of_lock(facts, config, device))
    return Described(facts, plan_for(facts), layers, differs=tuple(differs), config=config)
