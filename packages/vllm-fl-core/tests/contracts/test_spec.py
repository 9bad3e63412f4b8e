"""Variants: their schemas as torch reads them, and which calls match them. Dtypes, outputs."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from vllm_fl.contracts import OpSpec, QuantisedPair, Routing, Tolerance, Variant, Within
from vllm_fl.contracts.arguments import declared, tensor, word
from vllm_fl.contracts.outputs import Output
from vllm_fl.plugins.registry import known_contracts

VARIANTS = [
    (spec, variant) for spec in known_contracts().contracts.values() for variant in spec.variants
]


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
    assert dict(variant.types) == {"x": "Tensor(a!)", "how": "str", "pads": "int[2]", "k": "str?"}
    assert variant.returns == 1
    assert Variant("", "() -> (Tensor, Tensor)").parameters == ()


SILU = known_contracts().contracts["silu_and_mul"]
TIGHT = {"float32": Tolerance(1e-6, 0.0, "one rounding")}


def test_an_output_has_the_contracts_tolerances_or_its_own() -> None:
    spec = replace(SILU, outputs=(Within(TIGHT), Within()), variants=())
    assert spec.tolerance(torch.float32, spec.outputs[0]) is TIGHT["float32"]
    assert spec.tolerance(torch.float32, spec.outputs[1]) is SILU.tolerances["float32"]
    with pytest.raises(KeyError, match="no tolerance for results of float16, only for float32"):
        spec.tolerance(torch.float16, spec.outputs[0])


@pytest.mark.parametrize("output", [Within(), QuantisedPair(), Routing(lambda x: x, 0.0)])
def test_whatever_has_room_needs_a_tolerance(output: Output) -> None:
    options = {"dtypes": ("float32",), "outputs": (output,), "variants": ()}
    with pytest.raises(ValueError, match=r"neither output 0 .* has tolerances"):
        replace(SILU, tolerances={}, **options)
    replace(SILU, tolerances=TIGHT, **options)


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("by_token", frozenset({"x", "res"})),
        ("from_layer", {"res": str}),
        ("consumable", frozenset({"res"})),
        ("read_whole", frozenset({"res"})),
        ("arguments", {"res": tensor("d")}),
    ],
)
def test_what_is_said_of_a_parameter_is_said_of_one_that_the_oracle_takes(
    part: str, names: object
) -> None:
    match = rf"OpSpec\(silu_and_mul\): {part} contains res, .*; its parameters are x$"
    with pytest.raises(ValueError, match=match):
        replace(SILU, **{part: names})


def stepped(x: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.double() * scale.double()


STEPPED = declared(
    stepped,
    {
        "x": tensor("tokens, d"),
        "scale": tensor("tokens, 1", "float32").or_one(),
        "dtype": word("float16", "bfloat16"),
    },
    (tensor("tokens, d", "dtype"),),
    samples=lambda dtype, device: (),
    by_token=frozenset({"x", "scale"}),
    dtypes=("float32",),
    tolerances=TIGHT,
)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((3, 1), True), ((1,), False), ((), False), ((3,), None), ((1, 1), None), ((3, 2), None)],
)
def test_an_argument_may_be_a_row_for_each_token_or_one_number(
    shape: tuple[int, ...], rows: bool | None
) -> None:
    args = torch.zeros(3, 4), torch.ones(shape), "float16"
    problem = STEPPED.check(*args)
    if rows is None:
        assert problem is not None and problem[0] == "scale" and "(tokens, 1)" in problem[1]
        return
    assert problem is None
    assert STEPPED.with_rows(args).keys() == ({"x", "scale"} if rows else {"x"})
    assert STEPPED.tokens(args) == 3
    fewer = STEPPED.with_changed_rows(args, lambda arg: arg[:2])
    assert STEPPED.check(*fewer) is None and len(fewer[0]) == 2


def test_a_word_may_name_the_dtype_of_a_result() -> None:
    args = torch.zeros(3, 4), torch.ones(1)
    assert STEPPED.fake(*args, "float16").dtype == torch.float16
    assert STEPPED.fake(*args, "bfloat16").dtype == torch.bfloat16
    assert STEPPED.check(*args, "float32") == (
        "dtype",
        "must satisfy value in ('float16', 'bfloat16'), got float32",
    )


@pytest.mark.parametrize(
    ("outputs", "results", "fits"),
    [
        ((), 3, True),
        ((Within(), Within()), 1, True),  # the second is missing in this variant
        ((Within(), Within()), 3, False),
        ((QuantisedPair(),), 1, False),
        ((QuantisedPair(), Within()), 3, True),
        ((Within(), QuantisedPair()), 2, False),
    ],
)
def test_a_variants_results_end_with_an_output(
    outputs: tuple[Output, ...], results: int, fits: bool
) -> None:
    variant = Variant("", f"(Tensor x) -> ({', '.join(['Tensor'] * results)})")
    said = f"a call with {results} results does not match outputs"
    with nullcontext() if fits else pytest.raises(ValueError, match=said):
        spec = replace(SILU, outputs=outputs, variants=(variant,))
        assert sum(output.results for output in spec.outputs_of(results)) == results


def test_parameters_are_passed_by_position_and_by_name() -> None:
    def keyword(x: object, *, y: object = None) -> None: ...
    def position(x: object, /) -> None: ...
    def many(*xs: object) -> None: ...

    for oracle in (keyword, position, many):
        with pytest.raises(ValueError, match="must be passed by position and by name"):
            replace(SILU, oracle=oracle)


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_numbers_of_outputs(number: float) -> None:
    with pytest.raises(ValueError, match="steps must be finite and positive"):
        QuantisedPair(steps=number)
    if number:
        with pytest.raises(ValueError, match="margin must be finite and not negative"):
            Routing(lambda x: x, margin=number)
