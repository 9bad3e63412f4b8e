"""What workers on other nodes receive before their engine's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_fl.integration.carried import carry_startup
from vllm_fl.settings.loading import STARTUP


def test_variables_read_before_the_configuration_are_carried_and_the_users_stay() -> None:
    env = {spec.variable: "1" for spec in STARTUP.values()}
    config: Any = SimpleNamespace(use_ray=True, ray_runtime_env=None)
    carry_startup(config, {**env, "VLLM_FL_PREFER": "vendor", "HOME": "/"})
    assert config.ray_runtime_env == {"env_vars": env}
    assert "VLLM_FL_PLUGIN_MODULES" in env and "VLLM_FL_PLATFORM" in env
    theirs = {"working_dir": "/w", "env_vars": {"VLLM_FL_LOG_LEVEL": "ERROR", "A": "b"}}
    config.ray_runtime_env = theirs
    carry_startup(config, {"VLLM_FL_LOG_LEVEL": "DEBUG", "VLLM_FL_PLUGINS": "acme"})
    all_of_them = {"VLLM_FL_LOG_LEVEL": "ERROR", "A": "b", "VLLM_FL_PLUGINS": "acme"}
    assert config.ray_runtime_env == {"working_dir": "/w", "env_vars": all_of_them}
    assert theirs["env_vars"] == {"VLLM_FL_LOG_LEVEL": "ERROR", "A": "b"}, "not written into"
