"""Rules for every contract."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from oracle_mutants import oracle_impl
from telling import per_case

from vllm_fl.contracts import ModelSizes, OpSpec, Sample
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl_ops.contracts.rules import typical_sizes
from vllm_fl_tools.testing.mistakes import mistaken_calls
from vllm_fl_verify.oracle import closed, parts
from vllm_fl_verify.verification import compare

CPU = torch.device("cpu")
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
SPECS = list(known_contracts().contracts.values())

per_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def tensors(results: Any) -> list[torch.Tensor]:
    values = results if isinstance(results, tuple) else (results,)
    return [value for value in values if isinstance(value, torch.Tensor)]


def addresses(tensor: torch.Tensor) -> torch.Tensor:
    """The addresses of `tensor`'s elements."""
    size, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    index = torch.arange(size // tensor.element_size())
    at = index.as_strided(tensor.shape, tensor.stride(), offset).flatten()
    return at * tensor.element_size() + tensor.untyped_storage().data_ptr()


def test_the_contracts_cannot_be_changed() -> None:
    assert list(known_contracts().contracts) == sorted(known_contracts().contracts)
    with pytest.raises(TypeError):
        known_contracts().contracts["x"] = SPECS[0]  # type: ignore[index]


PUBLISHED = {
    "gelu_and_mul": "(x, approximate='none'",
    "rms_norm": "(x, residual, weight, epsilon, variance_size=None",
    "rotary_embedding": "(query, key, cos, sin, position_ids, rotary_interleaved=False",
    "silu_and_mul": "(x",
}
"""Calls of plugins in the field: a contract may gain trailing parameters with defaults."""


@pytest.mark.parametrize("op", PUBLISHED)
def test_signatures_that_plugins_know_stay(op: str) -> None:
    spec = known_contracts().contracts[op]
    shown = str(spec.signature.replace(parameters=plain(spec), return_annotation="r"))
    assert shown.startswith(PUBLISHED[op])
    more = plain(spec)[PUBLISHED[op].count(",") + 1 :]
    assert all(parameter.default is not parameter.empty for parameter in more)


def assert_same(ones: Iterable[Sample], others: Iterable[Sample]) -> None:
    for one, other in zip(ones, others, strict=True):
        for a, b in zip(one.args, other.args, strict=True):
            if isinstance(a, torch.Tensor):
                assert torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
                assert a.stride() == b.stride() and a.device == b.device == CPU
            else:
                assert a == b


def plain(spec: OpSpec) -> list[Any]:
    return [p.replace(annotation=p.empty) for p in spec.signature.parameters.values()]


@per_spec
def test_every_callable_takes_the_contracts_parameters(spec: OpSpec) -> None:
    for function in (spec.fake, spec.check):
        found = replace(spec, oracle=function)
        assert found.parameters == spec.parameters
        defaults = [p.default for p in found.signature.parameters.values()]
        assert defaults == [p.default for p in spec.signature.parameters.values()]


@per_spec
def test_documentation_names_every_parameter_and_its_errors(spec: OpSpec) -> None:
    text = spec.oracle.__doc__ or ""
    for heading in ("Args:", "Returns:", "Raises:", "Source:", "CallError:"):
        assert heading in text, f"the oracle's docstring lacks {heading!r}"
    for parameter in spec.parameters:
        assert parameter in text.partition("Args:")[2], f"{parameter} is not documented"


@per_case
def test_samples_have_names_of_their_own_and_legal_arguments(
    spec: OpSpec, dtype: torch.dtype
) -> None:
    samples = list(spec.samples(dtype, CPU))
    assert len({sample.name for sample in samples}) == len(samples)
    for sample in samples:
        assert len(sample.args) == len(spec.parameters)
        assert spec.check(*sample.args) is None, sample.name


@per_case
def test_fake_agrees_with_the_oracle(spec: OpSpec, dtype: torch.dtype) -> None:
    for sample in spec.samples(dtype, CPU):
        want, shaped = spec.oracle(*sample.args), spec.fake(*sample.args)
        assert isinstance(want, tuple) == isinstance(shaped, tuple)
        if isinstance(want, tuple):
            assert [w is None for w in want] == [s is None for s in shaped], sample.name
        for result, empty in zip(tensors(want), tensors(shaped), strict=True):
            assert result.dtype == torch.float64 or spec.outputs
            assert torch.isfinite(result).all() or sample.name.startswith("NaN"), sample.name
            assert empty.shape == result.shape, sample.name
            assert empty.dtype == dtype or spec.outputs
            assert empty.is_contiguous()
        assert len(tensors(want)) in {variant.returns for variant in spec.variants}


@per_spec
def test_fake_works_with_symbolic_sizes(spec: OpSpec) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sample = next(s for s in spec.samples(torch.bfloat16, CPU) if s.name.startswith("16 tokens"))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in sample.args]
        results = tensors(spec.fake(*args))
    assert isinstance(results[0].shape[0], torch.SymInt)
    for result, want in zip(results, tensors(spec.oracle(*sample.args)), strict=True):
        assert tuple(int(n) for n in result.shape) == tuple(want.shape)


@per_spec
def test_bad_inputs_are_refused_by_name(spec: OpSpec) -> None:
    for name in spec.dtypes:
        for bad in mistaken_calls(spec, getattr(torch, name), CPU):
            verdict = spec.check(*bad.args)
            assert verdict is not None, bad.name
            argument, problem = verdict
            assert argument == bad.argument, bad.name
            assert problem.startswith("must "), problem
    refused = {bad.argument for bad in mistaken_calls(spec, getattr(torch, spec.dtypes[0]), CPU)}
    sample = next(iter(spec.samples(getattr(torch, spec.dtypes[0]), CPU)))
    given = zip(spec.parameters, sample.args, strict=True)
    taken = {name for name, value in given if isinstance(value, bool)}  # anything is true or false
    assert refused | taken >= set(spec.parameters)


@per_case
def test_samples_are_the_same_each_time_and_leave_the_global_generator_alone(
    spec: OpSpec, dtype: torch.dtype
) -> None:
    before = torch.get_rng_state()
    first = list(spec.samples(dtype, CPU))
    torch.manual_seed(7)
    assert_same(first, spec.samples(dtype, CPU))
    torch.set_rng_state(before)
    list(spec.samples(dtype, CPU))
    list(mistaken_calls(spec, dtype, CPU))
    assert torch.equal(torch.get_rng_state(), before)


@per_spec
def test_samples_ignore_default_dtype_and_device(spec: OpSpec) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            inside = list(spec.samples(torch.float32, CPU))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(inside, spec.samples(torch.float32, CPU))


@per_spec
def test_no_element_belongs_to_two_arguments(spec: OpSpec) -> None:
    for sample in spec.samples(torch.bfloat16, CPU):
        every = torch.cat([addresses(tensor) for tensor in tensors(sample.args)])
        assert len(every.unique()) == len(every), sample.name


SERVED = {
    "gelu_and_mul": {(160,)},
    "rms_norm": {(96,), (6, 16)},
    "rotary_embedding": {(6, 16)},
    "silu_and_mul": {(160,)},
}
"""Op -> the dimensions after the tokens in the first argument's shape, by the sizes below."""


@pytest.mark.parametrize("spec", [s for s in SPECS if s.ignores_repeats], ids=lambda s: s.name)
def test_repeated_rows_change_nothing_where_the_contract_says_so(spec: OpSpec) -> None:
    sizes = ModelSizes(96, None, 4, 2, 16, tokens=(5,), more={"kv_lora_rank": 16, "block_size": 4})
    if spec.name == "reshape_and_cache":
        sizes = replace(sizes, more={"block_size": 4})
    samples = list(spec.served(sizes, torch.bfloat16, CPU))
    assert samples
    rows = torch.tensor([3, 0, 4, 1, 2, 0, 0, 4, 1, 2, 3])
    for sample in samples:
        named = dict(zip(spec.parameters, sample.args, strict=True))
        batch = [a[rows] if n in spec.by_token else a for n, a in named.items()]
        for once, often in zip(spec.oracle(*sample.args), spec.oracle(*batch), strict=True):
            by_row = once.numel() > 1 and not spec.caches
            assert torch.equal(often, once[rows] if by_row else once), sample.name


@per_spec
def test_served_samples_have_the_models_sizes(spec: OpSpec) -> None:
    more = typical_sizes(known_contracts().bindings.values()).more
    sizes = ModelSizes(96, 80, 6, 2, 16, rotary=8, tokens=(1, 600), more=more)
    samples = list(spec.served(sizes, getattr(torch, spec.dtypes[-1]), CPU))
    batches = set()
    for sample in samples:
        assert spec.check(*sample.args) is None, sample.name
        (rows,) = {len(rows) for rows in spec.with_rows(sample.args).values()}
        batches.add(rows)
        shapes = [tuple(arg.shape[1:]) for arg in tensors(sample.args)]
        assert shapes[0] in SERVED.get(spec.name, shapes)
        if spec.name == "rotary_embedding":
            assert shapes[1:3] == [(2, 16), (4,)]
    assert batches == {1, 600}


MOST = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.05}
"""The largest tolerance of an op's results in each dtype. Further outputs may have 16 bits."""


@per_spec
def test_tolerances_have_reasons_and_grow_with_the_rounding(spec: OpSpec) -> None:
    named = [spec.tolerances, *(getattr(output, "tolerances", {}) for output in spec.outputs)]
    for tolerances in named:
        known = [tolerances[str(dtype)[6:]] for dtype in FLOATING if str(dtype)[6:] in tolerances]
        assert len(known) == len(tolerances)
        assert all(fine.rtol < coarse.rtol for fine, coarse in pairwise(known))
        for dtype, tolerance in tolerances.items():
            most = MOST[dtype if tolerances is spec.tolerances else "bfloat16"]
            assert max(tolerance.rtol, tolerance.atol) <= most
        assert all(len(tolerance.reason) > 20 for tolerance in known), (
            "a reason of 20 characters or fewer: say what is rounded, and how often"
        )
    with pytest.raises(KeyError):
        spec.tolerance(torch.float64)


EXACT = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}


@per_case
def test_the_oracle_is_its_second_form(spec: OpSpec, dtype: torch.dtype) -> None:
    """In results and their number."""
    second = spec.second_form
    assert second is not None, f"{spec.name} has no second form to compare its oracle with"
    assert second.__code__ is not spec.oracle.__code__
    for sample in spec.samples(dtype, CPU):
        results = (closed(form(*sample.args), sample) for form in (spec.oracle, second))
        for one, other in zip(*map(parts, results), strict=True):
            if one is None or other is None:
                assert one is other, sample.name
            else:
                torch.testing.assert_close(other, one, **EXACT, msg=sample.name)


@per_spec
def test_oracles_leave_their_inputs_alone_in_fp64_too(spec: OpSpec) -> None:
    for sample in spec.samples(torch.float64, CPU):
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in sample.args]
        for result in parts(spec.oracle(*sample.args)):
            if result is not None:
                result.fill_(7.0)
        for old, new in zip(before, sample.args, strict=True):
            if isinstance(old, torch.Tensor):
                torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


def activations(spec: OpSpec, sample: Sample) -> list[torch.Tensor]:
    return list(spec.with_rows(sample.args).values())


@per_spec
def test_every_contract_asks_for_nan_beside_rows_without(spec: OpSpec) -> None:
    if spec.name in {"moe_align_block_size"}:
        return
    for name in spec.dtypes:
        samples = list(spec.samples(getattr(torch, name), CPU))
        broken = [
            sample
            for sample in samples
            for x in activations(spec, sample)
            if x.isnan().any() and not x.isnan().flatten(1).any(1).all()
        ]
        assert broken, f"{name}: no sample has NaN in a row, and none in another"
        for sample in broken:
            rows = len(activations(spec, sample)[0])
            assert len(sample.open_rows) < rows, f"{sample.name}: nothing is compared"


@per_spec
def test_every_contract_asks_for_no_tokens(spec: OpSpec) -> None:
    samples = spec.samples(getattr(torch, spec.dtypes[-1]), CPU)
    assert any(not len(x) for sample in samples for x in activations(spec, sample))


@per_spec
def test_a_result_of_open_rows_may_be_anything_and_no_other(spec: OpSpec) -> None:
    dtype = getattr(torch, spec.dtypes[-1])
    for sample in spec.samples(dtype, CPU):
        rows = len(activations(spec, sample)[0])
        for damaged in sample.open_rows and range(rows):
            result = compare(_spoiling(spec, damaged), spec, sample, dtype)
            wanted = "ok" if damaged in sample.open_rows else "wrong"
            assert result.status == wanted, (sample.name, damaged, result.reason)


def _spoiling(spec: OpSpec, row: int) -> OpImpl:
    """The oracle, rounded, with one incorrect row."""
    return oracle_impl(spec, lambda results, args: (_spoilt(results[0], row), *results[1:]))


def _spoilt(result: torch.Tensor, row: int) -> torch.Tensor:
    result = result.clone()
    result[row] = (result[row].float().nan_to_num(0.0, 0.0, 0.0) * -0.5 + 9.0).to(result.dtype)
    return result
