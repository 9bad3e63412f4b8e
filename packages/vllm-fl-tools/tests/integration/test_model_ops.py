"""A model's ops, by its layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.policy import Mode
from vllm_fl_tools.integration.model_ops import absent_ops
from vllm_fl_tools.operate.described import Described

MODE: Mode = "compiled"
LLAMA = {
    "rms_norm": {"RMSNorm": 9},
    "rotary_embedding": {"Llama3RotaryEmbedding": 1},
    "silu_and_mul": {"SiluAndMul": 4},
}


def engine(
    layers: dict[str, dict[str, int]],
    *,
    absent: tuple[str, ...] = ("fused_experts",),
    **fields: str,
) -> Described:
    """An engine with a model of four hidden layers."""
    manager = get_default_manager()
    manager.ensure_initialized()
    assert manager.settings is not None
    facts = EngineFacts(manager.settings, MODE, absent=frozenset(absent))
    model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=4, **fields))
    config: Any = SimpleNamespace(model_config=model)
    return Described(facts, Plan(MODE, {}), layers=layers, config=config)


@pytest.mark.parametrize("op", ["gelu_and_mul", "layer_norm"])
def test_an_op_without_a_layer_is_none_of_the_models(op: str) -> None:
    found = absent_ops(engine(LLAMA), known_contracts().bindings)
    assert op in found
    assert not found & {*LLAMA, "linear", "reshape_and_cache"}


def test_what_takes_in_an_op_that_it_has_not_it_has_not_either() -> None:
    bindings = known_contracts().bindings
    of_gelu = {**LLAMA, "gelu_and_mul": {"GeluAndMul": 4}}
    del of_gelu["silu_and_mul"]
    assert "linear_silu_and_mul" in absent_ops(engine(of_gelu), bindings)
    assert "linear_silu_and_mul" not in absent_ops(engine(LLAMA), bindings)


def test_experts_may_call_what_no_layer_has() -> None:
    bindings = known_contracts().bindings
    assert "gelu_and_mul" not in absent_ops(engine(LLAMA, absent=()), bindings)
    of_gelu = engine({}, absent=(), hidden_act="gelu_pytorch_tanh")
    assert not absent_ops(of_gelu, bindings), "nothing is known of its layers"
    of_silu = engine({"rms_norm": {"RMSNorm": 9}}, absent=(), hidden_act="silu")
    assert {"gelu_and_mul", "silu_and_mul"} & absent_ops(of_silu, bindings) == {"gelu_and_mul"}


def test_nothing_is_left_out_where_the_layers_are_not_known() -> None:
    assert absent_ops(engine({}), known_contracts().bindings) == frozenset()
