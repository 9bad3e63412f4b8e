"""Examples in the documentation of vllm-plugin-FL: every YAML and every shell line loads."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import pytest
from builders import PLUGIN_SETTINGS

from vllm_fl.settings import loading
from vllm_fl.settings.loading import load_startup, policy_from_config
from vllm_fl.settings.names import check_names
from vllm_fl.settings.policy import OpOrder

load_settings = partial(loading.load_settings, plugins=PLUGIN_SETTINGS)
SEEDS = Path(__file__).parent / "seeds"
OPS = ("silu_and_mul", "gelu_and_mul", "rms_norm", "rotary_embedding", "attention_backend")


def test_user_file_sets_every_item() -> None:
    settings = load_settings({"VLLM_FL_CONFIG": str(SEEDS / "user.yaml")})
    policy = settings.policy
    assert policy.prefer == "vendor"
    assert policy.strict is False
    assert policy.allow_vendors == {"cuda"}
    assert policy.deny_vendors == {"ascend"}
    assert list(map(str, policy.order("rms_norm"))) == ["vendor", "flagos"]
    assert list(map(str, policy.order("silu_and_mul"))) == ["vendor:cuda", "flagos", "reference"]
    assert settings["flagos_blacklist"].value == ("to_copy", "zeros", "mm")
    assert settings.oot_blacklist == ("fused_moe",)
    assert settings.warnings == ()
    assert policy_from_config(SEEDS / "user.yaml") == policy


def test_op_that_no_contract_names_is_kept_and_unchecked() -> None:
    settings = load_settings({"VLLM_FL_CONFIG": str(SEEDS / "op_backends.yaml")})
    settings = check_names(settings, op=OPS, vendor=())
    assert settings.policy.per_op_order["mul"] == OpOrder.of("flagos")
    assert settings.unchecked == ("op_backends.mul",)
    assert settings.warnings == ()


@pytest.mark.parametrize("line", (SEEDS / "shell.txt").read_text().splitlines())
def test_shell_line_loads(line: str, tmp_path: Path) -> None:
    export, assignment = shlex.split(line, comments=True)
    assert export == "export"
    name, _, value = assignment.partition("=")
    if name == "VLLM_FL_CONFIG":
        path = tmp_path / Path(value).name
        path.write_text((SEEDS / "user.yaml").read_text())
        value = str(path)
    settings = load_settings({name: value}, platform="cuda")
    assert any(setting.origin == f"environment {name}" for setting in settings.values()) or (
        name == "VLLM_FL_PER_OP"
        and settings["op_backends.rms_norm"].origin == "environment VLLM_FL_PER_OP"
    )
    assert settings.warnings == ()


def test_environment_overrides_one_item_of_the_platform() -> None:
    files = [("vllm-fl-ascend 0.1.0", SEEDS / "ascend.yaml")]
    env = {"VLLM_FL_PREFER": "vendor"}
    settings = load_settings(env, platform="npu", platform_files=files)
    assert settings.policy.prefer == "vendor"
    assert settings["flagos_blacklist"].value == ("to_copy", "zeros", "mm")

    env["VLLM_FL_FLAGOS_BLACKLIST"] = "custom_op1,custom_op2"
    settings = load_settings(env, platform="npu", platform_files=files)
    assert settings["flagos_blacklist"].value == ("custom_op1", "custom_op2")


def test_defaults_are_those_of_the_table() -> None:
    settings = load_settings({})
    assert settings.enabled is True
    assert settings.platform is None
    assert settings.policy.prefer == "flagos"
    assert settings.policy.strict is False
    assert settings.policy.allow_vendors is None
    assert settings.policy.deny_vendors == frozenset()
    assert settings["use_flaggems"].value is True
    assert settings.oot_enabled is True
    assert settings.log_level == "INFO"
    assert settings.debug is False
    assert settings.preflight == "verify"
    assert settings.flagcx_path is None
    assert settings["oplist_path"].value == "/tmp/flaggems_enable_oplist.txt"
    assert load_startup({}).plugins is None
