"""What workers on other nodes receive before their engine's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_fl.integration.carried import carry_startup
from vllm_fl.settings.loading import STARTUP


def parallel(runtime_env: Any = None, *, ray: bool = True) -> Any:
    return SimpleNamespace(use_ray=ray, ray_runtime_env=runtime_env)


def test_every_variable_that_is_read_before_the_configuration_is_carried() -> None:
    env = {spec.variable: "1" for spec in STARTUP.values()}
    config = parallel()
    carry_startup(config, {**env, "VLLM_FL_PREFER": "vendor", "HOME": "/"})
    assert config.ray_runtime_env == {"env_vars": env}
    assert "VLLM_FL_PLUGIN_MODULES" in env and "VLLM_FL_PLATFORM" in env


def test_the_users_setting_of_ray_stays() -> None:
    theirs = {"working_dir": "/w", "env_vars": {"VLLM_FL_LOG_LEVEL": "ERROR", "A": "b"}}
    config = parallel(theirs)
    carry_startup(config, {"VLLM_FL_LOG_LEVEL": "DEBUG", "VLLM_FL_PLUGINS": "acme"})
    assert config.ray_runtime_env == {
        "working_dir": "/w",
        "env_vars": {"VLLM_FL_LOG_LEVEL": "ERROR", "A": "b", "VLLM_FL_PLUGINS": "acme"},
    }
    assert theirs["env_vars"] == {"VLLM_FL_LOG_LEVEL": "ERROR", "A": "b"}, "not written into"
