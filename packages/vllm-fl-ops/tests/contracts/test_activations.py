"""Wrong forms of the activations: the contracts' own samples and tolerances tell each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from vllm_fl.contracts import contracts

Op = Callable[..., torch.Tensor]

CPU = torch.device("cpu")
ORACLES = {name: spec.oracle for name, spec in contracts().items()}


def swapped(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)


def paired(x: torch.Tensor) -> torch.Tensor:
    """As if gate and up projection took turns."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def mutants() -> Iterator[tuple[str, str, Op]]:
    """(op, what is wrong, a wrong form of it in fp64)."""
    for op in ("gelu_new", "gelu_fast"):
        yield op, "quick_gelu", ORACLES["quick_gelu"]
        yield op, "erf", lambda x: F.gelu(x.double())
        yield op, "silu", lambda x: F.silu(x.double())
        yield op, "cubic term missing", lambda x: x.double() * (1.5957691 * x.double()).sigmoid()
        yield op, "half of it missing", lambda x, op=op: 2 * ORACLES[op](x)
        yield op, "sqrt(2 * pi)", lambda x: x.double() * (5.0 * x.double()).sigmoid()
    yield "quick_gelu", "silu", lambda x: F.silu(x.double())
    yield "quick_gelu", "gelu_new", ORACLES["gelu_new"]
    yield "quick_gelu", "erf", lambda x: F.gelu(x.double())
    yield "quick_gelu", "1.7", lambda x: x.double() * (1.7 * x.double()).sigmoid()
    yield "quick_gelu", "-1.702", lambda x: x.double() * (-1.702 * x.double()).sigmoid()
    yield "relu2", "not squared", lambda x: F.relu(x.double())
    yield "relu2", "squared first", lambda x: x.double().square()
    yield "relu2", "its sign kept", lambda x: x.double() * x.double().abs()
    yield "relu2", "relu6", lambda x: F.relu6(x.double()).square()
    yield "relu2", "cubed", lambda x: F.relu(x.double()) ** 3
    silu = ORACLES["silu_and_mul"]
    yield "mul_and_silu", "swapped halves", silu
    yield "mul_and_silu", "pairs", lambda x: ORACLES["mul_and_silu"](paired(x))
    yield "mul_and_silu", "gelu", lambda x: ORACLES["gelu_and_mul"](swapped(x), "tanh")
    yield "mul_and_silu", "no product", lambda x: F.silu(x.double().chunk(2, -1)[1])
    yield (
        "mul_and_silu",
        "sigmoid",
        lambda x: x.double().chunk(2, -1)[0] * swapped(x).double().chunk(2, -1)[0].sigmoid(),
    )
    clamped = ORACLES["silu_and_mul_with_clamp"]
    yield "silu_and_mul_with_clamp", "swapped halves", lambda x, *n: clamped(swapped(x), *n)
    yield "silu_and_mul_with_clamp", "pairs", lambda x, *n: clamped(paired(x), *n)
    yield "silu_and_mul_with_clamp", "limit of 7", lambda x, limit, *n: clamped(x, 7.0, *n)
    yield "silu_and_mul_with_clamp", "no clamp", lambda x, limit, *n: clamped(x, 1e30, *n)
    yield "silu_and_mul_with_clamp", "alpha ignored", lambda x, m, a, b: clamped(x, m, 1.0, b)
    yield "silu_and_mul_with_clamp", "beta ignored", lambda x, m, a, b: clamped(x, m, a, 0.0)
    yield "silu_and_mul_with_clamp", "beta of gpt-oss", lambda x, m, a, b: clamped(x, m, a, 1.0)

    def gate_from_below(x: torch.Tensor, limit: float, *n: float) -> torch.Tensor:
        gate, up = x.double().chunk(2, -1)
        return clamped(torch.cat((gate.clamp(min=-limit), up), -1), limit, *n)

    def up_from_above(x: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
        gate, up = x.double().chunk(2, -1)
        gate = gate.clamp(max=limit)
        return gate * (alpha * gate).sigmoid() * (up.clamp(max=limit) + beta)

    def clamped_after(x: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
        gate, up = x.double().chunk(2, -1)
        return (gate * (alpha * gate).sigmoid()).clamp(max=limit) * (up.clamp(-limit, limit) + beta)

    yield "silu_and_mul_with_clamp", "gate clamped from below, too", gate_from_below
    yield "silu_and_mul_with_clamp", "up clamped from above alone", up_from_above
    yield "silu_and_mul_with_clamp", "gate clamped behind silu", clamped_after
    fatrelu = ORACLES["fatrelu_and_mul"]
    yield "fatrelu_and_mul", "swapped halves", lambda x, t: fatrelu(swapped(x), t)
    yield "fatrelu_and_mul", "pairs", lambda x, t: fatrelu(paired(x), t)
    yield "fatrelu_and_mul", "relu", lambda x, t: fatrelu(x, 0.0)
    yield "fatrelu_and_mul", "no gate", lambda x, t: fatrelu(x, -1e30)
    yield "fatrelu_and_mul", "at the threshold, too", lambda x, t: fatrelu(x, t - 1e-9)
    yield (
        "fatrelu_and_mul",
        "the threshold in place of 0",
        lambda x, t: F.threshold(x.double().chunk(2, -1)[0], t, t) * x.double().chunk(2, -1)[1],
    )
    yield (
        "fatrelu_and_mul",
        "by magnitude",
        lambda x, t: F.hardshrink(x.double().chunk(2, -1)[0], abs(t)) * x.double().chunk(2, -1)[1],
    )
    sparse = ORACLES["gelu_and_mul_sparse"]
    yield "gelu_and_mul_sparse", "swapped halves", lambda x, m, a: sparse(swapped(x), m, a)
    yield "gelu_and_mul_sparse", "dense", lambda x, m, a: ORACLES["gelu_and_mul"](x, a)
    yield "gelu_and_mul_sparse", "1.6448536 for all", lambda x, m, a: sparse(x, 1.6448536, a)
    yield "gelu_and_mul_sparse", "always erf", lambda x, m, a: sparse(x, m, "none")

    def sparsely(x: torch.Tensor, cutoff: torch.Tensor, approximate: str) -> torch.Tensor:
        gate, up = x.double().chunk(2, -1)
        return F.gelu(F.relu(gate - cutoff), approximate=approximate) * up

    def no_mean(x: torch.Tensor, m: float, a: str) -> torch.Tensor:
        return sparsely(x, x.double().chunk(2, -1)[0].std(-1, correction=0, keepdim=True) * m, a)

    def of_everything(x: torch.Tensor, m: float, a: str) -> torch.Tensor:
        std, mean = torch.std_mean(x.double(), -1, correction=0, keepdim=True)
        return sparsely(x, mean + std * m, a)

    def cut_and_kept(x: torch.Tensor, m: float, a: str) -> torch.Tensor:
        gate, up = x.double().chunk(2, -1)
        std, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
        return F.gelu(gate.where(gate > mean + std * m, 0.0), approximate=a) * up

    def one_fewer(x: torch.Tensor, m: float, a: str) -> torch.Tensor:
        std, mean = torch.std_mean(x.double().chunk(2, -1)[0], -1, correction=1, keepdim=True)
        return sparsely(x, mean + std * m, a)

    yield "gelu_and_mul_sparse", "cutoff without the mean", no_mean
    yield "gelu_and_mul_sparse", "deviation of both halves", of_everything
    yield "gelu_and_mul_sparse", "cutoff not subtracted", cut_and_kept
    yield "gelu_and_mul_sparse", "divided by d - 1", one_fewer
    learned = ORACLES["xielu"]
    yield "xielu", "slopes swapped", lambda x, p, n, b, e: learned(x, n, p, b, e)
    yield "xielu", "beta ignored", lambda x, p, n, b, e: learned(x, p, n, 0 * b, e)
    yield (
        "xielu",
        "alpha_n without beta",
        lambda x, p, n, b, e: (
            learned(x, p, n, b, e)
            - b.double() * (x.double().clamp(max=0).expm1() - x.double()) * (x < 0)
        ),
    )
    yield (
        "xielu",
        "no softplus",
        lambda x, p, n, b, e: learned(x, p.double().expm1().clamp(min=1e-9).log(), n, b, e),
    )
    yield "xielu", "never below 0", lambda x, p, n, b, e: learned(x.clamp(min=0), p, n, b, e)
    yield (
        "xielu",
        "square below 0, too",
        lambda x, p, n, b, e: (
            F.softplus(p.double()) * x.double().square() + b.double() * x.double()
        ),
    )


FINE = {"erf", "1.7", "gelu_new", "always erf", "divided by d - 1"}
"""Nearer to the op than a dtype of 16 bits is."""

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

CASES = [
    pytest.param(op, mutant, dtype, id=f"{op}: {wrong}, {name}")
    for op, wrong, mutant in mutants()
    for dtype, name in DTYPES.items()
    if dtype is torch.float32 or wrong not in FINE
]


@pytest.mark.parametrize(("op", "mutant", "dtype"), CASES)
def test_a_wrong_form_is_told(op: str, mutant: Op, dtype: torch.dtype) -> None:
    spec = contracts()[op]
    bound = spec.tolerance(dtype)
    results = [
        (mutant(*sample.args).to(dtype).double(), spec.oracle(*sample.args))
        for sample in spec.samples(dtype, CPU)
        if not sample.name.startswith("NaN")
    ]
    assert not all(torch.allclose(*pair, rtol=bound.rtol, atol=bound.atol) for pair in results)


def test_there_are_five_wrong_forms_of_each_activation() -> None:
    ops = [op for op, _, _ in mutants()]
    assert all(ops.count(op) >= 5 for op in ops)
