"""Compiled `takes`: the contract's declarations and rules."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from vllm_fl import BackendImplKind, OpImpl
from vllm_fl.contracts import OpSpec
from vllm_fl.contracts.call_checks import BROKEN, supports_of
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.signatures import fitted
from vllm_fl_tools.testing.mistakes import mistaken_calls

CPU = torch.device("cpu")


def on_meta(argument: Any) -> Any:
    return argument.to("meta") if isinstance(argument, torch.Tensor) else argument


@pytest.mark.parametrize("spec", known_contracts().contracts.values(), ids=lambda spec: spec.name)
def test_it_takes_each_call_that_keeps_the_contract_and_no_other(spec: OpSpec) -> None:
    supports = supports_of(spec, ())
    dtype = getattr(torch, spec.dtypes[-1])
    for sample in spec.samples(dtype, CPU):
        assert supports(*sample.args) is True, sample.name
    for bad in mistaken_calls(spec, dtype, CPU):
        is_read = spec.check(*map(on_meta, bad.args)) is None  # only a tensor's values break it
        assert is_read or supports(*bad.args) == BROKEN, bad.name


def norm(x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
    return x


def test_rules_are_expressions_or_functions_of_arguments_and_sizes() -> None:
    def even(hidden: int) -> bool | str:
        return hidden % 2 == 0 or f"{hidden} features"

    takes = ("variance_size is None", "weight is None or weight.is_contiguous()", even)
    impl = OpImpl("rms_norm", "default.acme", BackendImplKind.DEFAULT, norm, takes=takes)
    supports: Any = fitted(impl, known_contracts().contracts["rms_norm"]).supports
    x = torch.ones(2, 4)
    assert supports(x, None, None, 1e-6) is True
    assert supports(x, None, None, 1e-6, 2) == "needs variance_size is None, got variance_size=2"
    assert supports(x[:, :3], None, None, 1e-6) == "3 features"
    apart = torch.ones(4, 2)[:, 0]
    assert "got weight=torch.float32 (2,) cpu" in supports(x, None, apart, 1e-6)


def test_a_traceable_function_checks_the_contract_itself() -> None:
    impl = OpImpl(
        "rms_norm", "default.acme", BackendImplKind.DEFAULT, norm, takes=(), traceable=True
    )
    made, x = fitted(impl, known_contracts().contracts["rms_norm"]), torch.ones(2, 4)
    assert made.supports is None
    assert made.fn(x, None, None, 1e-6) is x
    with pytest.raises(NotImplementedError, match=BROKEN):
        made.fn(x, None, x, 1e-6)


def test_a_rule_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("rms_norm: 'size > 1' uses unknown size")):
        supports_of(known_contracts().contracts["rms_norm"], ["size > 1"])
    with pytest.raises(SyntaxError, match="'size = 1' in `takes` for rms_norm"):
        supports_of(known_contracts().contracts["rms_norm"], ["size = 1"])
    with pytest.raises(TypeError, match="got a string"):
        OpImpl("rms_norm", "default.acme", BackendImplKind.DEFAULT, norm, takes="size > 1")
    with pytest.raises(ValueError, match="takes and supports exclude each other"):
        OpImpl("rms_norm", "default.acme", BackendImplKind.DEFAULT, norm, takes=(), supports=norm)
