"""Layers of vLLM with random weights in checkpoint formats, for tests without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

__all__ = ["FEATURES", "OUT", "draw", "made", "vllm_process"]

OUT, FEATURES = (128, 64), 256
"""The sizes of `made`."""


@pytest.fixture
def draw() -> random.Random:
    seed = random.randrange(10**9)
    print(f"seed {seed}")  # pytest shows it if the test fails
    return random.Random(seed)


@pytest.fixture(scope="module", autouse=True)
def vllm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of one rank, and a configuration of bfloat16."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    before = torch.get_default_dtype()
    store = tmp_path_factory.mktemp("store") / "store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        yield
        torch.set_default_dtype(before)
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def made(form: str, draw: random.Random, **more: Any) -> Any:
    """A fused layer of vLLM with random weights in a checkpoint format."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    bits = {"int8": 8, "int8 asymmetric": 8, "int4": 4, "int4 with zeros": 4}.get(form)
    weights = {"num_bits": bits, "type": "int", "symmetric": "zeros" not in form, "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    activations["symmetric"] = "asymmetric" not in form
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "input_activations": activations if bits == 8 else None,
    }
    group["weights"] = weights | (
        {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": 64}
    )
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "ignore": [],
        "config_groups": {"group_0": group},
    }
    quant = bits and compressed_tensors.CompressedTensorsConfig.from_config(config)
    name = f"model.layers.{draw.randrange(30)}.mlp.gate_up_proj"
    layer = MergedColumnParallelLinear(
        FEATURES, list(OUT), bias=True, quant_config=quant or None, prefix=name, **more
    )
    pick = torch.Generator().manual_seed(draw.randrange(2**31))
    for parameter_name, parameter in layer.named_parameters():
        shape, dtype = parameter.shape, parameter.dtype
        if not dtype.is_floating_point:
            drawn = torch.randint(torch.iinfo(dtype).min, 2**31 - 1, shape, generator=pick)
            drawn = drawn if dtype.itemsize > 1 else drawn % 255 - 127
        elif "scale" in parameter_name:
            drawn = torch.rand(shape, generator=pick, dtype=torch.float32) * 0.01 + 0.005
        else:
            drawn = torch.randn(shape, generator=pick, dtype=torch.float32)
        parameter.data = drawn.to(dtype)
    return layer
