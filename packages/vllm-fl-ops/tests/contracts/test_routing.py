"""Wrong forms of the ops around experts, with mistakes that kernels make: samples tell them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_fl.contracts import contracts
from vllm_fl.engine.wanted import closed, wanted_of, worst
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ops.contracts.rules import typical_sizes

CPU = torch.device("cpu")
SIZES = typical_sizes(known_contracts().bindings.values())

Op = Callable[..., Any]


def mutants() -> Iterator[tuple[str, str, Op]]:
    """(op, what is wrong, a wrong form of it)."""
    yield from (("moe_topk", wrong, op) for wrong, op in wrong_moe_topk())
    yield from (("grouped_topk", wrong, op) for wrong, op in wrong_grouped_topk())
    yield from (("moe_sum", wrong, op) for wrong, op in wrong_moe_sum())
    yield from (("moe_align_block_size", wrong, op) for wrong, op in wrong_alignments())


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


def wrong_moe_sum() -> Iterator[tuple[str, Op]]:
    right = contracts()["moe_sum"].oracle
    yield "ids ignored", lambda x, ids, here: right(x, None, None)
    yield "map ignored", lambda x, ids, here: right(x, ids, None)
    yield (
        "map the other way round",
        lambda x, ids, here: right(x, ids, None if here is None else -1 - here),
    )
    yield (
        "-1 taken for the last expert",
        lambda x, ids, here: right(
            x, None if ids is None else ids % (1 << 30 if here is None else len(here)), here
        ),
    )
    yield (
        "multiplied by 0",
        lambda x, ids, here: right(x if ids is None else x * (ids >= 0).unsqueeze(-1), None, None),
    )
    yield "mean", lambda x, ids, here: right(x, ids, here) / x.shape[1]
    yield (
        "last expert left out",
        lambda x, ids, here: right(x[:, :-1], None if ids is None else ids[:, :-1], here),
    )
    yield "packed rows", lambda x, ids, here: right(packed(x), ids, here)
    yield (
        "packed ids",
        lambda x, ids, here: right(
            x, ids if ids is None or ids.is_contiguous() else packed(ids), here
        ),
    )
    yield (
        "sum in 8 bits",
        lambda x, ids, here: right(x.bfloat16(), ids, here).bfloat16() * (1 + 2**-6),
    )


def wrong_alignments() -> Iterator[tuple[str, Op]]:
    right = contracts()["moe_align_block_size"].oracle

    def changed(change: Callable[..., Any]) -> Op:
        """Other results: (rows, experts, places in use), of a call with these arguments."""
        return lambda ids, *rest: change(*right(ids, *rest), ids, *rest)

    yield "map ignored", lambda ids, size, count, here, *rest: right(ids, size, count, None, *rest)
    yield "experts elsewhere have rows", lambda *x: right(*x[:5], False)
    yield "experts elsewhere have none", lambda *x: right(*x[:5], True)
    yield "-1 taken for the last expert", lambda ids, size, n, *x: right(ids % n, size, n, *x)
    yield "-1 taken for the first expert", lambda ids, *x: right(ids.clamp(min=0), *x)
    yield "packed ids", lambda ids, *x: right(packed(ids), *x)
    yield "one expert fewer", lambda ids, *x: right(ids.masked_fill(ids == x[1] - 1, -1), *x)
    yield "padding is 0", changed(lambda r, e, n, ids, *x: (r % max(ids.numel(), 1), e, n))
    yield "padding is -1", changed(lambda r, e, n, ids, *x: (r.where(r < ids.numel(), -1), e, n))
    yield "rows are tokens", changed(lambda r, e, n, ids, *x: (r // ids.shape[1], e, n))
    yield "padding first", changed(lambda r, e, n, ids, size, *x: (by_block(r, n, size), e, n))
    yield "experts last first", changed(lambda r, e, n, ids, size, *x: (r, last_first(e, n), n))
    yield "experts of neighbours", changed(lambda r, e, n, *x: (r, e ^ 1, n))
    yield "places without padding", changed(lambda r, e, n, ids, *x: (r, e, n - padded(r, n, ids)))
    yield "every place is in use", changed(lambda r, e, n, *x: (r, e, n * 0 + len(r)))
    yield "a block too few", changed(lambda r, e, n, ids, size, *x: (r, e, (n - size).clamp(min=0)))
    yield "a row lost", changed(lambda r, e, n, ids, *x: (r.where(r != 3, ids.numel()), e, n))
    yield "a row twice", changed(lambda r, e, n, ids, *x: (r.where(r != 3, 2), e, n))
    yield "two rows swapped", changed(lambda r, e, n, ids, *x: (swapped(r, ids.numel()), e, n))


def by_block(rows: torch.Tensor, used: torch.Tensor, size: int) -> torch.Tensor:
    """The rows of each block from the last place of it on."""
    turned = rows.clone()
    turned[: int(used)] = rows[: int(used)].view(-1, size).flip(1).flatten()
    return turned


def last_first(experts: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    return experts.flip(0) if int(used) else experts


def padded(rows: torch.Tensor, used: torch.Tensor, ids: torch.Tensor) -> int:
    return int((rows[: int(used)] == ids.numel()).sum())


def swapped(rows: torch.Tensor, padding: int) -> torch.Tensor:
    """The first row in the place of the last one."""
    first, last = rows[:1], rows[rows < padding][-1:]
    return torch.where(rows == first, last, rows.where(rows != last, first)) if len(rows) else rows


def packed(x: torch.Tensor) -> torch.Tensor:
    """What a kernel reads that takes a strided tensor for a contiguous one."""
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage[x.storage_offset() :][: x.numel()].view(x.shape)


@pytest.mark.parametrize(
    ("op", "wrong", "mutant"), [pytest.param(*m, id=f"{m[0]}, {m[1]}") for m in mutants()]
)
def test_samples_tell_a_wrong_op(op: str, wrong: str, mutant: Op) -> None:
    spec = contracts()[op]
    for dtype in dtypes(spec):
        assert any(problems(spec, mutant, sample) for sample in spec.samples(dtype, CPU)), wrong


def dtypes(spec: Any) -> list[torch.dtype]:
    return [getattr(torch, name) for name in spec.dtypes]


def problems(spec: Any, op: Op, sample: Any) -> str:
    got, shapes = op(*sample.args), spec.fake(*sample.args)
    pairs = zip(got, shapes, strict=True) if isinstance(got, tuple) else [(got, shapes)]
    results = tuple(mine.to(shape.dtype) for mine, shape in pairs)
    compared = closed(results if isinstance(got, tuple) else results[0], sample)
    return worst(compared, wanted_of(spec, sample))[1]


@pytest.mark.parametrize("op", ["moe_topk", "grouped_topk", "moe_sum", "moe_align_block_size"])
def test_samples_take_the_right_op(op: str) -> None:
    spec = contracts()[op]
    for dtype in dtypes(spec):
        served = [s for big in (False, True) for s in spec.served(SIZES, dtype, CPU, big)]
        for sample in (*spec.samples(dtype, CPU), *served):
            assert problems(spec, spec.oracle, sample) == "", sample.name


def test_the_rows_of_an_expert_come_in_any_order_over_its_blocks() -> None:
    spec = contracts()["moe_align_block_size"]

    def last_rows_first(ids: torch.Tensor, *rest: Any) -> Any:
        rows, experts, used = spec.oracle(ids, *rest)
        by_expert = rows[: int(used)].split(rest[0])
        found = experts[: len(by_expert)].unique()
        for expert in found[found >= 0]:  # -1 is many experts
            own = torch.cat([b for b, e in zip(by_expert, experts, strict=False) if e == expert])
            own = own[own < ids.numel()].flip(0)
            rows[torch.isin(rows, own).nonzero().flatten()] = own
        rows[int(used) :] = 7  # what is behind them is anything
        experts[len(by_expert) :] = 7
        return rows, experts, used

    for sample in spec.samples(torch.int32, CPU):
        assert problems(spec, last_rows_first, sample) == "", sample.name


def test_a_map_on_another_device_is_refused() -> None:
    ids = torch.zeros(2, 2, dtype=torch.int32)
    here = torch.zeros(4, dtype=torch.int32, device="meta")
    verdict = contracts()["moe_align_block_size"].check(ids, 4, 4, here, False, False)
    assert verdict == ("expert_map", "must be on topk_ids's device cpu, got meta")
