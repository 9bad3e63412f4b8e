"""A quantised pair whose one scale depends on every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.contracts import ModelSizes, QuantisedPair, Sample, Tolerance
from vllm_fl.contracts.arguments import declared, tensor
from vllm_fl.contracts.sampling import Source

if TYPE_CHECKING:
    import torch


def quantise_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, hidden) -> float8_e4m3fn of its shape, and one fp32 scale, (1,): max |x| / 448."""
    exact = x.double()
    largest = exact.abs().amax() if x.numel() else exact.new_zeros(())
    return exact, largest.clamp(min=1e-10).reshape(1) / 448


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


SPEC = declared(
    quantise_tensor,
    {"x": tensor("tokens, hidden")},
    (tensor("tokens, hidden", "float8_e4m3fn"), tensor("1", "float32")),
    samples=_samples,
    served=_served,
    tolerances={"float32": Tolerance(1e-6, 0.0, "one division in fp32, of fp32 numbers")},
    dtypes=("float32", "bfloat16"),
    outputs=(QuantisedPair(),),
    whole_batch=True,
)
