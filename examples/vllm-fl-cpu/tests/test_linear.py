"""The classes for quantised linear layers, in addition to the conformance kit."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from quantised_layers import draw, vllm_process
from torch import nn

from vllm_fl_cpu.impl.linear import Int8Linear, WNA16Linear
from vllm_fl_cpu.plugin import linear_kernels

__all__ = ["draw", "vllm_process"]


def test_the_hook_has_these_classes() -> None:
    paths = {impl.class_path for impl in linear_kernels()}
    assert paths == {f"{cls.__module__}.{cls.__name__}" for cls in (Int8Linear, WNA16Linear)}


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_activations_of_a_fused_layer_have_one_range(
    symmetric: bool, draw: random.Random
) -> None:
    """Two parts with different ranges: numbers of both are near their values afterwards."""
    from vllm.model_executor.kernels.linear import Int8ScaledMMLinearLayerConfig

    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    config = Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=True, is_channelwise=True, input_symmetric=symmetric
    )
    kernel: Any = Int8Linear(config, names)
    layer: Any = nn.Module()
    layer.logical_widths = [2, 2]
    tensors = {
        "weight": torch.tensor([[1, 0], [0, 1], [2, 0], [0, 3]], dtype=torch.int8),
        "weight_scale": torch.tensor([[0.5], [1.0], [2.0], [1.0]], dtype=torch.float32),
        "input_scale": torch.tensor([0.01, draw.uniform(0.02, 0.04)], dtype=torch.float32),
        "input_zero_point": torch.tensor([-100, 0], dtype=torch.int32),
    }
    for name, tensor in tensors.items():
        setattr(layer, name, nn.Parameter(tensor, requires_grad=False))
    if symmetric:
        layer.input_zero_point = None
    kernel.process_weights_after_loading(layer)
    x = torch.tensor([[1.0, 2.0], [-0.5, 0.25]], dtype=torch.float32)
    exact = x @ (tensors["weight"].float() * tensors["weight_scale"]).t()
    got = kernel.apply_weights(layer, x)
    assert (got - exact).abs().max() <= float(layer.input_scale) * 4


def test_other_devices_and_formats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.platforms import current_platform
    from vllm.scalar_type import scalar_types

    layer = {"full_weight_shape": (64, 64), "partition_weight_shape": (64, 64), "group_size": 64}
    layer |= {"zero_points": False, "act_type": torch.bfloat16}
    fp4 = MPLinearLayerConfig(weight_type=scalar_types.float4_e2m1f, **layer)
    assert WNA16Linear.can_implement(fp4)[1] == "no code for weights of float4_e2m1f"
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    int4 = MPLinearLayerConfig(weight_type=scalar_types.uint4b8, **layer)
    for can, why in (Int8Linear.is_supported(), WNA16Linear.can_implement(int4)):
        assert (can, why) == (False, "it is for CPUs")
