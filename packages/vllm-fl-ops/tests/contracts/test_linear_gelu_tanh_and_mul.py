"""What of the product with gelu is its own; the rest it shares with `linear_silu_and_mul`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from vllm_fl.contracts import ModelSizes, Sample, contracts
from vllm_fl.engine.verification import compare
from vllm_fl.plugins.types import BackendImplKind, OpImpl

SPEC = contracts()["linear_gelu_tanh_and_mul"]
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
SERVED = ModelSizes(hidden=512, tokens=(4,), more={"dense_intermediate": 384})

Activation = Callable[[Tensor], Tensor]
by_tanh = partial(gelu, approximate="tanh")


def by_sigmoid(gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate**3))


def overflowing(gate: Tensor) -> Tensor:
    power = (1.5957691216 * (gate + 0.044715 * gate**3)).float().exp()
    return (gate * power / (1 + power)).double()


def is_wrong(samples: Iterable[Sample], dtype: torch.dtype, activation: Activation) -> bool:
    """Whether a sample tells a product with this activation from the op, on either side."""

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
        return (activation(gate) * up).to(x.dtype)

    impl = OpImpl(SPEC.name, "vendor.acme", BackendImplKind.VENDOR, fn, "acme")
    return any(compare(impl, SPEC, sample, dtype).status != "ok" for sample in samples)


WRONG: dict[str, Activation] = {
    "silu": silu,
    "quick gelu": lambda gate: gate * (1.702 * gate).sigmoid(),
    "relu": torch.relu,
    "no activation": lambda gate: gate,
    "without the cube": lambda gate: gate * (1.5957691216 * gate).sigmoid(),
    "the sigmoid of half": lambda gate: gate * (0.79788456 * (gate + 0.044715 * gate**3)).sigmoid(),
    "NaN for far gates": overflowing,
}


@DTYPES
@pytest.mark.parametrize("activation", WRONG.values(), ids=WRONG)
def test_samples_tell_a_wrong_activation(activation: Activation, dtype: torch.dtype) -> None:
    assert is_wrong(SPEC.samples(dtype, CPU), dtype, activation)


@DTYPES
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("activation", [by_tanh, by_sigmoid], ids=["tanh", "sigmoid"])
def test_both_forms_of_it_are_right(
    activation: Activation, large: bool, dtype: torch.dtype
) -> None:
    samples = [*SPEC.samples(dtype, CPU), *SPEC.served(SERVED, dtype, CPU, large)]
    assert not is_wrong(samples, dtype, activation)


def test_float32_tells_the_form_by_the_error_function() -> None:
    """Halves do not: they differ by 5e-4 at most."""
    assert is_wrong(SPEC.samples(torch.float32, CPU), torch.float32, gelu)
    assert not is_wrong(SPEC.samples(torch.bfloat16, CPU), torch.bfloat16, gelu)
