"""A contract that has gained a trailing parameter of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant
from vllm_fl.contracts.arguments import Problem
from vllm_fl.contracts.sampling import Source

from . import floating_tensor

if TYPE_CHECKING:
    import torch


def grown(
    x: torch.Tensor,
    shift: float,
    mode: str = "none",
    flip: bool = False,
    factor: float = 0.1,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x + shift) * factor * 10, negative for `negate`, backwards for `flip`, plus `bias`."""
    out = (x.double() + shift) * factor * 10
    out = -out if mode == "negate" else out
    out = out.flip(-1) if flip else out
    return out if bias is None else out + bias.double()


def _fake(
    x: torch.Tensor,
    shift: float,
    mode: str = "none",
    flip: bool = False,
    factor: float = 0.1,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _check(
    x: Any, shift: Any, mode: Any = "none", flip: Any = False, factor: Any = 0.1, bias: Any = None
) -> Problem:
    return floating_tensor("x", x)


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    x = source.normal(4, 16)
    yield Sample("as it was", (x, 1.0, "none", False, 0.1, None))
    yield Sample("negate", (x, 1.0, "negate", False, 0.1, None))
    yield Sample("flip", (x, 1.0, "none", True, 0.1, None))
    yield Sample("factor", (x, 1.0, "none", False, 0.5, None))
    yield Sample("bias", (x, 1.0, "none", False, 0.1, source.normal(16)))


def _served(
    sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
) -> Iterator[Sample]:
    for tokens in sizes.tokens:
        x = Source(dtype, device, large).normal(tokens, 16)
        yield Sample(f"{tokens} x 16", (x, 1.0, "none", False, 0.1, None))


def _bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    x = Source(dtype, device).normal(2, 3).long()
    yield BadInput("integers", (x, 1.0, "none", False, 0.1, None), "x")


SPEC = OpSpec(
    oracle=grown,
    variants=(
        Variant(
            "",
            '(Tensor x, float shift, str mode="none", bool flip=False, float factor=0.1, '
            "Tensor? bias=None) -> Tensor",
        ),
    ),
    fake=_fake,
    check=_check,
    samples=_samples,
    served=_served,
    by_token=frozenset({"x"}),
    bad_inputs=_bad_inputs,
    tolerances={"float32": Tolerance(1e-5, 1e-5, "a few roundings")},
)
