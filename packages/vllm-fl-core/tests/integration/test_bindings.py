"""The bindings: one for every op, readable where no vLLM is, and what they name is vLLM's."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

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
