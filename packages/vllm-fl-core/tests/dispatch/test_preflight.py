"""What start-up finds in a faulty implementation, and what it lets pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fl.dispatch import preflight
from vllm_fl.dispatch.contracts import ModelSizes
from vllm_fl.dispatch.preflight import find_faults
from vllm_fl.dispatch.types import BackendImplKind, OpImpl

SIZES = ModelSizes(256, 512, 4, 2, 64, 64, tokens=(1, 2048))
CPU = torch.device("cpu")


def sound(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("no kernel image")


def gives_nan(x: Tensor) -> Tensor:
    return sound(x) * float("nan")


def gives_another_shape(x: Tensor) -> Tensor:
    return sound(x)[..., :-1]


def gives_another_dtype(x: Tensor) -> Tensor:
    return sound(x).double()


def wrong_in_bf16(x: Tensor) -> Tensor:
    return sound(x) * (1.1 if x.dtype is torch.bfloat16 else 1.0)


def wrong_above_64_tokens(x: Tensor) -> Tensor:
    result = sound(x)
    result[64:] = 0
    return result


def wrong_in_the_last_row_of_a_large_batch(x: Tensor) -> Tensor:
    result = sound(x)
    if len(x) > 1000:
        result[-1] = 0
    return result


def overwrites_its_input(x: Tensor) -> Tensor:
    result = sound(x)
    x.zero_()
    return result


def fault_of(fn: Callable[..., Any], compares: bool = True, **options: Any) -> str | None:
    impl = OpImpl("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, fn, "acme", **options)
    found = find_faults([impl], torch.bfloat16, CPU, SIZES, compares=compares)
    assert set(found) <= {("silu_and_mul", "vendor.acme")}
    return found["silu_and_mul", "vendor.acme"][0] if found else None


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (raises, "it raised RuntimeError: no kernel image"),
        (gives_nan, "elements are off"),
        (gives_another_shape, "has shape"),
        (gives_another_dtype, "has dtype torch.float64"),
        (wrong_in_bf16, "bfloat16"),
        (wrong_above_64_tokens, "2048 x 2*512"),
        (wrong_in_the_last_row_of_a_large_batch, "2048 x 2*512"),
        (overwrites_its_input, "overwrote 'x'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_found_and_say_what_is_wrong(fn: Callable[..., Any], said: str) -> None:
    fault = fault_of(fn)
    assert fault is not None and said in fault


def test_a_sound_implementation_passes() -> None:
    assert fault_of(sound) is None


def test_run_only_runs() -> None:
    assert fault_of(gives_nan, compares=False) is None
    assert "no kernel image" in str(fault_of(raises, compares=False))


def test_one_that_refuses_all_sizes_of_the_model_is_out() -> None:
    fault = fault_of(sound, supports=lambda x: "needs a multiple of 4096" if x.ndim == 2 else True)
    assert fault == (
        "it refuses the served model's own sizes (1 x 2*512: needs a multiple of 4096)"
    )


def test_one_that_refuses_an_edge_only_passes() -> None:
    assert fault_of(sound, supports=lambda x: "no 3-D" if x.ndim == 3 else True) is None


def test_a_slow_one_is_named_while_it_runs_and_out_after(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "SLOW", 1.0)

    def slow(x: Tensor) -> Tensor:
        time.sleep(1.5)
        return sound(x)

    with caplog.at_level(logging.WARNING, "vllm_fl"):
        fault = fault_of(slow)
    assert fault is not None and fault.startswith("takes ")
    assert "'vendor.acme' of op 'silu_and_mul' has been running" in caplog.text


def test_one_that_is_slow_once_while_it_compiles_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SLOW", 1.0)
    compiled = []

    def compiles(x: Tensor) -> Tensor:
        if not compiled:
            compiled.append(True)
            time.sleep(1.5)
        return sound(x)

    assert fault_of(compiles) is None


def test_the_global_random_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    fault_of(sound)
    assert torch.equal(torch.rand(3), want)
