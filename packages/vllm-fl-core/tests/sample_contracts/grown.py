"""A contract that has gained a trailing parameter of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_fl.contracts import Sample, Tolerance
from vllm_fl.contracts.arguments import declared, flag, like, scalar, tensor, word
from vllm_fl.contracts.sampling import Source

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


def _samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    source = Source(dtype, device)
    x = source.normal(4, 16)
    yield Sample("as it was", (x, 1.0, "none", False, 0.1, None))
    yield Sample("negate", (x, 1.0, "negate", False, 0.1, None))
    yield Sample("flip", (x, 1.0, "none", True, 0.1, None))
    yield Sample("factor", (x, 1.0, "none", False, 0.5, None))
    yield Sample("bias", (x, 1.0, "none", False, 0.1, source.normal(16)))


SPEC = declared(
    grown,
    {
        "x": tensor("tokens, d"),
        "shift": scalar(),
        "mode": word("none", "negate"),
        "flip": replace(flag(), classes=(bool, object)),  # a test passes a tensor
        "factor": scalar(),
        "bias": tensor("d").optional(),
    },
    (like("x"),),
    samples=_samples,
    tolerances={"float32": Tolerance(1e-5, 1e-5, "a few roundings")},
)
