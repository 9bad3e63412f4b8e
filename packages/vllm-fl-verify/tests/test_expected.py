"""Comparison of results, output by output: edge cases that no op of a model has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from sample_ops import sample_contracts
from torch import Tensor

from vllm_fl.contracts import (
    Exact,
    ExpertBlocks,
    ModelSizes,
    OpSpec,
    QuantisedPair,
    Routing,
    Sample,
    Tolerance,
    Variant,
    Within,
)
from vllm_fl.contracts.outputs import Output
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_verify.form import Form
from vllm_fl_verify.guarded import guarded
from vllm_fl_verify.oracle import measures, wanted_of, worst
from vllm_fl_verify.trials import as_provided

CPU = torch.device("cpu")
TIGHT = {n: Tolerance(1e-6, 0.0, "one rounding") for n in ("float32", "bfloat16", "float64")}


@pytest.fixture(autouse=True, scope="module")
def ops() -> Iterator[None]:
    with sample_contracts():
        yield


def judged(got: Any, exact: Any, *outputs: Output, **options: Any) -> tuple[float, str]:
    """(error, problem) of `got` compared with the oracle's result `exact`."""
    return worst(got, wants(got, exact, *outputs, **options))


def bias_of(got: Any, exact: Any) -> dict[str, float]:
    """The bias of `got` compared with the oracle's result `exact`."""
    wanted = wants(got, exact, Within({str(got.dtype)[6:]: Tolerance(1.0, 1.0, "any")}))
    return measures(got, wanted, "bias")


def wants(got: Any, exact: Any, *outputs: Output, **options: Any) -> Any:
    """The comparison of results like `got` with the oracle's result `exact`."""
    silu = known_contracts().contracts["silu_and_mul"]
    options |= {"oracle": lambda x: exact, "fake": lambda x: got, "outputs": outputs}
    spec = replace(silu, variants=(), tolerances=TIGHT, **options)
    return wanted_of(spec, Sample("a call", (None,)))


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("got", "exact", "share"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0),
        (torch.tensor([1, 3], dtype=torch.int32), torch.tensor([1, 2]), INF),
        (torch.tensor([2**53 + 1]), torch.tensor([2**53]), INF),  # equal in fp64
        (torch.tensor([255], dtype=torch.uint8), torch.tensor([-1]), INF),
        (torch.tensor([True, False]), torch.tensor([True, True]), INF),
        (torch.tensor([0.1]), torch.tensor([0.1000001], dtype=torch.float64), INF),
        (torch.tensor([0.1]).bfloat16(), torch.tensor([0.1], dtype=torch.float64), 0.0),
        (torch.tensor([NAN, INF]), torch.tensor([NAN, INF], dtype=torch.float64), 0.0),
        (torch.tensor([NAN]), torch.tensor([0.0], dtype=torch.float64), INF),
        (torch.tensor(3), torch.tensor(4), INF),
        (torch.ones(0, dtype=torch.int64), torch.ones(0), 0.0),
    ],
)
def test_exact(got: Tensor, exact: Tensor, share: float) -> None:
    found, problem = judged(got, exact, Exact())
    assert found == share and bool(problem) == bool(share)


EXACT = torch.linspace(-3, 5, 1000, dtype=torch.float64)
"""Few of them are 16-bit numbers."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_how_results_lean(dtype: torch.dtype) -> None:
    nearest = EXACT.to(dtype)
    below = torch.where(
        nearest.double().abs() > EXACT.abs(), nearest.nextafter(0 * nearest), nearest
    )
    above = below.nextafter(torch.inf * below.sign())
    for got, bias in ((nearest, 0.0), (below, -0.5), (above, 0.5)):
        assert bias_of(got, EXACT) == {"the result": pytest.approx(bias, abs=0.05)}
    far = nearest.clone()
    far[500] = 1e4  # an outlier has the weight of one element
    assert bias_of(far, EXACT) == {"the result": pytest.approx(0.0, abs=0.05)}


def test_what_differs_is_named_with_its_place() -> None:
    got = torch.tensor([[1, 2], [3, 4]])
    assert judged(got, torch.tensor([[1, 2], [5, 6]]), Exact()) == (
        INF,
        "the result: 2 of 4 elements differ; first at (1, 0): got 3, expected 5",
    )


@pytest.mark.parametrize(("odd", "says"), [(1.01, "; got/expected is 1.010 everywhere"), (1.1, "")])
def test_a_constant_factor_is_named(odd: float, says: str) -> None:
    exact = torch.tensor([1.0, -2.0, 0.0, 5.0], dtype=torch.float64)
    got = exact.float() * torch.tensor([1.01, 1.01, 1.01, odd])
    _, problem = judged(got, exact, Within(TIGHT))
    assert problem.partition("tolerance)")[2] == says


def test_each_output_has_its_own_rule_and_absent_ones_none() -> None:
    x, ids = torch.ones(3), torch.tensor([1, 2])
    wide = (x.double(), ids, None)
    assert judged((x, ids, None), wide, Within(), Exact(), Within()) == (0.0, "")
    assert judged((x * 2, ids, None), wide, Within(), Exact(), Within())[1].startswith("result 0:")
    assert judged((x, ids + 1, None), wide, Within(), Exact(), Within())[1].startswith("result 1:")
    lax = {"float32": Tolerance(2.0, 0.0, "anything goes")}
    assert judged((x * 2, ids), wide[:2], Within(lax), Exact())[1] == ""


def test_a_mistake_of_the_contract_is_said_to_be_its_own() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise NameError("name 'alfa' is not defined")

    silu = known_contracts().contracts["silu_and_mul"]
    call = Sample("a call", (torch.ones(3, 4),))
    with pytest.raises(ValueError, match=r"contract of broken, .*: its oracle .*'alfa'"):
        wanted_of(replace(silu, oracle=broken, variants=()), call)


@pytest.mark.parametrize(
    ("schemas", "message"),
    [
        (["(Tensor x) -> Tensor"], "'both': the oracle returns 2 results, .* call 0; "),
        (["(Tensor x, Tensor? y) -> (Tensor, Tensor)"], "'alone': .* 1 results, .* call 2; "),
        (["(Tensor x, Tensor y) -> (Tensor, Tensor)", "(Tensor x) -> Tensor"], ""),
    ],
)
def test_each_number_of_results_has_a_variant(schemas: list[str], message: str) -> None:
    def add(x: torch.Tensor, y: torch.Tensor | None) -> Any:
        return x if y is None else (x + y, y)

    silu = known_contracts().contracts["silu_and_mul"]
    variants = tuple(Variant("alone" * number, each) for number, each in enumerate(schemas))
    spec = replace(silu, oracle=add, fake=add, variants=variants, tolerances=TIGHT)
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        assert worst(x, wanted_of(spec, Sample("alone", (x, None)))) == (0.0, "")
        assert worst((x * 2, x), wanted_of(spec, Sample("both", (x, x)))) == (0.0, "")


def test_the_worst_element_is_that_of_the_output_that_is_named() -> None:
    exact = torch.ones(3, 4, dtype=torch.float64)
    silu = replace(
        known_contracts().contracts["silu_and_mul"], variants=(), tolerances=TIGHT, outputs=()
    )
    spec = replace(silu, oracle=lambda x: exact, fake=lambda x: torch.ones(3, 4))
    wanted = wanted_of(spec, Sample("a call", (None,)))
    assert worst(torch.ones(3, 4), wanted) == (0.0, "")
    for value in (5.0, NAN, INF):
        got = torch.ones(3, 4)
        got[1, 2], got[2, 3] = 2.0, value
        for places, at in ((None, "(2, 3)"), (torch.tensor([4, 5, 9]), "(9, 3)")):
            said = worst(got, wanted, places)[1]
            assert f"; worst at {at}: got {value:g}, expected 1" in said


def test_a_contract_that_contradicts_itself_says_where() -> None:
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"the contract of .*, sample 'a call': .* the fake "):
        judged(x, x.double()[:2])
    with pytest.raises(ValueError, match="one result of the QuantisedPair at 0 is None"):
        judged((x, None), (x, None), QuantisedPair())
    with pytest.raises(ValueError, match="does not fit a value of shape"):
        judged(
            (x.view(1, 3).char(), torch.ones(2, 3)),
            (x.view(1, 3), x.new_ones(2, 3)),
            QuantisedPair(),
        )


SHAPES = [(), (1, 1), (6,), (6, 1), (6, 3), (2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_way_of_storing_scales(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    scale = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.05
    most = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    spread = scale.reshape(()) if scale.numel() == 1 else scale
    if shape == (6,):
        spread = scale.unsqueeze(-1)
    for dim in range(2) if scale.numel() > 1 and len(shape) == 2 else ():
        groups = shape[dim]
        if groups > 1:
            at = torch.arange(x.shape[dim]) // math.ceil(x.shape[dim] / groups)
            spread = spread.index_select(dim, at)
    scaled = (x / spread).clamp(-most, most)
    value = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    exact = scaled * spread, scale
    assert judged((value, scale.float()), exact, QuantisedPair(0.51))[1] == ""
    for wrong in (scale.float() * 2, scale.float() / 2):
        assert judged((value, wrong), exact, QuantisedPair())[1].startswith("result 1:")
    bits = value.view(torch.int8) if value.is_floating_point() else value
    next_one = (bits + 1).view(dtype)
    found = judged((next_one, scale.float()), exact, QuantisedPair())[1]
    assert found.startswith("result 0 times its scale: ")


def test_a_pair_of_nothing_but_zeros_and_nan() -> None:
    value, scale = torch.zeros(2, 4, dtype=torch.int8), torch.zeros(2)
    exact = value.double(), scale.double()
    assert judged((value, scale), exact, QuantisedPair()) == (0.0, "")
    assert judged((value, scale + 1), exact, QuantisedPair())[0] == INF
    broken = exact[0] * NAN, exact[1] * NAN
    assert judged((value, scale * NAN), broken, QuantisedPair()) == (0.0, "")
    assert judged((value, scale), broken, QuantisedPair())[0] == INF
    assert judged((value, scale * NAN), exact, QuantisedPair())[0] == INF


# Routing: (tokens, experts) scores, the two highest chosen.

SCORES = torch.tensor(
    [
        [0.9, 0.5, 0.1, 0.0],  # clear
        [0.9, 0.5, 0.5, 0.0],  # a tie for the second place
        [0.5, 0.5, 0.5, 0.5],  # only ties
        [0.5, 0.5, 0.1, 0.0],  # a tie among the chosen
        [0.9, 0.5, 0.4999999, 0.0],  # a near tie
        [0.9, 0.5, 0.4999, 0.0],  # no tie
    ],
    dtype=torch.float64,
)
RIGHT_IDS = torch.tensor([[0, 1]] * 6)


def routed(ids: Tensor, weights: Tensor | None = None) -> tuple[float, str]:
    if weights is None:
        weights = SCORES.gather(-1, ids.clamp(0, 3))
    exact = SCORES.gather(-1, RIGHT_IDS), RIGHT_IDS
    routing = Routing(lambda x: SCORES, margin=1e-5, tolerances={"float32": Tolerance(1e-5, 0, "")})
    return judged((weights.float(), ids.int()), exact, routing)


def ids_with(token: int, *ids: int) -> Tensor:
    changed = RIGHT_IDS.clone()
    changed[token] = torch.tensor(ids)
    return changed


@pytest.mark.parametrize(
    ("token", "ids"), [(0, (0, 1)), (0, (1, 0)), (1, (0, 2)), (1, (2, 0)), (4, (0, 2)), (2, (3, 1))]
)
def test_ties_may_be_decided_either_way(token: int, ids: tuple[int, int]) -> None:
    assert routed(ids_with(token, *ids)) == (pytest.approx(0.0, abs=0.5), "")


@pytest.mark.parametrize(
    ("token", "ids"),
    [
        *((t, ids) for t in (0, 2) for ids in ((0, 0), (-1, 0), (0, 4), (0, 2**31 - 1))),
        *((0, (0, 2)), (0, (3, 0)), (1, (1, 2)), (3, (0, 2)), (4, (1, 2)), (5, (0, 2))),
    ],
)
def test_other_experts_are_wrong_whatever_their_weights(token: int, ids: tuple[int, int]) -> None:
    weights = SCORES.gather(-1, RIGHT_IDS)
    share, problem = routed(ids_with(token, *ids), weights)
    assert share == INF
    assert problem == (
        f"result 1: 1 of 6 tokens have incorrect experts; first at token {token}: "
        f"got {sorted(ids)}, expected [0, 1]"
    )


def test_a_weight_belongs_to_its_expert() -> None:
    weights = SCORES.gather(-1, RIGHT_IDS)
    assert routed(RIGHT_IDS.flip(-1), weights.flip(-1)) == routed(RIGHT_IDS, weights)
    problem = routed(RIGHT_IDS, weights.flip(-1))[1]
    assert problem.startswith("result 0: 8 of 12 elements exceed the tolerance; worst: ")
    assert routed(ids_with(1, 2, 0), weights)[1] == ""  # a tie: in order of size
    for wrong in (weights * 1.001, weights + 0.01, weights.roll(1, 0), weights * NAN):
        assert routed(RIGHT_IDS, wrong)[1].startswith("result 0:")


# Blocks of 4 places: 6 rows of expert 1, 1 of expert 3, and an unused block; 9 is padding.

ROWS = [2, 3, 5, 7, 8, 0, 9, 9, 1, 9, 9, 9, 9, 9, 9, 9]
OF_BLOCKS, IN_USE = [1, 1, 3, -1], [12]
BLOCKS = ExpertBlocks(block_size=lambda x: 4, padding=lambda x: 9)


def blocks(rows: list[int], experts: list[int], used: list[int]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(part, dtype=torch.int32) for part in (rows, experts, used))


def in_blocks(*got: list[int]) -> tuple[float, str]:
    return judged(blocks(*got), blocks(ROWS, OF_BLOCKS, IN_USE), BLOCKS)


def rows_with(**places: int) -> list[int]:
    """ROWS with other values at places `p0`, `p1`, …"""
    return [places.get(f"p{place}", row) for place, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("rows", "experts"),
    [
        (ROWS, OF_BLOCKS),
        (rows_with(p0=3, p1=2), OF_BLOCKS),
        (rows_with(p0=0, p5=2), OF_BLOCKS),  # from the expert's other block
        (rows_with(p12=-7, p13=0, p14=0, p15=2**31 - 1), [1, 1, 3, 77]),  # in unused blocks
    ],
)
def test_blocks_of_rows_in_any_order(rows: list[int], experts: list[int]) -> None:
    assert in_blocks(rows, experts, IN_USE) == (0.0, "")


@pytest.mark.parametrize(
    ("rows", "experts", "used", "message"),
    [
        (ROWS, OF_BLOCKS, [8], "result 2: 1 of 1 elements differ; first at (0,): got 8, expec"),
        (ROWS, [1, 3, 3, -1], IN_USE, "result 1: 1 of 3 elements differ; first at (1,): "
         "got 3, expected 1"),
        (rows_with(p0=1, p8=2), OF_BLOCKS, IN_USE, "the rows of each expert in result 0: 2 of 12 "
         "elements differ; first at (1,): got 1, expected 2"),
        # twice, and another lost
        (rows_with(p0=3), OF_BLOCKS, IN_USE, "the rows of each expert in result 0: 1 of 12"),
        (rows_with(p0=100), OF_BLOCKS, IN_USE, "the rows of each expert in result 0: "),
        (rows_with(p0=9, p6=2), OF_BLOCKS, IN_USE, "the padding of result 0: 2 of 12 elements "
         "differ; first at (0,): got 1, expected 0"),
    ],
)  # fmt: skip
def test_other_blocks_of_rows_are_wrong(
    rows: list[int], experts: list[int], used: list[int], message: str
) -> None:
    share, problem = in_blocks(rows, experts, used)
    assert share == INF and problem.startswith(message)


def form_of(spec: OpSpec, tokens: int) -> Form:
    sizes = ModelSizes(None, None, None, None, None, None, tokens=(tokens,))
    kinds = (list(spec.served(sizes, torch.float32, CPU, large)) for large in (False, True))
    return [Form(spec, *pair) for pair in zip(*kinds, strict=True)][-1]


def test_the_oracle_is_asked_about_the_smaller_call() -> None:
    """For weights with repeated rows, independent of what layers provide."""
    spec, columns = known_contracts().contracts["linear"], torch.tensor([2, 0, 0, 1])
    x, weight, bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3)
    args = (x, weight[columns], bias[columns])
    call = Sample("rows that repeat", args, repeats=((x, weight, bias), columns))
    asked = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        asked.append(len(weight))
        result: Tensor = spec.oracle(x, weight, bias)
        return result

    exact = spec.oracle(*args).float()
    assert not worst(exact, wanted_of(replace(spec, oracle=linear), call))[1]
    assert asked == [3]
    wrong = exact.clone()
    wrong[1, 2] += 1.0
    assert "1 of 12 elements exceed the tolerance" in worst(wrong, wanted_of(spec, call))[1]
    with pytest.raises(ValueError, match=r"the smaller call that it repeats .*\(3, 3\).*\(3, 4\)"):
        wanted_of(spec, replace(call, repeats=((x, weight, bias), columns[:3])))
    provided = as_provided(spec, call, {"bias": torch.bfloat16})
    assert provided.repeats is not None
    assert [a.dtype for a in provided.repeats[0]] == [a.dtype for a in provided.args]
    assert provided.args[2].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool], ids=str)
def test_guarded_memory_of_every_dtype(dtype: torch.dtype) -> None:
    wide = torch.ones(4, 8).to(dtype)
    call = guarded({"x": wide[:, :3]}, {"x"})
    call.remember()
    assert call.disturbance(()) is None
    assert call.args[0].float().eq(1).all()
    gap = call.storages[0].memory[0]
    assert gap.isnan() if dtype.is_floating_point else not gap
    call.storages[0].memory.view(torch.int8)[-1] = 1
    assert call.disturbance(()) == ("", "'x'", 1)


def test_results_without_a_row_per_token_must_be_declared() -> None:
    spec = replace(known_contracts().contracts["quantise_tensor"], whole_batch=False)
    with pytest.raises(ValueError, match=r"result 1 has the shape \(1,\) .* whole_batch=True"):
        form_of(spec, 16).deviation(False, torch.tensor([0, 1]), None)
