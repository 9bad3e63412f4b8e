"""What the contracts of activations have in common that take no parameter but x."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.checks import Problem, floating_tensor, gated_tensor
from vllm_fl.contracts.sampling import (
    Source,
    activation_inputs,
    bad_activation_inputs,
    bad_gated_inputs,
    served_activation_inputs,
    served_gated_inputs,
)
from vllm_fl.contracts.spec import BadInput, ModelSizes, OpSpec, Sample, Tolerance, Variant

if TYPE_CHECKING:
    import torch

__all__ = ["activation"]

Oracle = Callable[["torch.Tensor"], "torch.Tensor"]


def activation(
    oracle: Oracle,
    second_form: Oracle,
    tolerances: Mapping[str, Tolerance],
    *,
    gated: bool = False,
    special: bool = True,
) -> OpSpec:
    """The contract of an activation.

    Args:
        oracle: the op of (x), in fp64.
        second_form: the same by another formula.
        tolerances: by dtype.
        gated: whether x has two halves, (..., 2 * d), and the result one, (..., d).
        special: whether NaN must give NaN, and infinity infinity.
    """
    parts = 2 if gated else 1
    served_inputs = served_gated_inputs if gated else served_activation_inputs
    bad = bad_gated_inputs if gated else bad_activation_inputs

    def fake(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // parts))

    def check(x: Any) -> Problem:
        return gated_tensor("x", x) if gated else floating_tensor("x", x)

    def samples(dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
        source = Source(dtype, device)
        for name, x in activation_inputs(source, parts):
            yield Sample(name, (x,))
        if special:
            broken = source.normal(5, parts * 256)
            broken[1, 7], broken[3, 200] = float("nan"), float("inf")
            yield Sample("NaN and infinity", (broken,))

    def served(
        sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
    ) -> Iterator[Sample]:
        for name, x, scale in served_inputs(sizes, dtype, device, large):
            yield Sample(name, (x,), scale)

    def bad_inputs(dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
        for name, x in bad(Source(dtype, device)):
            yield BadInput(name, (x,), "x")

    return OpSpec(
        oracle=oracle,
        variants=(Variant("", "(Tensor x) -> Tensor"),),
        fake=fake,
        check=check,
        samples=samples,
        served=served,
        by_token=frozenset({"x"}),
        bad_inputs=bad_inputs,
        second_form=second_form,
        tolerances=tolerances,
    )
