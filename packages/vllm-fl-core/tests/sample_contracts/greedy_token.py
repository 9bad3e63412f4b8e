"""Ids, which are compared exactly: the first highest logit of each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.contracts import Exact, ModelSizes, Sample
from vllm_fl.contracts.arguments import FLOATING, declared, tensor
from vllm_fl.contracts.sampling import Source

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


SPEC = declared(
    greedy_token,
    {"logits": tensor("tokens, vocabulary")},
    (tensor("tokens", "int64"),),
    samples=_samples,
    served=_served,
    dtypes=FLOATING,
    outputs=(Exact(),),
)
