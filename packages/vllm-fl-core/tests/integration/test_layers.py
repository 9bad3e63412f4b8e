"""The layer seam: which classes of vLLM's are replaced, by what name, and whose they are."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.model_executor import custom_op

from vllm_fl.contracts import contracts
from vllm_fl.contracts.binding import LayerPlace
from vllm_fl.integration.places import places
from vllm_fl.integration.seams import layers
from vllm_fl.plugins.registry import known_contracts


@pytest.fixture(autouse=True)
def _nothing_found_before() -> None:
    """A test that stands in for a platform can make an import fail, and failures are kept."""
    layers._found.cache_clear()


def test_every_layer_that_a_binding_names_is_there_and_has_one_op() -> None:
    table = layers.layer_table()
    assert {layer.op for layer in table} == {
        op for op, _ in places(known_contracts().bindings, LayerPlace)
    }
    assert len({layer.cls for layer in table}) == len(table)
    for layer in table:
        assert layer.registered in custom_op.op_registry


def test_lists_may_name_layers_by_class_by_registered_name_and_as_they_were() -> None:
    known = layers.known_layers()
    for layer in layers.layer_table():
        assert {layer.cls, layer.registered} <= known
    assert "fused_moe" in known


def test_a_layer_of_another_plugins_is_told_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Theirs", (), {"__module__": "pytest"})
    monkeypatch.setitem(custom_op.op_registry_oot, "SiluAndMul", theirs)
    (told,) = [v for k, v in layers.foreign_layers().items() if k == "SiluAndMul"]
    assert told.startswith("pytest.Theirs of pytest ")
    nobodys = type("Nobodys", (), {"__module__": "no_such_module"})
    assert layers.owner_of(nobodys) == "no_such_module.Nobodys"


@pytest.mark.parametrize("op", sorted(contracts()))
def test_a_layer_for_verification_provides_what_the_contract_takes_from_it(op: str) -> None:
    import torch

    spec = contracts()[op]
    sample = next(iter(spec.samples(torch.float32, torch.device("cpu"))))
    given = dict(zip(spec.parameters, sample.args, strict=True))
    provided = {name: given[name] for name in spec.from_layer}
    layer = layers.layer_for(spec, provided)
    for name, read in spec.from_layer.items():
        got = read(layer)
        want = provided[name]
        same = torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want
        assert same, name
