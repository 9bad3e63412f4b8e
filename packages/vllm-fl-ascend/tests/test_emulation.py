"""The emulation refuses what torch_npu would: without that, the other tests would say little."""

from __future__ import annotations

import math
import sys
from importlib.metadata import distribution
from pathlib import Path

import emulated
import pytest
import torch
from emulated import operators, wheel

USED = (
    "npu_swiglu",
    "npu_geglu",
    "npu_clipped_swiglu",
    "npu_fast_gelu",
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_mrope",
    "npu_attention_update",
)


@pytest.mark.parametrize("name", USED)
def test_a_schema_is_that_of_the_compiled_library(name: str) -> None:
    """The YAML's schema, its `self` renamed, stands word for word in libtorch_npu.so."""
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


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("npu_swiglu", (torch.ones(2, 3),)),
        ("npu_swiglu", (torch.ones(2, 4).double(),)),
        ("npu_geglu", (torch.ones(2, 4), -1, 2)),
        ("npu_clipped_swiglu", (torch.ones(4),)),
        ("npu_clipped_swiglu", (torch.ones(2, 3),)),
        ("npu_clipped_swiglu", (torch.ones(2, 4).double(),)),
        ("npu_clipped_swiglu", (torch.ones(4, 2).T,)),
        ("npu_clipped_swiglu", (torch.ones(0, 4),)),
        ("npu_fast_gelu", (torch.ones(2, 4).double(),)),
        ("npu_fast_gelu", (torch.ones([1] * 9),)),
        ("npu_fast_gelu", (torch.ones(0, 4),)),
        ("npu_attention_update", ([torch.zeros(2)], [torch.ones(2, 12)], 1)),
        ("npu_attention_update", ([torch.zeros(2)], [torch.ones(2, 8)], 2)),
        ("npu_attention_update", ([torch.zeros(2).half()], [torch.ones(2, 8)], 1)),
        ("npu_attention_update", ([torch.full((2,), -math.inf)], [torch.ones(2, 8)], 1)),
        ("npu_attention_update", ([torch.zeros(0)], [torch.ones(0, 8)], 1)),
        ("npu_rms_norm", (torch.ones(4), torch.ones(4))),
        ("npu_rms_norm", (torch.ones(2, 4).half(), torch.ones(4))),
        ("npu_rms_norm", (torch.ones(2, 4), torch.ones(3))),
        ("npu_add_rms_norm", (torch.ones(2, 4), torch.ones(1, 4), torch.ones(4))),
        ("npu_swiglu", (torch.ones(0, 4),)),
        ("npu_geglu", (torch.ones(0, 4),)),
        ("npu_rms_norm", (torch.ones(0, 4), torch.ones(4))),
    ],
)
def test_what_is_not_documented_is_refused(name: str, args: tuple[object, ...]) -> None:
    with pytest.raises(emulated.EmulationError, match=f"{name} takes"):
        getattr(torch.ops.npu, name)(*args)


def test_an_attention_update_is_what_its_documentation_says() -> None:
    """Natural logarithms: two parts whose sums differ by log 3 weigh 1 and 3."""
    lse = [torch.tensor([2.0]), torch.tensor([2.0 + math.log(3)])]
    parts = [torch.full((1, 8), 4.0), torch.full((1, 8), 8.0)]
    out, total = torch.ops.npu.npu_attention_update(lse, parts, 1)
    torch.testing.assert_close(out, torch.full((1, 8), 7.0))
    torch.testing.assert_close(total, torch.tensor([2.0 + math.log(4)]))
    assert torch.ops.npu.npu_attention_update(lse, parts, 0)[1].isnan().all()


def test_a_clipped_swiglu_is_what_its_documentation_says() -> None:
    """y = A * sigmoid(alpha * A) * (B + bias), A at most limit, B from -limit to limit."""
    x = torch.tensor([[9.0, -9.0, -2.0, 3.0]])
    found = torch.ops.npu.npu_clipped_swiglu(x, alpha=0.5, limit=4.0, bias=2.0)
    wanted = [4 / (1 + math.exp(-2)) * -2, -2 / (1 + math.exp(1)) * 5]
    torch.testing.assert_close(found, torch.tensor([wanted]))
    halves = torch.ops.npu.npu_clipped_swiglu(
        x[:, [0, 2, 1, 3]], alpha=0.5, limit=4.0, bias=2.0, interleaved=False
    )
    torch.testing.assert_close(halves, found)


@pytest.mark.parametrize(
    "change",
    [
        {"positions": torch.arange(3).int()},
        {"positions": torch.arange(2)},
        {"query": torch.ones(3, 2, 32)},
        {"query": torch.ones(3, 64).half()},
        {"cos_sin_cache": torch.ones(8, 24)},
        {"cos_sin_cache": torch.ones(8, 64)},
        {"head_size": 24},
        {"rotary_mode": "interleaved"},
        {"mrope_section": [8, 4, 4]},
        {"cache_mode": "interleave"},
        {"key": torch.ones(3, 0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_mrope_cannot_do_is_refused(change: dict[str, object]) -> None:
    sound: dict[str, object] = {
        "positions": torch.arange(3),
        "query": torch.ones(3, 64),
        "key": torch.ones(3, 32),
        "cos_sin_cache": torch.ones(8, 32),
        "head_size": 32,
    }
    torch.ops.npu.npu_mrope(**sound)
    with pytest.raises(emulated.EmulationError, match="npu_mrope takes"):
        torch.ops.npu.npu_mrope(**sound | change)


def test_calls_are_counted_and_an_oracle_s_only_where_nothing_was_raised() -> None:
    checked, compared = emulated.counted(), emulated.counted("oracle")
    with pytest.raises(AssertionError), emulated.against_oracle():
        torch.ops.npu.npu_swiglu(torch.ones(2, 4))
        raise AssertionError
    with emulated.against_oracle():
        torch.ops.npu.npu_swiglu(torch.ones(2, 4))
    assert emulated.counted() - checked == {"npu_swiglu": 2}
    assert emulated.counted("oracle") - compared == {"npu_swiglu": 1}


def test_pytorch_s_own_meta_functions_stay() -> None:
    """The wheel's source replaces two of them, in this process they would be CANN's."""
    image, weight = torch.ones(1, 2, 8, 8, device="meta"), torch.ones(3, 2, 3, 3, device="meta")
    assert torch.nn.functional.conv2d(image, weight, padding=1).shape == (1, 3, 8, 8)
    assert "torch_npu" not in torch._C._dispatch_dump("aten::_convolution")


def test_nothing_of_torch_npu_is_loaded() -> None:
    assert getattr(sys.modules["torch_npu"], "__file__", None) is None
    maps = Path("/proc/self/maps")
    assert not maps.exists() or "torch_npu" not in maps.read_text()
    assert not distribution("torch-npu").entry_points  # one of them would load it with torch


def test_without_the_wheel_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "/nowhere/torch_npu-2.13.0-cp311.whl"):
        monkeypatch.setenv(wheel.VARIABLE, value)
        with pytest.raises(emulated.WheelMissing, match="pip download --no-deps torch-npu=="):
            wheel.wheel()
