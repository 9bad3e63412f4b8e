"""The emulation rejects what torch_npu rejects; the other tests rely on it."""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path

import emulated
import pytest
import torch
from emulated import operators, wheel

USED = (
    *("npu_swiglu", "npu_geglu", "npu_clipped_swiglu", "npu_fast_gelu", "npu_rms_norm"),
    *("npu_add_rms_norm", "npu_mrope", "npu_attention_update"),
)


@pytest.mark.parametrize("name", USED)
def test_a_schema_is_that_of_the_compiled_library(name: str) -> None:
    """libtorch_npu.so contains the YAML's schema verbatim, with its `self` renamed."""
    schema = next(s for s in wheel.schemas() if s.startswith(f"{name}("))
    assert wheel.compiled(schema)
    assert torch._C.parse_schema(f"npu::{schema}") == getattr(torch.ops.npu, name).default._schema


def test_a_wrong_keyword_is_the_dispatcher_s_error() -> None:
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps'"):
        torch.ops.npu.npu_rms_norm(torch.ones(2, 4), torch.ones(4), eps=1e-6)


def test_an_operator_without_numerics_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="npu::npu_silu"):
        torch.ops.npu.npu_silu(torch.ones(2))


def test_numerics_that_the_meta_function_does_not_bear_out_are_an_error() -> None:
    for wrong in (torch.ones(2, 4), torch.ones(2, 2).half(), (torch.ones(2, 2),) * 2):
        with pytest.raises(emulated.EmulationError, match="its meta function says"):
            operators._compare("npu_swiglu", wrong, torch.ones(2, 2, device="meta"))


def test_nothing_of_torch_npu_is_loaded() -> None:
    assert getattr(sys.modules["torch_npu"], "__file__", None) is None
    maps = Path("/proc/self/maps")
    assert not maps.exists() or "torch_npu" not in maps.read_text()
    assert not distribution("torch-npu").entry_points  # they would load torch_npu with torch
