"""Results that are tensors only by type, and late faults, disable only their kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import BoundLayer, managing, planning
from of_acme import acme
from of_acme import silu_and_mul as sound
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.types import OpImpl
from vllm_fl_verify.live import Live
from vllm_fl_verify.preflight import find_faults
from vllm_fl_verify.trials import Request, Role

CPU = torch.device("cpu")
SIZES = ModelSizes(16, 16, 2, 1, 8, 8, tokens=(1, 8))


class Spoilt(Tensor):
    """A tensor that cannot be subtracted."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.sub, Tensor.__sub__, Tensor.detach, Tensor.to, Tensor.double):
            raise ValueError("no numbers here")
        return super().__torch_function__(func, types, args, kwargs or {})


def fake(result: Tensor) -> Any:
    with FakeTensorMode() as mode:
        return mode.from_tensor(result)


ODD: dict[str, Callable[[Tensor], Any]] = {
    "a FakeTensor": fake,
    "a functional tensor": torch._to_functional_tensor,
    "a Spoilt": lambda result: result.as_subclass(Spoilt),
    "a zero tensor": lambda result: torch._efficientzerotensor(result.shape, dtype=result.dtype),
    "a tensor with the negative bit": lambda result: torch._neg_view(-result),
    "nested": lambda result: torch.nested.as_nested_tensor([*result]),
}


def kernel(name: str, odd: Callable[[Tensor], Any]) -> OpImpl:
    return acme("silu_and_mul", lambda x: odd(sound(x)), name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_result_that_is_no_plain_tensor_is_named_and_the_next_is_tried() -> None:
    impls = [kernel(f"acme{number}", odd) for number, odd in enumerate(ODD.values())]
    good = [kernel("good", lambda result: result), kernel("owner", nn.Parameter)]
    found = find_faults(
        Request([*map(Role, [*impls, *good])], torch.float32, CPU, SIZES, calls=0)
    ).objections
    assert set(found) == {("silu_and_mul", impl.impl_id) for impl in impls}
    for said, fault in zip(ODD, found.values(), strict=True):
        assert f"the result is {said}" in fault.reason
        assert "expected a plain tensor" in fault.reason


@pytest.mark.parametrize("said", ["a Spoilt", "a FakeTensor"])
def test_in_a_layer_too(said: str) -> None:
    plan = planning(managing(kernel("acme", ODD[said])), "eager")
    model = BoundLayer(plan)
    live = Live(plan, {"": model}, CPU)
    with live.watching():
        assert model(torch.randn(8, 16)).shape == (8, 8), "the layers behind go on"
    assert said in live.objections["silu_and_mul", "vendor.acme"].reason
