"""Variants: their schemas as torch reads them, and which of them a call takes."""

from __future__ import annotations

import inspect

import pytest
import torch

from vllm_fl.contracts import OpSpec, Variant, contracts

VARIANTS = [(spec, variant) for spec in contracts().values() for variant in spec.variants]


@pytest.mark.parametrize(
    ("spec", "variant"), VARIANTS, ids=lambda v: getattr(v, "name", "") or "plain"
)
def test_schema_is_torchs_and_in_the_order_of_the_contract(spec: OpSpec, variant: Variant) -> None:
    schema = torch._C.parse_schema(f"test::{spec.name}{variant.schema}")
    assert tuple(argument.name for argument in schema.arguments) == variant.parameters
    assert len(schema.returns) == variant.returns
    assert [p for p in spec.parameters if p in variant.parameters] == list(variant.parameters)
    for argument in schema.arguments:
        default = spec.signature.parameters[argument.name].default
        assert argument.has_default_value() == (default is not inspect.Parameter.empty)
        if argument.has_default_value():
            assert argument.default_value == default


def test_parameters_of_awkward_schemas() -> None:
    variant = Variant(
        "", "(Tensor(a!) x, str how=\"a, b) c\", *, int[2] pads=[0, 1], str? k='y, z') -> Tensor"
    )
    assert dict(variant.types) == {
        "x": "Tensor(a!)",
        "how": "str",
        "pads": "int[2]",
        "k": "str?",
    }
    assert variant.returns == 1
    assert Variant("", "() -> (Tensor, Tensor)").parameters == ()


@pytest.mark.parametrize(
    ("op", "given", "name"),
    [
        ("rms_norm", {"x", "epsilon"}, ""),
        ("rms_norm", {"x", "weight", "epsilon", "variance_size"}, ""),
        ("rms_norm", {"x", "residual", "epsilon"}, "add"),
        ("rotary_embedding", {"query", "key", "cos", "sin", "position_ids"}, ""),
        ("rotary_embedding", {"query", "cos", "sin", "position_ids"}, "query"),
        ("gelu_and_mul", {"x"}, ""),
    ],
)
def test_variant_for(op: str, given: set[str], name: str) -> None:
    spec = contracts()[op]
    arguments = {p: (1 if p in given else None) for p in spec.parameters}
    assert spec.variant_for(arguments).name == name


def test_variant_for_is_not_misled_by_a_prefix() -> None:
    def op(query: object, query_x: object) -> None: ...

    spec = contracts()["silu_and_mul"]
    changed = OpSpec(
        oracle=op,
        variants=(
            Variant("x", "(Tensor? query, Tensor query_x) -> Tensor"),
            Variant("", "(Tensor query) -> Tensor"),
        ),
        fake=op,
        check=spec.check,
        samples=spec.samples,
        served=spec.served,
        by_token=spec.by_token,
        bad_inputs=spec.bad_inputs,
        tolerances=spec.tolerances,
    )
    assert changed.variant_for({"query": None, "query_x": 1}).name == "x"
    assert changed.variant_for({"query": 1, "query_x": None}).name == ""
    with pytest.raises(ValueError, match="no variant fits"):
        changed.variant_for({"query": None, "query_x": None})
