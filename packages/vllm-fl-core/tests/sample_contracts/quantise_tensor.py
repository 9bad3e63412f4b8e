"""A quantised pair whose one scale depends on every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import (
    BadInput,
    ModelSizes,
    OpSpec,
    QuantisedPair,
    Sample,
    Tolerance,
    Variant,
)
from vllm_fl.contracts.arguments import Problem
from vllm_fl.contracts.sampling import Source

from . import floating_tensor

if TYPE_CHECKING:
    import torch


def quantise_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, hidden) -> float8_e4m3fn of its shape, and one fp32 scale, (1,): max |x| / 448."""
    exact = x.double()
    largest = exact.abs().amax() if x.numel() else exact.new_zeros(())
    return exact, largest.clamp(min=1e-10).reshape(1) / 448


def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(1, dtype=torch.float32)


def _check(x: Any) -> Problem:
    return floating_tensor("x", x)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    yield Sample("1 token", (source.normal(1, 128),))
    yield Sample("9 tokens", (source.normal(9, 64),))
    yield Sample("zeros", (source.normal(2, 64) * 0,))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    for tokens in sizes.tokens:
        x = Source(dtype, device, large).normal(tokens, 64, scale=100.0 if large else 1.0)
        yield Sample(f"{tokens} x 64{', large' * large}", (x,))


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    yield BadInput("integers", (Source(dtype, device).normal(2, 3).long(),), "x")


SPEC = OpSpec(
    oracle=quantise_tensor,
    variants=(Variant("", "(Tensor x) -> (Tensor, Tensor)"),),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"x"}),
    bad_inputs=_bad_inputs,
    tolerances={"float32": Tolerance(1e-6, 0.0, "one division in fp32, of fp32 numbers")},
    dtypes=("float32", "bfloat16"),
    outputs=(QuantisedPair(),),
    whole_batch=True,
)
