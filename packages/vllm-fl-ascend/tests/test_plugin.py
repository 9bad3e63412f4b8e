"""The plugin as core meets it: what it imports, when it is available, what its policy file says."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vllm_fl import BackendImplKind
from vllm_fl.contracts import contracts
from vllm_fl.settings.loading import load_settings
from vllm_fl_ascend import npu, plugin
from vllm_fl_ascend.plugin import POLICY, policy, register_ops


def test_the_installed_entry_point_is_this_plugin() -> None:
    (entry,) = distribution("vllm-fl-ascend").entry_points.select(group="vllm_fl.plugin")
    assert entry.name == "ascend"
    assert entry.load() is plugin


def alone(code: str) -> str:
    """What `code` prints in a process without the emulation, as on a machine without CANN."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k not in ("VLLM_FL_PLUGIN_MODULES",)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hooks_import_neither_vllm_nor_torch_npu() -> None:
    code = (
        "import sys, vllm_fl_ascend.plugin as p\n"
        "p.register_ops(); p.attention_backend(); p.device().detection(); p.policy('ascend')\n"
        "heavy = ('vllm', 'triton', 'torch_npu')\n"
        "print([n for n in sys.modules if n.partition('.')[0] in heavy])"
    )
    assert alone(code) == "[]"


def test_without_torch_npu_everything_says_what_to_install() -> None:
    code = (
        "import vllm_fl_ascend.plugin as p\n"
        "found = [i.availability() for i in (*p.register_ops(), *p.attention_backend())]\n"
        "print(*{*found, p.device().detection()}, sep='|')"
    )
    (reason,) = alone(code).split("|")
    assert reason.startswith("torch-npu is not installed")
    assert 'pip install "vllm-fl-ascend[torch-npu]"' in reason


def without(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """`import torch_npu` fails so."""
    real = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch_npu":
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)


@pytest.mark.parametrize("kind", [ImportError, RuntimeError, OSError])
def test_where_cann_is_missing_the_reason_is_kept(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    without(monkeypatch, kind("libhccl.so: cannot open shared object file"))
    reason = npu.available()
    assert reason is not True
    assert "torch_npu 2.13.0 does not load: libhccl.so: cannot open" in reason
    assert "set_env.sh" in reason
    assert plugin.PROFILE.detection() == reason


def test_where_metadata_is_missing_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    without(monkeypatch, AssertionError("torch_npu was imported"))
    monkeypatch.setattr(npu, "version", version)
    assert "not installed" in str(npu.available())


def test_a_host_without_an_npu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(torch.npu), "is_available", lambda self: False)
    assert "torch_npu 2.13.0 sees no NPU" in str(npu.available())


def test_with_an_npu_everything_is_available() -> None:
    assert npu.available() is True
    assert plugin.PROFILE.detection() is True
    assert all(impl.is_available() for impl in register_ops())


def test_identity() -> None:
    impls = {impl.op_name: impl for impl in register_ops()}
    assert impls and set(impls) <= set(contracts())
    for impl in (*impls.values(), *plugin.attention_backend()):
        assert (impl.impl_id, impl.vendor) == ("vendor.ascend", "ascend")
        assert impl.kind is BackendImplKind.VENDOR
    assert not any(impl.traceable for impl in impls.values())


def test_policy_is_for_ascend_alone() -> None:
    assert policy("cuda") is None
    defaults = policy("ascend")
    assert defaults is not None
    assert Path(defaults.path) == POLICY


def test_policy_orders_ops_that_there_are_and_shuts_no_kind_out() -> None:
    orders = yaml.safe_load(POLICY.read_text("utf-8"))["op_backends"]
    assert set(orders) <= {*contracts(), "attention_backend"}
    for op, tokens in orders.items():
        assert set(tokens) == {"flagos", "vendor", "reference"}
        assert tokens[0] == ("flagos" if op in ("silu_and_mul", "gelu_and_mul") else "vendor")


def test_every_group_of_blacklisted_ops_has_a_reason() -> None:
    lines = POLICY.read_text("utf-8").split("flagos_blacklist:\n")[1].splitlines()
    assert lines[0].startswith("  # ")
    assert all(line.startswith(("  # ", "  - ")) for line in lines)


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
