"""Wrong forms of the ops around experts, with mistakes that kernels make: samples tell them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_fl.contracts import contracts
from vllm_fl.contracts.sizes import typical_sizes
from vllm_fl.engine.wanted import wanted_of, worst
from vllm_fl.integration.bindings import bindings

CPU = torch.device("cpu")
FLOATING = (torch.float32, torch.float16, torch.bfloat16)

SIZES = typical_sizes(bindings().values())

Op = Callable[..., Any]


def mutants() -> Iterator[tuple[str, str, Op]]:
    """(op, what is wrong, a wrong form of it)."""
    yield from (("moe_topk", wrong, op) for wrong, op in wrong_moe_topk())
    yield from (("grouped_topk", wrong, op) for wrong, op in wrong_grouped_topk())


def wrong_moe_topk() -> Iterator[tuple[str, Op]]:
    right = contracts()["moe_topk"].oracle

    def changed(**others: Any) -> Op:
        def op(x: Any, k: int, renormalize: bool, how: str, factor: float, bias: Any) -> Any:
            given = {"renormalize": renormalize, "scoring_func": how}
            given |= {"routed_scaling_factor": factor, "e_score_correction_bias": bias}
            return right(x, k, **{**given, **others})

        return op

    yield "never renormalised", changed(renormalize=False)
    yield "always renormalised", changed(renormalize=True)
    yield "always softmax", changed(scoring_func="softmax")
    yield "always sigmoid", changed(scoring_func="sigmoid")
    yield "not scaled", changed(routed_scaling_factor=1.0)
    yield "bias ignored", changed(e_score_correction_bias=None)
    yield "lowest experts", lambda x, *rest: right(-x, *rest)
    yield "ids of neighbours", lambda *args: (right(*args)[0], right(*args)[1] ^ 1)
    yield "weights of another order", lambda *args: (right(*args)[0].flip(-1), right(*args)[1])

    def biased_weights(
        x: Any, k: int, renormalize: bool, how: str, factor: float, bias: Any
    ) -> Any:
        weights, ids = right(x, k, False, how, 1.0, bias)
        if bias is not None:
            weights = weights + bias.double()[ids.long()]
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * factor, ids

    yield "weights with the bias", biased_weights

    def scaled_first(x: Any, k: int, renormalize: bool, how: str, factor: float, bias: Any) -> Any:
        weights, ids = right(x, k, False, how, factor, bias)
        return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids

    yield "scaled before it is renormalised", scaled_first

    def of_chosen(x: Any, k: int, renormalize: bool, *rest: Any) -> Any:
        if rest[0] != "softmax" or rest[2] is not None:
            return right(x, k, renormalize, *rest)
        return right(x, k, True, *rest)

    yield "softmax of the chosen alone", of_chosen

    def overflowing(x: Any, k: int, renormalize: bool, how: str, factor: float, bias: Any) -> Any:
        if how != "softmax" or bias is not None:
            return right(x, k, renormalize, how, factor, bias)
        powers = x.float().exp()
        weights, ids = (powers / powers.sum(-1, keepdim=True)).topk(k, -1)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * factor, ids

    yield "exp of the logits as they are", overflowing
    yield "packed rows", lambda x, *rest: right(packed(x), *rest)


def wrong_grouped_topk() -> Iterator[tuple[str, Op]]:
    spec = contracts()["grouped_topk"]
    right, names = spec.oracle, spec.parameters

    def changed(**others: Any) -> Op:
        return lambda *args: right(**{**dict(zip(names, args, strict=True)), **others})

    yield "never renormalised", changed(renormalize=False)
    yield "always renormalised", changed(renormalize=True)
    yield "always softmax", changed(scoring_func="softmax")
    yield "always sigmoid", changed(scoring_func="sigmoid")
    yield "not scaled", changed(routed_scaling_factor=1.0)
    yield "bias ignored", changed(e_score_correction_bias=None)
    yield "all groups", lambda x, k, r, g, best, *rest: right(x, k, r, g, g, *rest)
    yield "packed rows", lambda x, *rest: right(packed(x), *rest)
    yield (
        "a group too few",
        lambda x, k, r, g, best, *rest: right(
            x, k, r, g, best - (k <= (best - 1) * (x.shape[1] // g)), *rest
        ),
    )

    def other_worth(counted: Callable[[Any], int]) -> Op:
        """Groups that count as much as this many of their experts, highest first."""

        def op(x: Any, k: int, r: bool, g: int, best: int, how: str, f: float, bias: Any) -> Any:
            scores = x.double().softmax(-1) if how == "softmax" else x.double().sigmoid()
            choice = (scores if bias is None else scores + bias).unflatten(-1, (g, -1))
            number = min(counted(bias), choice.shape[-1])
            worth = choice.sort(-1, descending=True).values[..., :number].sum(-1)
            taken = torch.zeros_like(worth).scatter(-1, worth.topk(best, -1).indices, 1.0).bool()
            masked = choice.masked_fill(~taken.unsqueeze(-1), -float("inf")).flatten(-2)
            ids = masked.topk(k, -1).indices
            weights = scores.gather(-1, ids)
            return (weights / weights.sum(-1, keepdim=True) if r else weights) * f, ids

        return op

    yield "groups by their highest alone", other_worth(lambda bias: 1)
    yield "groups by two without a bias", other_worth(lambda bias: 2)
    yield "groups by all of their experts", other_worth(lambda bias: 1 << 20)

    def masked_with_0(x: Any, k: int, r: bool, g: int, best: int, *rest: Any) -> Any:
        how, f, _ = rest
        scores = x.double().softmax(-1) if how == "softmax" else x.double().sigmoid()
        allowed = spec.outputs[0].scores(x, k, r, g, best, *rest)  # type: ignore[union-attr]
        ids = allowed.nan_to_num(0.0, 0.0, 0.0).topk(k, -1).indices
        weights = scores.gather(-1, ids)
        return (weights / weights.sum(-1, keepdim=True) if r else weights) * f, ids

    yield "other groups masked with 0", masked_with_0


def packed(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes a strided tensor for a contiguous one."""
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage[x.storage_offset() :][: x.numel()].view(x.shape)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize(
    ("op", "wrong", "mutant"), [pytest.param(*m, id=f"{m[0]}, {m[1]}") for m in mutants()]
)
def test_samples_tell_a_wrong_op(op: str, wrong: str, mutant: Op, dtype: torch.dtype) -> None:
    spec = contracts()[op]
    assert any(problems(spec, mutant, sample) for sample in spec.samples(dtype, CPU)), wrong


def problems(spec: Any, op: Op, sample: Any) -> str:
    got, shapes = op(*sample.args), spec.fake(*sample.args)
    pairs = zip(got, shapes, strict=True) if isinstance(got, tuple) else [(got, shapes)]
    results = tuple(mine.to(shape.dtype) for mine, shape in pairs)
    return worst(results if isinstance(got, tuple) else results[0], wanted_of(spec, sample))[1]


@pytest.mark.parametrize("op", ["moe_topk", "grouped_topk"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_samples_take_the_right_op(op: str, dtype: torch.dtype) -> None:
    spec = contracts()[op]
    served = [s for big in (False, True) for s in spec.served(SIZES, dtype, CPU, big)]
    for sample in (*spec.samples(dtype, CPU), *served):
        assert problems(spec, spec.oracle, sample) == "", sample.name
