"""The bindings: one for every op, readable where no vLLM is, and what they name is vLLM's."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.contracts import contracts
from vllm_fl.contracts.binding import LayerPlace
from vllm_fl.contracts.sizes import RULES
from vllm_fl.integration.bindings import bindings, places
from vllm_fl.plugins.attention import ATTENTION


def test_every_op_has_a_binding_and_says_what_runs_past_it() -> None:
    assert set(bindings()) == {*contracts(), ATTENTION}
    for binding in bindings().values():
        told = binding.not_reached
        assert told and len(set(told)) == len(told)
        assert all(line.isprintable() and not line.endswith(".") for line in told)


def test_bindings_are_read_without_torch_and_vllm() -> None:
    code = (
        "import sys; from vllm_fl.integration.bindings import bindings; bindings(); "
        "print(sorted({'torch', 'vllm', 'triton'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_layers_that_core_names_are_vllms() -> None:
    for _, place in places(bindings(), LayerPlace):
        module, _, name = place.path.rpartition(".")
        assert getattr(import_module(module), name).__name__ == place.cls


def test_each_field_of_the_models_sizes_is_asked_and_each_name_has_one_rule() -> None:
    asked = {rule for binding in bindings().values() for rule in binding.sizes}
    assert asked >= set(RULES)
    assert len({rule.name for rule in asked}) == len(asked)


def served(multimodal: bool = False, **settings: Any) -> Any:
    """A VllmConfig of a model with these settings in its own configuration."""
    hf_config = SimpleNamespace(to_dict=lambda: settings)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, is_multimodal_model=multimodal)
    )


ACTIVATIONS = {
    "fatrelu_and_mul": served(hidden_act="fatrelu"),
    "gelu_fast": served(projector_hidden_act="GELU_FAST"),
    "gelu_new": served(activation_function="gelu_new"),
    "mul_and_silu": served(multimodal=True),
    "quick_gelu": served(vision_config={"hidden_act": "quick_gelu"}),
    "relu2": served(layers=[{"mlp_hidden_act": "relu2"}]),
    "silu_and_mul_with_clamp": served(text_config={"swiglu_limit": 10.0}),
}
"""Op -> a model that has it."""


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_an_activation_is_planned_for_models_that_have_it(op: str) -> None:
    when = bindings()[op].when
    assert when is not None and when(ACTIVATIONS[op])
    assert not when(served(model_type="qwen3", hidden_act="silu", rope_scaling=None))


@pytest.mark.parametrize("op", ["gelu_fast", "gelu_new", "mul_and_silu", "quick_gelu", "relu2"])
def test_a_multimodal_model_may_have_activations_that_it_does_not_tell(op: str) -> None:
    when = bindings()[op].when
    assert when is not None and when(served(multimodal=True, hidden_act="silu"))
