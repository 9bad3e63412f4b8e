"""The plugin as core uses it: imports, availability, policy file."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
import yaml
from plugin_checks import PluginChecks, alone

from vllm_fl.settings.loading import load_settings
from vllm_fl_ascend import npu, plugin
from vllm_fl_ascend.plugin import POLICY, register_ops


class TestPlugin(PluginChecks):
    plugin, impl_id, vendor = plugin, "vendor.ascend", "ascend"
    platforms, asks = ("ascend",), True


def test_without_torch_npu_everything_says_what_to_install() -> None:
    code = (
        "import vllm_fl_ascend.plugin as p\n"
        "found = [i.availability() for i in (*p.register_ops(), *p.attention_backend())]\n"
        "print(*{*found, p.device().detection()}, sep='|')"
    )
    (reason,) = alone(code).split("|")
    assert reason.startswith("torch-npu is not installed")
    assert 'pip install "vllm-fl-ascend[torch-npu]"' in reason


@pytest.mark.parametrize("kind", [ImportError, RuntimeError, OSError])
def test_where_cann_is_missing_the_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    real = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch_npu":
            raise kind("libhccl.so: cannot open shared object file")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    reason = str(npu.available())
    assert "torch_npu 2.13.0 does not load: libhccl.so: cannot open" in reason
    assert "set_env.sh" in reason
    assert plugin.PROFILE.detection() == reason


def test_a_host_without_an_npu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(torch.npu), "is_available", lambda self: False)
    assert "torch_npu 2.13.0 finds no NPU" in str(npu.available())


def test_with_an_npu_everything_is_available() -> None:
    assert npu.available() is True
    assert plugin.PROFILE.detection() is True
    assert all(impl.is_available() for impl in register_ops())


def test_policy_prefers_flagos_for_two_activations_only() -> None:
    orders = yaml.safe_load(POLICY.read_text("utf-8"))["op_backends"]
    for op, tokens in orders.items():
        assert tokens[0] == ("flagos" if op in ("silu_and_mul", "gelu_and_mul") else "vendor")


def test_policy_loads_for_both_names_of_the_platform() -> None:
    files = [("vllm-fl-ascend", POLICY)]
    for env in ({}, {"VLLM_FL_PLATFORM": "npu"}):
        shipped = load_settings(env, platform="ascend", platform_files=files)
        assert shipped.platform == "ascend"
        assert str(shipped.policy.order("rms_norm", "eager")[0]) == "vendor"
        assert str(shipped.policy.order("silu_and_mul", "eager")[0]) == "flagos"
        assert {"to_copy", "zeros", "mm"} <= set(shipped["flagos_blacklist"].value)
        assert shipped.warnings == ()
    asked = load_settings({"VLLM_FL_PREFER": "vendor"}, platform="ascend", platform_files=files)
    assert str(asked.policy.order("silu_and_mul", "eager")[0]) == "vendor"
