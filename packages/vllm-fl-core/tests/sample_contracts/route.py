"""A routing: softmax, and the k highest experts of each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import BadInput, ModelSizes, OpSpec, Routing, Sample, Tolerance, Variant
from vllm_fl.contracts.arguments import Problem
from vllm_fl.contracts.sampling import Source

from . import floating_tensor

if TYPE_CHECKING:
    import torch


def route(
    logits: torch.Tensor, top_k: int, renormalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, experts) -> weights, fp32, and ids, int32, both (tokens, top_k), highest first."""
    weights, ids = _scores(logits, top_k).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), ids


def _scores(logits: torch.Tensor, top_k: int, renormalise: bool = True) -> torch.Tensor:
    return logits.double().softmax(-1)


def _fake(
    logits: torch.Tensor, top_k: int, renormalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _check(logits: Any, top_k: Any, renormalise: Any = True) -> Problem:
    problem = floating_tensor("logits", logits)
    if problem is None and not 1 <= top_k <= logits.shape[-1]:
        return "top_k", f"must be from 1 to {logits.shape[-1]}, got {top_k}"
    return problem


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    for renormalise in (True, False):
        how = "" if renormalise else ", plain"
        yield Sample(f"1 token{how}", (source.normal(1, 16), 2, renormalise))
        yield Sample(f"0 tokens{how}", (source.normal(0, 16), 2, renormalise))
        yield Sample(f"9 tokens{how}", (source.normal(9, 33), 4, renormalise))
        yield Sample(f"every expert{how}", (source.normal(3, 4), 4, renormalise))
        ties = source.normal(6, 16)
        ties[:, 3] = ties[:, 8] = ties[:, 12] = 5.0  # three for the last two places
        ties[:, 5] = 6.0
        yield Sample(f"ties{how}", (ties, 3, renormalise))
        near = ties.clone()
        near[:, 8] = 5.0 + (4e-7 if dtype.itemsize == 4 else 0.0)
        yield Sample(f"near ties{how}", (near, 2, renormalise))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    for tokens in sizes.tokens:
        logits = Source(dtype, device, large).normal(tokens, 64, scale=20.0 if large else 1.0)
        yield Sample(f"{tokens} x 64{', large' * large}", (logits, 8, True))


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    source = Source(dtype, device)
    yield BadInput("integers", (source.normal(2, 3).long(), 1, True), "logits")
    yield BadInput("too many", (source.normal(2, 3), 4, True), "top_k")


SPEC = OpSpec(
    oracle=route,
    variants=(
        Variant("", "(Tensor logits, SymInt top_k, bool renormalise=True) -> (Tensor, Tensor)"),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"logits"}),
    bad_inputs=_bad_inputs,
    tolerances={"float32": Tolerance(1e-5, 1e-7, "a softmax in fp32, with a fast exp")},
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Routing(_scores, margin=1e-6),),
)
