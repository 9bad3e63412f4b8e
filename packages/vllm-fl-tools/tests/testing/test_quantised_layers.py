"""The kit's check of classes for quantised layers, with faulty classes."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from builders import managing
from quantised_layers import draw, faulty, keeping, no_fault, one_group, plain_experts
from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel

import vllm_fl.dispatch
from vllm_fl import BackendImplKind, ExpertKernelImpl, LinearKernelImpl
from vllm_fl_tools.testing.processes import installed
from vllm_fl_tools.testing.quantised import kernel_cases, quantised_layers
from vllm_fl_tools.testing.subject import Refused

__all__ = ["draw"]


class Refusing(CPUWNA16LinearKernel):  # type: ignore[misc]
    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str]:
        return False, "only 96 output features"


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("Sound", None, ""),
        ("Faulty", AssertionError, r"^on made weights, layer .* \(seed \d+\)$"),
        ("Keeping", AssertionError, "^on made weights loaded again, layer "),
        ("Refusing", Refused, "is not verified on made weights: only 96 output features"),
        ("Missing", AssertionError, "failed: AttributeError"),
    ],
)
def test_a_class(
    name: str, error: Any, why: str, draw: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    classes = {
        "Sound": faulty(CPUWNA16LinearKernel, no_fault, draw),
        "Faulty": faulty(CPUWNA16LinearKernel, one_group, draw),
        "Keeping": keeping(CPUWNA16LinearKernel),
    }
    module = SimpleNamespace(Refusing=Refusing, **classes)
    monkeypatch.setitem(sys.modules, "acme_layers", module)
    impl = LinearKernelImpl("wna16", f"acme_layers.{name}", BackendImplKind.VENDOR, "acme")
    monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", managing(impl))
    assert installed("vendor.acme") == ()
    assert kernel_cases("vendor.acme") == [(impl, "int4"), (impl, "int4 with zeros")]
    if error is None:
        quantised_layers(impl, "int4", torch.device("cpu"))
        return
    with pytest.raises(error, match=why):
        quantised_layers(impl, "int4", torch.device("cpu"))


@pytest.mark.parametrize(
    ("factor", "error", "why"),
    [
        (1, None, ""),
        (1.5, AssertionError, r"^layer experts: the result: .* 1 random rows \(seed \d+\)$"),
        (0, Refused, "^Refusing .*: only 96 experts$|No Int8 MoE backend supports"),
    ],
)
def test_a_class_of_experts(
    factor: float, error: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = plain_experts(lambda out: out[-1].mul_(factor))
    answer = staticmethod(lambda *args: (False, "only 96 experts"))
    refusing = type("Refusing", (plain,), {"is_supported_config": answer})
    module = SimpleNamespace(Experts=plain if factor else refusing)
    monkeypatch.setitem(sys.modules, "acme_experts", module)
    impl = ExpertKernelImpl("int8", "acme_experts.Experts", BackendImplKind.VENDOR, "acme")
    monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", managing(impl))
    assert kernel_cases("vendor.acme") == [(impl, "int8"), (impl, "int8 asymmetric")]
    with nullcontext() if error is None else pytest.raises(error, match=why):
        quantised_layers(impl, "int8", torch.device("cpu"))
