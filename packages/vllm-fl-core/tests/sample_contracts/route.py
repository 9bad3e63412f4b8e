"""A routing: softmax, and the k highest experts of each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.contracts import ModelSizes, Routing, Sample, Tolerance
from vllm_fl.contracts.arguments import FLOATING, declared, flag, integer, tensor
from vllm_fl.contracts.sampling import Source

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


SPEC = declared(
    route,
    {
        "logits": tensor("tokens, experts"),
        "top_k": integer("1 <= value <= experts"),
        "renormalise": flag(),
    },
    (tensor("tokens, top_k", "float32"), tensor("tokens, top_k", "int32")),
    samples=_samples,
    served=_served,
    tolerances={"float32": Tolerance(1e-5, 1e-7, "a softmax in fp32, with a fast exp")},
    dtypes=FLOATING,
    outputs=(Routing(_scores, margin=1e-6),),
)
