"""Ids, which are compared exactly: the first highest logit of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import BadInput, Exact, ModelSizes, OpSpec, Sample, Variant
from vllm_fl.contracts.arguments import Problem
from vllm_fl.contracts.sampling import Source

from . import floating_tensor

if TYPE_CHECKING:
    import torch


def greedy_token(logits: torch.Tensor) -> torch.Tensor:
    """(tokens, vocabulary) -> the id of each row's highest logit, int64; of equal ones the first.

    The docstring of a contract in use names its arguments, results, errors and source.
    """
    import torch

    ids = torch.arange(logits.shape[-1]).expand(logits.shape)
    best = logits == logits.amax(-1, keepdim=True)
    return ids.masked_fill(~best, logits.shape[-1]).amin(-1)


def _fake(logits: torch.Tensor) -> torch.Tensor:
    import torch

    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


def _check(logits: Any) -> Problem:
    problem = floating_tensor("logits", logits)
    if problem is None and logits.ndim != 2:
        return "logits", f"must be (tokens, vocabulary), got {tuple(logits.shape)}"
    return problem


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    yield Sample("1 token", (source.normal(1, 100),))
    yield Sample("0 tokens", (source.normal(0, 100),))
    yield Sample("odd sizes", (source.normal(7, 37),))
    ties = source.normal(5, 64)
    ties[:, 9] = ties[:, 40] = 9.0
    yield Sample("ties", (ties,))
    yield Sample("strided", (source.normal(4, 128)[:, ::2],))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    for tokens in sizes.tokens:
        logits = Source(dtype, device, large).normal(tokens, 257, scale=100.0 if large else 1.0)
        yield Sample(f"{tokens} x 257{', large' * large}", (logits,))


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    source = Source(dtype, device)
    yield BadInput("integers", (source.normal(2, 3).long(),), "logits")
    yield BadInput("3-D", (source.normal(2, 3, 4),), "logits")


SPEC = OpSpec(
    oracle=greedy_token,
    variants=(Variant("", "(Tensor logits) -> Tensor"),),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"logits"}),
    bad_inputs=_bad_inputs,
    dtypes=("float32", "float16", "bfloat16"),
    outputs=(Exact(),),
)
