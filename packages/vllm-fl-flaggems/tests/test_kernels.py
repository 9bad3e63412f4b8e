"""Which FlagGems kernels are launched directly, and the fallback for unknown ones."""

from __future__ import annotations

import ast
import logging
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_fl_flaggems import kernels, loading

NORM = "rms_norm_kernel"


@pytest.fixture(autouse=True)
def clear_cache() -> Iterator[None]:
    """Clear the cached lookup before and after each test."""
    kernels.launchable.cache_clear()
    yield
    kernels.launchable.cache_clear()


def holding(monkeypatch: pytest.MonkeyPatch, parameters: str | None, vendor: str) -> Any:
    """Emulate FlagGems with one kernel of these parameters; return the kernel."""
    gems = types.SimpleNamespace(vendor_name=vendor, __version__="5.1.0")
    monkeypatch.setattr(loading, "loaded", [gems])
    module, _ = kernels.KERNELS[NORM]
    kernel = types.SimpleNamespace(arg_names=(parameters or "").split())
    held = {} if parameters is None else {NORM: types.SimpleNamespace(jit_function=kernel)}
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**held))  # type: ignore[arg-type]
    return kernel


def test_only_known_kernels_of_the_known_vendor_are_launched_as_triton_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = holding(monkeypatch, kernels.KERNELS[NORM][1], "nvidia")
    assert kernels.launchable(NORM) is kernel
    kernels.launchable.cache_clear()
    holding(monkeypatch, kernels.KERNELS[NORM][1], "metax")
    assert kernels.launchable(NORM) is None


@pytest.mark.parametrize("parameters", ["out_ptr in_ptr w_ptr N eps BLOCK_SIZE", None])
def test_another_releases_kernel_is_left_to_its_public_function(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parameters: str | None
) -> None:
    holding(monkeypatch, parameters, "nvidia")
    with caplog.at_level(logging.INFO, logger="vllm_fl"):
        assert kernels.launchable(NORM) is None
        assert kernels.launchable(NORM) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "FlagGems 5.1.0" in said and NORM in said


def test_the_installed_flaggems_has_the_kernels_that_are_known() -> None:
    spec = loading.find_spec("flag_gems")
    if spec is None or spec.origin is None:
        pytest.skip("FlagGems is not installed")
    for name, (module, parameters) in kernels.KERNELS.items():
        path = Path(spec.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
        functions = {
            node.name: " ".join(arg.arg for arg in node.args.args)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        # FlagGems generates the wrapper of an elementwise function only at run time.
        assert functions[name] == ("x y" if parameters is kernels._POINTWISE else parameters)


BASE = torch.arange(4096, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((5, 3, 16), (96, 16, 1), 0),  # heads of a projection
        ((5, 3, 16), (96, 16, 1), 48),
        ((5, 3, 16), (96, 16, 1), 47),  # begins between two 8-byte words
        ((5, 3, 15), (96, 16, 1), 0),
        ((5, 3, 16), (97, 16, 1), 0),
        ((5, 3, 16), (96, 32, 2), 0),
        ((5, 3, 16), (0, 16, 1), 0),
        ((0, 3, 16), (96, 16, 1), 0),
        ((16,), (3,), 0),
        ((), (), 7),
    ],
)
def test_a_contiguous_copy_holds_the_same(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    x = BASE.to(dtype).as_strided(size, stride, offset)
    copy = kernels.contiguous(x)
    assert copy.is_contiguous() and copy.dtype == dtype
    assert torch.equal(copy, x)
    assert kernels.contiguous(copy) is copy


NUMBERS = dict.fromkeys(("outputs", "features", "weight_step"), "i32")
ONE_ROW_SIZES = {"ROWS": 2, "BLOCK": 1024, "WHOLE_ROWS": False, "WHOLE_BLOCKS": False}
ROWS_SIZES = {"TOKENS": 16, "ROWS": 64, "BLOCK": 256, "STAGES": 4}


@pytest.mark.parametrize("is_one_row", [True, False])
@pytest.mark.parametrize(("bits", "gated"), [(16, ""), (8, ""), (16, "silu"), (16, "gelu_tanh")])
def test_a_kernel_that_begins_early_touches_nothing_before_it_has_waited(
    is_one_row: bool, bits: int, gated: str
) -> None:
    """Compiled for a Hopper GPU, without one; without EARLY no kernel waits."""
    from vllm_fl_flaggems import triton_kernels

    of = "bf16" if bits == 16 else "fp8e4nv"
    parameters = NUMBERS | {"weight_ptr": f"*{of}", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    scales = ("x_scale_ptr", "weight_scale_ptr")
    parameters |= dict.fromkeys(scales, "*fp32") if bits == 8 else {}
    sizes: dict[str, Any] = dict.fromkeys(scales) if bits == 16 else {}
    if is_one_row:
        kernel = triton_kernels.linear_of_one_row_kernel
        parameters |= {"x_ptr": f"*{of}"}
        sizes |= ONE_ROW_SIZES | {"PER_OUTPUT": bits == 8}
    else:
        kernel = triton_kernels.linear_kernel
        blocks = {"x": f"tensordesc<{of}[16,256]>", "weight": f"tensordesc<{of}[64,256]>"}
        parameters |= blocks | {"tokens": "i32"}
        sizes |= ROWS_SIZES | {"PER_TOKEN": bits == 8, "PER_OUTPUT": bits == 8}

    def instructions(early: int) -> list[str]:
        constants = sizes | {"EARLY": early, "GATED": gated}
        source = ASTSource(kernel, parameters | dict.fromkeys(constants, "constexpr"), constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        wanted = re.compile(
            r"griddepcontrol\.\w+|prefetch|\b(?:ld|st)\.global|cp\.async\.bulk\.\w+"
        )
        return wanted.findall(made.asm["ptx"])

    early = instructions(4)
    (waits,) = (at for at, name in enumerate(early) if name == "griddepcontrol.wait")
    assert early[waits + 1] == "griddepcontrol.launch_dependents"
    assert set(early[:waits]) <= {"prefetch"}
    assert not {"prefetch", "griddepcontrol.wait"} & set(instructions(0))
