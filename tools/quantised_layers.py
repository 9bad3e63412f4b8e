"""Layers of vLLM with random weights in checkpoint formats, for tests without an engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import silu, threshold

from vllm_fl_tools.testing.quantised import FORMS, quantisation_of
from vllm_fl_tools.testing.quantised import made_experts as experts
from vllm_fl_tools.testing.quantised import vllm_process as one_rank
from vllm_fl_verify.quantised import fill

__all__ = [
    "FAULTS",
    "FEATURES",
    "OUT",
    "Fault",
    "draw",
    "faulty",
    "keeping",
    "made",
    "made_experts",
    "no_fault",
    "one_group",
    "plain_experts",
    "vllm_process",
]

OUT, FEATURES = (128, 64), 256
"""The sizes of `made`."""

Fault = Callable[[Any, random.Random], None]
"""Changes the tensors of a layer before they are converted."""


@pytest.fixture
def draw() -> random.Random:
    seed = random.randrange(10**9)
    print(f"seed {seed}")  # pytest shows it if the test fails
    return random.Random(seed)


@pytest.fixture(scope="module", autouse=True)
def vllm_process() -> Iterator[None]:
    with one_rank(torch.bfloat16):
        yield


def made(form: str, draw: random.Random, **more: Any) -> Any:
    """A fused layer of vLLM with random weights in a checkpoint format."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    quant = quantisation_of(form) if form in FORMS else None
    name = f"model.layers.{draw.randrange(30)}.mlp.gate_up_proj"
    layer = MergedColumnParallelLinear(
        FEATURES, list(OUT), bias=True, quant_config=quant, prefix=name, **more
    )
    fill(layer, torch.Generator().manual_seed(draw.randrange(2**31)))
    return layer


_numbers = itertools.count()
"""vLLM rejects a second layer of experts with the same name."""


def made_experts(draw: random.Random) -> Any:
    """vLLM's layer of eight int8 experts with random weights."""
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
    layer = experts("int8", f"model.layers.{next(_numbers)}.mlp.experts", sizes)
    fill(layer, torch.Generator().manual_seed(draw.randrange(2**31)))
    return layer


def plain_experts(change: Callable[[torch.Tensor], object]) -> type:
    """vLLM's class of int8 experts in plain PyTorch, because vLLM's kernels require AMX. `change`
    gets the result."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt8

    class Plain(CPUExpertsInt8):  # type: ignore[misc]
        _supports_current_device = staticmethod(lambda: True)

        def process_weights_after_loading(self, layer: Any) -> None: ...

        def apply(self, **given: Any) -> None:
            chosen, output = given["topk_ids"], given["output"]
            up = given["w1"][chosen] * self.quant_config.w1_scale[chosen]
            down = given["w2"][chosen] * self.quant_config.w2_scale[chosen]
            inner = torch.einsum("tkoi,ti->tko", up, given["hidden_states"].float())
            gate, value = inner.chunk(2, -1)
            # vLLM's quantisation has a smallest scale, so activations below its step become 0.
            activated = threshold(silu(gate).mul(value).abs(), 1e-8, 0).copysign(gate * value)
            each = torch.einsum("tkoi,tki->tko", down, activated)
            output.copy_((given["topk_weights"][..., None] * each).sum(1))
            change(output)

    return Plain


def one_channel(layer: Any, draw: random.Random) -> None:
    layer.weight_scale.data[draw.randrange(len(layer.weight_scale))] *= 1.05


def one_group(layer: Any, draw: random.Random) -> None:
    scale = layer.weight_scale.data
    scale[draw.randrange(scale.shape[0]), draw.randrange(scale.shape[1])] *= 1.05


def order_of_groups(layer: Any, draw: random.Random) -> None:
    scale, group = layer.weight_scale.data, draw.randrange(layer.weight_scale.shape[1] - 1)
    scale[:, [group, group + 1]] = scale[:, [group + 1, group]]


def zero_point(layer: Any, draw: random.Random) -> None:
    zeros = layer.weight_zero_point.data
    row, column = draw.randrange(zeros.shape[0]), draw.randrange(zeros.shape[1])
    zeros[row, column] ^= 1 << 4 * draw.randrange(8)


def one_weight(layer: Any, draw: random.Random) -> None:
    own = "weight" if hasattr(layer, "weight") else "weight_packed"
    weight = getattr(layer, own).data
    # The highest bit of a number: a smaller change may be within the rounding of the result.
    bit = 1 << (6 if weight.dtype == torch.int8 else 4 * draw.randrange(7) + 3)
    weight[draw.randrange(weight.shape[0]), draw.randrange(weight.shape[1])] ^= bit


def no_fault(layer: Any, draw: random.Random) -> None:
    pass


FAULTS: dict[str, tuple[Fault, ...]] = {
    "int8": (one_channel, one_weight),
    "int4": (one_group, order_of_groups, one_weight),
    "int4 with zeros": (zero_point,),
}
"""Form -> faults in weights of this form."""


def faulty(base: Any, fault: Fault, draw: random.Random, unwritten: int = 0) -> Any:
    """A class over vLLM's that changes the layer before vLLM's class converts it, or does not write
    the last rows of a result."""

    class Faulty(base):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            fault(layer, draw)
            super().process_weights_after_loading(layer)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            result: Any = super().apply_weights(layer, x, bias)
            if unwritten and len(result) > unwritten:
                result[-unwritten:] = 0
            return result

    return Faulty


def keeping(base: Any) -> Any:
    """A class over vLLM's that keeps the first scales. After an update their values are in other
    tensors."""

    class Keeping(base):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            self.scale = layer.weight_scale

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            result = super().apply_weights(layer, x, bias)
            return result if layer.weight_scale is self.scale else result * 2

    return Keeping
