"""What holds for every contract."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from telling import per_case

import vllm_fl_ops.contracts
from vllm_fl.contracts import ModelSizes, OpSpec, Sample, contracts
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ops.contracts.rules import typical_sizes
from vllm_fl_tools.testing.mistakes import bad_inputs

CPU = torch.device("cpu")
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
SPECS = list(contracts().values())

per_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)


def tensors(results: Any) -> list[torch.Tensor]:
    values = results if isinstance(results, tuple) else (results,)
    return [value for value in values if isinstance(value, torch.Tensor)]


def addresses(tensor: torch.Tensor) -> set[int]:
    """The bytes at which the elements of `tensor` start."""
    size, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    index = torch.arange(size // tensor.element_size())
    at = index.as_strided(tensor.shape, tensor.stride(), offset).flatten().tolist()
    start = tensor.untyped_storage().data_ptr()
    return {start + i * tensor.element_size() for i in at}


def within(spec: OpSpec, got: torch.Tensor, want: torch.Tensor) -> bool:
    bound = spec.tolerance(got.dtype)
    pair = got.double(), want.double()
    return torch.allclose(*pair, rtol=bound.rtol, atol=bound.atol, equal_nan=True)


def test_the_contracts_are_the_modules_that_are_named_after_them() -> None:
    modules = Path(vllm_fl_ops.contracts.__path__[0]).glob("*.py")
    named = [path.stem for path in modules if re.search(r"^SPEC = ", path.read_text(), re.M)]
    assert list(contracts()) == sorted(named) and set(PUBLISHED) <= set(named)
    assert isinstance(contracts(), Mapping)
    with pytest.raises(TypeError):
        contracts()["x"] = SPECS[0]  # type: ignore[index]


PUBLISHED = {
    "gelu_and_mul": "(x, approximate='none'",
    "rms_norm": "(x, residual, weight, epsilon, variance_size=None",
    "rotary_embedding": "(query, key, cos, sin, position_ids, rotary_interleaved=False",
    "silu_and_mul": "(x",
}
"""What plugins in the field call: a contract may gain trailing parameters with defaults."""


@pytest.mark.parametrize("op", PUBLISHED)
def test_signatures_that_plugins_know_stay(op: str) -> None:
    spec = contracts()[op]
    shown = str(spec.signature.replace(parameters=plain(spec), return_annotation="r"))
    assert shown.startswith(PUBLISHED[op])
    more = plain(spec)[PUBLISHED[op].count(",") + 1 :]
    assert all(parameter.default is not parameter.empty for parameter in more)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


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
        for bad in bad_inputs(spec, getattr(torch, name), CPU):
            verdict = spec.check(*bad.args)
            assert verdict is not None, bad.name
            argument, problem = verdict
            assert argument == bad.argument, bad.name
            assert problem.startswith("must "), problem
    refused = {bad.argument for bad in bad_inputs(spec, getattr(torch, spec.dtypes[0]), CPU)}
    sample = next(iter(spec.samples(getattr(torch, spec.dtypes[0]), CPU)))
    given = zip(spec.parameters, sample.args, strict=True)
    taken = {name for name, value in given if isinstance(value, bool)}  # anything is true or false
    assert refused | taken >= set(spec.parameters)


@per_spec
def test_a_tensor_on_another_device_is_refused(spec: OpSpec) -> None:
    samples = spec.samples(getattr(torch, spec.dtypes[0]), CPU)
    sample = next(s for s in samples if None not in s.args[:3] or len(s.args) < 5)
    for parameter, value in list(zip(spec.parameters, sample.args, strict=True))[1:]:
        if isinstance(value, torch.Tensor):
            args = [value.to("meta") if arg is value else arg for arg in sample.args]
            argument, problem = spec.check(*args)  # type: ignore[misc]
            assert argument == parameter
            assert "device cpu, got meta" in problem


@per_case
def test_samples_are_the_same_each_time_and_leave_the_global_generator_alone(
    spec: OpSpec, dtype: torch.dtype
) -> None:
    before = torch.get_rng_state()
    first = list(spec.samples(dtype, CPU))
    torch.manual_seed(7)
    for one, two in zip(first, spec.samples(dtype, CPU), strict=True):
        for a, b in zip(one.args, two.args, strict=True):
            if isinstance(a, torch.Tensor):
                assert same(a, b) and a.stride() == b.stride()
            else:
                assert a == b
    torch.set_rng_state(before)
    list(spec.samples(dtype, CPU))
    list(bad_inputs(spec, dtype, CPU))
    assert torch.equal(torch.get_rng_state(), before)


@per_spec
def test_samples_ignore_default_dtype_and_device(spec: OpSpec) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            inside = list(spec.samples(torch.float32, CPU))
    finally:
        torch.set_default_dtype(torch.float32)
    for one, two in zip(inside, spec.samples(torch.float32, CPU), strict=True):
        for a, b in zip(tensors(one.args), tensors(two.args), strict=True):
            assert a.device == CPU
            assert same(a, b)


@per_spec
def test_no_element_belongs_to_two_arguments(spec: OpSpec) -> None:
    for sample in spec.samples(torch.bfloat16, CPU):
        seen: set[int] = set()
        for tensor in tensors(sample.args):
            own = addresses(tensor)
            assert len(own) == tensor.numel(), sample.name
            assert not own & seen, sample.name
            seen |= own


SERVED = {
    "gelu_and_mul": {(160,)},
    "rms_norm": {(96,), (6, 16)},
    "rotary_embedding": {(6, 16)},
    "silu_and_mul": {(160,)},
}
"""Op -> what follows the tokens in the first argument's shape, by the sizes below."""


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
            by_row = once.numel() > 1 and not spec.gives_caches
            assert torch.equal(often, once[rows] if by_row else once), sample.name


@per_spec
def test_served_samples_have_the_models_sizes(spec: OpSpec) -> None:
    sizes = ModelSizes(
        hidden=96,
        intermediate=80,
        heads=6,
        kv_heads=2,
        head_size=16,
        rotary=8,
        tokens=(1, 600),
        more=typical_sizes(known_contracts().bindings.values()).more,
    )
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


@per_spec
def test_tolerances_have_reasons_and_grow_with_the_rounding(spec: OpSpec) -> None:
    named = [spec.tolerances, *(getattr(output, "tolerances", {}) for output in spec.outputs)]
    for tolerances in named:
        known = [tolerances[str(dtype)[6:]] for dtype in FLOATING if str(dtype)[6:] in tolerances]
        assert len(known) == len(tolerances)
        assert all(fine.rtol < coarse.rtol for fine, coarse in pairwise(known))
        assert all(len(tolerance.reason) > 20 for tolerance in known), (
            "a reason of 20 characters or fewer: say what is rounded, and how often"
        )
    with pytest.raises(KeyError):
        spec.tolerance(torch.float64)


Op = Callable[..., Any]


def mutants() -> Iterator[tuple[str, str, Op]]:
    """(op, what is wrong, a wrong form of it in fp64): mistakes that kernels of these ops make."""
    oracle = {name: spec.oracle for name, spec in contracts().items()}
    silu, gelu, norm, rotary = (
        oracle[n] for n in ("silu_and_mul", "gelu_and_mul", "rms_norm", "rotary_embedding")
    )

    def halves(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)

    yield "silu_and_mul", "swapped halves", lambda x: silu(halves(x))
    yield "silu_and_mul", "gelu", gelu
    yield "gelu_and_mul", "swapped halves", lambda x, a: gelu(halves(x), a)
    yield "gelu_and_mul", "always erf", lambda x, a: gelu(x, "none")
    yield "gelu_and_mul", "always tanh", lambda x, a: gelu(x, "tanh")
    yield "rms_norm", "epsilon / 10", lambda x, r, w, e, v: norm(x, r, w, e / 10, v)
    yield "rms_norm", "no weight", lambda x, r, w, e, v: norm(x, r, None, e, v)
    yield "rms_norm", "no variance_size", lambda x, r, w, e, v: norm(x, r, w, e)

    def stale(*args: Any) -> Any:
        return norm(*args) if args[1] is None else (norm(*args)[0], args[1])

    def unsummed(x: Any, r: Any, *rest: Any) -> Any:
        return norm(x, r, *rest) if r is None else (norm(x, None, *rest), norm(x, r, *rest)[1])

    yield "rms_norm", "residual not written", stale
    yield "rms_norm", "norm of x alone", unsummed
    yield "rotary_embedding", "never interleaved", lambda *a: rotary(*a[:5], False)
    yield "rotary_embedding", "other direction", lambda q, k, c, s, *a: rotary(q, k, c, -s, *a)
    yield (
        "rotary_embedding",
        "next position",
        (lambda q, k, c, s, p, i: rotary(q, k, c, s, (p + 1) % c.shape[0], i)),
    )
    yield "rotary_embedding", "key untouched", lambda q, k, *a: (rotary(q, None, *a)[0], k)
    yield from linear_mutants(oracle["linear"])
    yield from norm_rope_mutants(oracle["qk_norm_rope"])
    yield from hybrid_mutants(oracle)


def linear_mutants(right: Op) -> Iterator[tuple[str, str, Op]]:
    """The same of projections."""
    op = "linear"

    def packed(matrix: torch.Tensor) -> torch.Tensor:
        """Read as if its rows had no gaps, and one began where the last one ends."""
        memory = matrix.untyped_storage().nbytes() // matrix.element_size()
        at = matrix.storage_offset() + torch.arange(matrix.numel())
        elements = matrix.as_strided((memory,), (1,), 0)
        return elements[at % max(memory, 1)].view(matrix.shape)

    def untransposed(x: Any, w: Any, b: Any) -> Any:
        return right(x, w.t() if w.shape[0] == w.shape[1] else w, b)

    def whole_blocks(x: Any, w: Any, b: Any) -> Any:
        whole = x.shape[1] // 128 * 128 or x.shape[1]
        return right(x[:, :whole], w[:, :whole], b)

    def last_is_the_one_before(x: Any, w: Any, b: Any) -> Any:
        result = right(x, w, b)
        return torch.cat((result[:, :-1], result[:, -2:][:, :1]), dim=1)

    def whole_tiles(x: Any, w: Any, b: Any) -> Any:
        """The output features beyond a multiple of 32 are never written."""
        result = right(x, w, b)
        result[:, w.shape[0] // 32 * 32 :] = 0.0
        return result

    def bias_by_row(x: Any, w: Any, b: Any) -> Any:
        if b is None or not len(x):
            return right(x, w, b)
        return right(x, w, None) + b.double()[torch.arange(len(x)) % len(b), None]

    def rows_beyond_a_tile(x: Any, w: Any, b: Any) -> Any:
        """Past 64 tokens the first tile's are computed again."""
        return right(x[torch.arange(len(x)) % 64], w, b)

    yield op, "square weight not transposed", untransposed
    yield op, "no bias", lambda x, w, b: right(x, w, None)
    yield op, "bias twice", lambda x, w, b: right(x, w, None if b is None else 2 * b)
    yield op, "bias by row", bias_by_row
    yield op, "last block of features left out", whole_blocks
    yield op, "last feature left out", lambda x, w, b: right(x[:, :-1], w[:, :-1], b)
    yield op, "last output feature is the one before", last_is_the_one_before
    yield op, "output features beyond whole tiles left out", whole_tiles
    yield op, "the next token's", lambda x, w, b: right(x.roll(-1, 0), w, b)
    yield op, "the first token's for all", lambda x, w, b: right(x[:1].expand_as(x), w, b)
    yield op, "the first 64 tokens' for all", rows_beyond_a_tile
    yield op, "x taken as contiguous", lambda x, w, b: right(packed(x), w, b)
    yield op, "weight taken as contiguous", lambda x, w, b: right(x, packed(w), b)
    yield op, "no weight's sign", lambda x, w, b: right(x, w.abs(), b)


def norm_rope_mutants(right: Op) -> Iterator[tuple[str, str, Op]]:
    """The same of query and key heads that are normed and turned."""
    op = "qk_norm_rope"

    def halves(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = table.chunk(2, dim=-1)
        return cos, sin

    def other_way(x: Any, q: Any, k: Any, table: Any, *rest: Any) -> Any:
        cos, sin = halves(table)
        return right(x, q, k, torch.cat((cos, -sin), dim=-1), *rest)

    def swapped_tables(x: Any, q: Any, k: Any, table: Any, *rest: Any) -> Any:
        return right(x, q, k, torch.cat(halves(table)[::-1], dim=-1), *rest)

    def as_far_apart_as_heads_allow(x: Any, q: Any, k: Any, table: Any, *rest: Any) -> Any:
        """Pairs half a head apart, whatever the table's width."""
        size = q.shape[0] // 2 * 2
        cos, sin = (part[:, : size // 2] for part in halves(table))
        more = size // 2 - cos.shape[1]
        whole = (F.pad(cos, (0, more), value=1.0), F.pad(sin, (0, more)))
        return right(x, q, k, torch.cat(whole, dim=-1), *rest)

    def turned_first(x: Any, q: Any, k: Any, *rest: Any) -> Any:
        one, size = torch.ones_like(q), q.shape[0]
        result = right(x, one, one, *rest).unflatten(-1, (-1, size))
        heads = rest[2]
        result[:, :heads] *= q
        result[:, heads : heads + rest[3]] *= k
        return result.flatten(1)

    def of_all_heads(x: Any, q: Any, *rest: Any) -> Any:
        heads, every = rest[3], x.shape[1] // q.shape[0]
        return right(x, q, *rest[:4], every - heads, *rest[5:])

    def norm_of_what_rotates(x: Any, q: Any, k: Any, table: Any, *rest: Any) -> Any:
        width, size = table.shape[1], q.shape[0]
        parts = x.double().unflatten(-1, (-1, size))
        share = parts[..., :width].square().mean(-1) / parts.square().mean(-1)
        result = right(x, q, k, table, *rest).unflatten(-1, (-1, size)).clone()
        result[:, : rest[1] + rest[2]] /= share[:, : rest[1] + rest[2], None].sqrt()
        return result.flatten(1)

    yield op, "never interleaved", lambda *x: right(*x[:8], False)
    yield op, "always interleaved", lambda *x: right(*x[:8], True)
    yield op, "other direction", other_way
    yield op, "cosines and sines swapped", swapped_tables
    yield op, "pairs half a head apart", as_far_apart_as_heads_allow
    yield op, "next position", lambda *x: right(*x[:4], (x[4] + 1) % len(x[3]), *x[5:])
    yield op, "positions in order", lambda *x: right(*x[:4], torch.arange(len(x[4])), *x[5:])
    yield op, "epsilon / 10", lambda *x: right(*x[:7], x[7] / 10, x[8])
    yield op, "no epsilon", lambda *x: right(*x[:7], 0.0, x[8])
    yield op, "no weights", lambda x, q, k, *y: right(x, q * 0 + 1, k * 0 + 1, *y)
    yield op, "one weight for both", lambda x, q, k, *y: right(x, q, q, *y)
    yield op, "weights behind the rotation", turned_first
    yield op, "values normed, too", of_all_heads
    yield op, "last key head left", lambda *x: right(*x[:5], x[5] - 1, x[6], *x[7:])
    yield op, "norm of what rotates", norm_of_what_rotates


def hybrid_mutants(oracle: Mapping[str, Op]) -> Iterator[tuple[str, str, Op]]:
    """The same of linear attention."""
    gates = oracle["gdn_gating"]
    yield "gdn_gating", "a and b swapped", lambda a, b, *rest: gates(b, a, *rest)
    yield "gdn_gating", "no bias", lambda a, b, A, d: gates(a, b, A, d * 0)
    yield "gdn_gating", "rate not exponentiated", lambda a, b, A, d: gates(a, b, A.log(), d)
    yield "gdn_gating", "g of the other sign", lambda *x: (-gates(*x)[0], gates(*x)[1])
    yield "gdn_gating", "beta of b alone", lambda a, b, *x: (gates(a, b, *x)[0], b)
    yield "gdn_gating", "first head for all", lambda a, b, A, d: gates(a, b, A[:1].expand_as(A), d)

    op = "chunk_gated_delta_rule"
    rule = oracle[op]
    yield op, "no decay", lambda q, k, v, g, *x: rule(q, k, v, g * 0, *x)
    yield op, "decay not in logarithms", lambda q, k, v, g, *x: rule(q, k, v, -g.exp(), *x)
    yield op, "everything learnt", lambda q, k, v, g, b, *x: rule(q, k, v, g, b**0, *x)
    yield op, "states begin at 0", lambda *x: rule(*x[:5], x[5] * 0, *x[6:])
    yield op, "one sequence", lambda *x: rule(*x[:6], x[6] * (x[6] == x[6][-1]), x[7])
    yield op, "never normed", lambda *x: rule(*x[:7], None)
    yield op, "not scaled", lambda *x: (rule(*x)[0] * x[0].shape[-1] ** 0.5, rule(*x)[1])
    yield op, "states not written", lambda *x: (rule(*x)[0], x[5])

    def other_heads(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        share = v.shape[1] // q.shape[1]
        return rule(q.repeat(1, share, 1), k.repeat(1, share, 1), v, *rest)

    def transposed(q: Any, k: Any, v: Any, g: Any, b: Any, state: Any, *rest: Any) -> Any:
        square = state.shape[-1] == state.shape[-2]
        return rule(q, k, v, g, b, state.transpose(2, 3) if square else state, *rest)

    yield op, "heads shared by turns", other_heads
    yield op, "states of keys by values", transposed

    op = "recurrent_gated_delta_rule"
    step = oracle[op]
    yield op, "no decay", lambda *x: step(*x[:5], x[5] - 60, *x[6:])
    yield op, "no bias", lambda *x: step(*x[:6], x[6] * 0, *x[7:])
    yield op, "a and b swapped", lambda q, k, v, a, b, *x: step(q, k, v, b, a, *x)
    yield op, "never normed", lambda *x: step(*x[:9], None)
    yield op, "not scaled", lambda *x: (step(*x)[0] * x[0].shape[-1] ** 0.5, step(*x)[1])
    yield op, "states not written", lambda *x: (step(*x)[0], x[7])
    yield op, "states in the order of tokens", lambda *x: step(*x[:8], x[8].sort().values, x[9])
    yield op, "padding computed", lambda *x: step(*x[:8], x[8] + (x[8] == 0).int(), x[9])
    yield op, "v not corrected", lambda q, k, v, *x: (step(q, k, v, *x)[0], step(q, -k, v, *x)[1])
    yield from convolution_mutants(oracle)


def convolution_mutants(oracle: Mapping[str, Op]) -> Iterator[tuple[str, str, Op]]:
    """The same of the short convolutions."""
    op = "causal_conv1d"
    whole = oracle[op]
    yield op, "taps reversed", lambda x, w, *y: whole(x, w.flip(1), *y)
    yield op, "no bias", lambda x, w, b, *y: whole(x, w, None, *y)
    yield op, "always activated", lambda *x: whole(*x[:7], "silu")
    yield op, "never activated", lambda *x: whole(*x[:7], None)
    yield op, "states not written", lambda *x: (whole(*x)[0], x[3])
    yield op, "every sequence has a state", lambda *x: whole(*x[:6], x[6] | True, x[7])
    yield op, "no sequence has a state", lambda *x: whole(*x[:6], x[6] & False, x[7])
    yield op, "states in order", lambda *x: whole(*x[:5], x[5].sort().values, *x[6:])
    yield op, "the newest first", lambda *x: (whole(*x)[0], whole(*x)[1].flip(2))

    op = "causal_conv1d_update"
    one = oracle[op]
    yield op, "taps reversed", lambda x, s, w, *y: one(x, s, w.flip(1), *y)
    yield op, "no bias", lambda x, s, w, b, *y: one(x, s, w, None, *y)
    yield op, "always activated", lambda *x: one(*x[:4], "silu", x[5])
    yield op, "states not written", lambda *x: (one(*x)[0], x[1])
    yield op, "states in order", lambda *x: one(*x[:5], x[5].sort().values)
    yield op, "padding computed", lambda *x: one(*x[:5], x[5] + (x[5] == 0).int())
    yield op, "states from the last columns", lambda x, s, *y: one(x, s.roll(-1, 2), *y)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize(("op", "wrong", "mutant"), list(mutants()))
def test_samples_and_tolerances_tell_a_wrong_op(
    op: str, wrong: str, mutant: Op, dtype: torch.dtype
) -> None:
    spec = contracts()[op]

    def passes(op: Op, sample: Sample) -> bool:
        pairs = zip(tensors(op(*sample.args)), tensors(spec.oracle(*sample.args)), strict=True)
        return all(within(spec, got.to(dtype), want) for got, want in pairs)

    samples = list(spec.samples(dtype, CPU))
    assert all(passes(spec.oracle, sample) for sample in samples), "the oracle, rounded, is right"
    assert not all(passes(mutant, sample) for sample in samples), wrong
