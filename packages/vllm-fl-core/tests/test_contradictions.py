"""Behaviour in which vllm-plugin-FL contradicts its documentation, and vllm-fl follows it.

One test per number of the table in docs/migration.md.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
from builders import PLUGIN_SETTINGS, X, failing, found, half, registry_with_settings, silu, started

from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.startup import read_settings
from vllm_fl.errors import CallError, SettingsError
from vllm_fl.plugins.discovery import discover
from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.setting import PolicyDefaults
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings import loading
from vllm_fl.settings.loading import load_startup
from vllm_fl.settings.policy import SelectionPolicy
from vllm_fl.settings.schema import Settings

load_settings = partial(loading.load_settings, plugins=PLUGIN_SETTINGS)
OP = "silu_and_mul"

IDS = ("default.flagos", "vendor.acme", "vendor.cuda", "reference.torch")


def manager(settings: Settings, *impls: OpImpl) -> OpManager:
    """A manager that started with these settings and implementations."""
    return started(registry_with_settings(*(impls or map(silu, IDS))), settings=settings)


def platform(path: Path, text: str) -> list[tuple[str, Path]]:
    path.write_text(dedent(text))
    return [("vllm-fl-cuda 0.1.0", path)]


def test_01_strict_fails_and_not_strict_falls_back() -> None:
    broken = failing("default.flagos", ValueError("boom"))
    strict = manager(load_settings({"VLLM_FL_STRICT": "1"}), broken, silu("reference.torch"))
    with pytest.raises(ValueError, match="boom"):
        strict.call(OP, X)
    lenient = manager(load_settings({"VLLM_FL_STRICT": "0"}), broken, silu("reference.torch"))
    assert lenient.call(OP, X).shape == (2, 4)
    assert lenient.fallbacks[OP, "reference.torch"] == 1


def test_02_strict_in_a_platform_file_counts(tmp_path: Path) -> None:
    files = platform(tmp_path / "cuda.yaml", "strict: true\n")
    assert load_settings({}, platform="cuda", platform_files=files).policy.strict
    env = {"VLLM_FL_STRICT": "0"}
    assert not load_settings(env, platform="cuda", platform_files=files).policy.strict


def test_03_blacklists_in_the_users_file_count(tmp_path: Path) -> None:
    path = tmp_path / "fl.yaml"
    path.write_text(f"flagos_blacklist: [{OP}, mm]\noot_blacklist: [FusedMoE]\n")
    settings = load_settings({"VLLM_FL_CONFIG": str(path)})
    assert settings["flagos_blacklist"].value == (OP, "mm")
    assert settings.oot_blacklist == ("FusedMoE",)
    trace = manager(settings).trace(OP)
    assert ("default.flagos", "flagos_blacklist") in trace.rejected


def test_04_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "none.yaml")
    with pytest.raises(SettingsError, match=r"none\.yaml.*does not exist") as caught:
        load_settings({"VLLM_FL_CONFIG": path})
    assert caught.value.key == "config"
    assert caught.value.origin == "environment VLLM_FL_CONFIG"


def test_05_a_preference_excludes_nobody_and_reorders_a_platforms_lists(tmp_path: Path) -> None:
    files = platform(tmp_path / "cuda.yaml", f"op_backends:\n  {OP}: [flagos, vendor, reference]\n")
    env = {"VLLM_FL_PREFER": "vendor"}
    for listed in ([], files):
        settings = load_settings(env, platform="cuda", platform_files=listed)
        ids = [i.impl_id for i in manager(settings).resolve_candidates(OP)]
        assert ids == ["vendor.acme", "vendor.cuda", "default.flagos", "reference.torch"]
        assert settings["use_flaggems"].value


def test_06_an_unknown_preference_is_an_error_and_changes_nothing() -> None:
    with pytest.raises(SettingsError, match="'cuda'") as caught:
        load_settings({"VLLM_FL_PREFER": "cuda"})
    assert caught.value.key == "prefer"


@pytest.mark.parametrize("name", ["register_builtins", "vllm_fl_register", "register"])
def test_07_a_module_with_the_documented_function_is_a_plugin(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"older_{name}"
    (tmp_path / f"{module}.py").write_text(
        dedent(f"""
        from vllm_fl.plugins.types import BackendImplKind, BackendPriority, OpImpl

        def {name}(registry):
            registry.register_many([OpImpl(
                op_name="silu_and_mul", impl_id="vendor.acme", kind=BackendImplKind.VENDOR,
                fn=lambda x: x, vendor="acme", priority=BackendPriority.VENDOR,
            )])
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = load_startup({"VLLM_FL_PLUGIN_MODULES": module}).plugin_modules
    registry = OpRegistry()
    (plugin,) = load(registry, discover(names)[-1:])
    assert plugin.status == "ok", plugin.error
    assert registry.get_implementation(OP, "vendor.acme") is not None


def test_08_a_platform_file_cannot_shut_third_parties_out(tmp_path: Path) -> None:
    files = platform(tmp_path / "cuda.yaml", "allow_vendors: [cuda]\n")
    with pytest.raises(SettingsError, match="allow_vendors: a plugin's file must not set it"):
        load_settings({}, platform="cuda", platform_files=files)
    settings = load_settings({"VLLM_FL_PREFER": "vendor"}, platform="cuda")
    rivals = silu("vendor.acme", priority=1000), silu("vendor.cuda")
    assert manager(settings, *rivals).get_selected_impl_id(OP) == "vendor.acme"


def test_09_a_platform_file_is_found_by_every_name_of_its_platform(tmp_path: Path) -> None:
    path = tmp_path / "npu.yaml"
    path.write_text("prefer: vendor\n")
    policy = hookimpl(lambda platform: PolicyDefaults(path) if platform == "ascend" else None)
    registry = OpRegistry()
    load(registry, [found("fl-npu", SimpleNamespace(policy=policy), "backend")])
    for name in ("ascend", "npu", "NPU"):
        env = {"VLLM_FL_PLATFORM": name}
        assert read_settings(registry, env).policy.prefer == "vendor"
    assert read_settings(registry, {}, platform="cuda").policy.prefer == "flagos"


def test_10_the_documented_vendor_and_platform_names_are_the_ones() -> None:
    settings = load_settings({"VLLM_FL_PER_OP": f"{OP}=vendor:cuda"}, platform="nvidia")
    assert settings.platform == "cuda"
    assert manager(settings).get_selected_impl_id(OP) == "vendor.cuda"
    forced = load_settings({"VLLM_FL_PLATFORM": "nvidia"}, platform="cpu")
    assert (forced.platform, forced["platform"].origin) == ("cuda", "environment VLLM_FL_PLATFORM")


def test_11_a_contracts_op_in_the_blacklist_is_kept_from_flaggems_and_said() -> None:
    settings = load_settings({"VLLM_FL_FLAGOS_BLACKLIST": f"{OP},to_copy"})
    made = manager(settings)
    assert ("default.flagos", "flagos_blacklist") in made.trace(OP).rejected
    assert made.get_selected_impl_id(OP) == "vendor.acme"
    assert f"flagos_blacklist.{OP}" in settings.unchecked


def test_12_a_forked_child_registers_nothing_twice() -> None:
    made = manager(load_settings({}))
    child = os.fork()
    if child == 0:
        registered = made.registry.get_implementations(OP)
        os._exit(made.call(OP, X).shape != (2, 4) or len(registered) != len(IDS))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_13_a_callers_mistake_harms_no_later_call() -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] % 2:
            raise RuntimeError("odd")
        return half(x)

    made = manager(load_settings({}), *(silu(impl_id, fn=silu_and_mul) for impl_id in IDS))
    with pytest.raises(CallError) as caught:
        made.call(OP, torch.ones(2, 7))
    assert caught.value.argument == "x"
    with pytest.raises(TypeError, match="'x'"):
        made.call(OP)
    assert not made.demotions
    assert made.call(OP, X).shape == (2, 4)
    made.set_policy(SelectionPolicy(prefer="reference"))
    assert made.call(OP, X).shape == (2, 4)


def test_14_a_slip_in_a_name_or_token_is_said_when_settings_are_read() -> None:
    env = {"VLLM_FL_PER_OP": "rms_nrom=vendor"}
    settings = read_settings(OpRegistry(), env, platform="cpu")
    assert any("Did you mean 'rms_norm'?" in warning for warning in settings.warnings)
    with pytest.raises(SettingsError, match="Did you mean 'vendor'") as caught:
        load_settings({"VLLM_FL_PER_OP": "rms_norm=vender"})
    assert caught.value.op == "rms_norm"
