"""Bindings: one for every op, readable without vLLM, and their names exist in vLLM."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.contracts.binding import FunctionTarget, LayerTarget, OperatorTarget
from vllm_fl.integration.compat import vllm_folders
from vllm_fl.integration.targets import ATTENTION_LAYERS, targets
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ops.contracts.rules import RULES


def test_every_op_has_a_binding_and_says_what_runs_past_it() -> None:
    assert set(known_contracts().bindings) == {*known_contracts().contracts}
    for binding in (*known_contracts().bindings.values(), ATTENTION_LAYERS):
        lines = binding.not_reached
        assert lines and len(set(lines)) == len(lines)
        assert all(line.isprintable() and not line.endswith(".") for line in lines)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_layers_that_core_names_are_vllms() -> None:
    for _, target in targets(known_contracts().bindings, LayerTarget):
        module, _, name = target.path.rpartition(".")
        assert getattr(import_module(module), name).__name__ == target.cls


BREAK = re.compile(rb"@eager_break_during_capture\n(?:\s*@.*\n)*\s*def (\w+)")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_no_place_is_where_vllm_interrupts_a_captured_graph() -> None:
    """A replacement for such a break would be captured together with the step's metadata."""
    files = (file for root in vllm_folders() for file in root.rglob("*.py"))
    breaks = {name.decode() for file in files for name in BREAK.findall(file.read_bytes())}
    assert "unified_attention_with_output" in breaks
    bindings = known_contracts().bindings
    taken = {path for _, target in targets(bindings, FunctionTarget) for path in target.paths}
    taken |= {target.name for _, target in targets(bindings, OperatorTarget)}
    assert breaks.isdisjoint(re.split(r"[.:]", name)[-1] for name in taken)


def test_each_field_of_the_models_sizes_is_asked_and_each_name_has_one_rule() -> None:
    asked = {rule for binding in known_contracts().bindings.values() for rule in binding.sizes}
    assert asked >= set(RULES)
    assert len({rule.name for rule in asked}) == len(asked)


class Called(Exception):
    """The stand-in for vLLM's kernel was called."""


TELLING = [
    (op, target)
    for kind in (OperatorTarget, FunctionTarget)
    for op, target in targets(known_contracts().bindings, kind)
    if target.tokens and op != "fused_experts"  # its native needs more than the contract's call
]


@pytest.mark.parametrize(("op", "target"), TELLING, ids=lambda value: getattr(value, "name", value))
def test_the_tokens_of_a_place_are_the_ops(op: str, target: Any) -> None:
    """Checked on the native's calls of the kernel for each sample."""
    import torch

    given: dict[str, Any] = {}

    def kernel(*args: Any, **named: Any) -> Any:
        given.update(zip(target.parameters, args, strict=False), **named)
        raise Called

    spec = known_contracts().contracts[op]
    first = next(name for name in spec.parameters if name in spec.by_token)
    for sample in spec.samples(getattr(torch, spec.dtypes[0]), torch.device("cpu")):
        with pytest.raises(Called):
            target.native(kernel)(*sample.args)
        tokens = len(dict(zip(spec.parameters, sample.args, strict=True))[first])
        assert given[target.tokens].shape[0] == tokens, sample.name


@pytest.mark.parametrize("kind", [OperatorTarget, FunctionTarget])
def test_tokens_that_are_no_parameter_are_an_error(kind: Any) -> None:
    name: Any = "acme::op" if kind is OperatorTarget else ("acme.op",)
    with pytest.raises(ValueError, match=r"acme.*tokens is 'y'.*its parameters, x"):
        kind(name, ("x",), None, None, tokens="y")


def served(multimodal: bool = False, **settings: Any) -> Any:
    """A VllmConfig of a model with these settings in its configuration."""
    hf_config = SimpleNamespace(to_dict=lambda: settings)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, is_multimodal_model=multimodal)
    )


ACTIVATIONS = {
    "fatrelu_and_mul": served(hidden_act="fatrelu"),
    "gelu_and_mul": served(hidden_activation="gelu_pytorch_tanh"),
    "gelu_and_mul_sparse": served(text_config={"activation_sparsity_pattern": [0.95]}),
    "gelu_fast": served(projector_hidden_act="GELU_FAST"),
    "gelu_new": served(activation_function="gelu_new"),
    "mul_and_silu": served(multimodal=True),
    "quick_gelu": served(vision_config={"hidden_act": "quick_gelu"}),
    "relu2": served(layers=[{"mlp_hidden_act": "relu2"}]),
    "silu_and_mul_with_clamp": served(text_config={"swiglu_limit": 10.0}),
    "xielu": served(hidden_act="xielu"),
}
"""Op -> a model that has it."""


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_an_activation_is_planned_for_models_that_have_it(op: str) -> None:
    when = known_contracts().bindings[op].when
    assert when is not None and when(ACTIVATIONS[op])
    assert not when(served(model_type="qwen3", hidden_act="silu", rope_scaling=None))
    if op in ("gelu_and_mul", "gelu_fast", "gelu_new", "mul_and_silu", "quick_gelu", "relu2"):
        assert when(served(multimodal=True, hidden_act="silu")), "it does not tell all of its own"
