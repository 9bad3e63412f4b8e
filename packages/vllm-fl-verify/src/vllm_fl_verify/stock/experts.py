"""Comparison of some experts of each mixture with their dequantised weights, while vLLM loads them.

One-hot inputs do not reveal single weights, because an activation follows the first product. A
weight that is wrong by a few percent is therefore not detected.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from vllm_fl.contracts import OpSpec

from ..expected import Near
from .rows import RowKey, StockRows
from .weights import dequantised

COMPARED_EXPERTS = 8
"""Number of compared experts per layer."""

TOKENS = (1, 17, 256)

OF_EXPERTS = "dequantised weights of 8 experts"

COARSE = {torch.int8: 0.08, torch.float8_e4m3fn: 0.25}
"""Tolerance for quantised activations before each product, relative to the root mean square of a
row and feature, by dtype of the weights: at least six standard deviations of these roundings. Half
a million results of a correct kernel reach five."""

MERGED = 1.3
"""Factor of this tolerance if gate and up have a scale each: five roundings instead of three. vLLM
quantises their weights again with the larger scale."""

ROUNDINGS = 4
"""Tolerance for other roundings, in steps of the result's dtype at the same size."""

MADE_UP = 'scales that are not positive (load_format="dummy")'
"""Reason for no comparison. Such weights are nearly all 0, so rounding errors are larger."""


class Experts:
    """Copies of some experts of one layer, made before vLLM converts the weights.

    Args:
        layer: the layer.
        generator: draws the experts and the calls.
    """

    def __init__(self, layer: Any, generator: torch.Generator) -> None:
        self.layer, self.generator = layer, generator
        config = layer.moe_config
        count = int(config.num_local_experts)
        some = max(COMPARED_EXPERTS, int(config.experts_per_token))
        self.chosen = torch.randperm(count, generator=generator)[:some].sort().values
        self.held = {
            name: value.detach()[self.chosen.to(value.device)].clone()
            for name, value in layer._parameters.items()
            if value is not None and value.shape[:1] == (count,) and not value.is_meta
        }

    def compare(self, rows: StockRows, key: RowKey, name: str, spec: OpSpec) -> None:
        """Compare calls that use only these experts with the op's reference result."""
        method, layer = self.layer.quant_method, self.layer
        wanted = inspect.signature(method.apply).parameters
        if not {"x", "topk_weights", "topk_ids"} <= wanted.keys() or method.is_monolithic:
            return rows.skip(key, name, "the class also computes the routing")
        coarse = max(COARSE.get(value.dtype, 0.0) for value in self.held.values())
        scales = self.held.get("w13_weight_scale")
        coarse *= MERGED if scales is not None and scales.shape[1:] == (2,) else 1
        if coarse and any("scale" in n and bool((v <= 0).any()) for n, v in self.held.items()):
            return rows.skip(key, name, MADE_UP)
        hidden, inner = layer.hidden_size, layer.moe_config.intermediate_size_per_partition
        first = self._weights("w13_", (2 * inner, hidden), [inner, inner])
        second = self._weights("w2_", (hidden, inner), [hidden])
        if first is None or second is None:
            return rows.skip(key, name, f"unknown format: {', '.join(sorted(self.held))}")
        dtype, device = layer.params_dtype, first.device
        how = layer.activation.value, layer.apply_router_weight_on_input
        biases = {name: self.held.get(name) for name in ("w13_bias", "w2_bias")}
        # Features of blocks with larger scales have larger errors.
        loud = second.square().mean((0, 2)).sqrt().clamp(min=torch.finfo(second.dtype).tiny)
        for tokens in TOKENS:
            x = torch.randn(tokens, hidden, generator=self.generator, dtype=torch.float32)
            x = x.to(device, dtype)
            size = (x[0].to(first.dtype) @ first[0].mT).square().mean().sqrt()
            # For dummy weights in fp8 it is 1e-8 or less, and vLLM rounds the activation to 0.
            x *= (1 / size).clamp(max=torch.finfo(dtype).max / 2**8).to(dtype)
            ids, weights = (each.to(device) for each in self._routing(tokens))
            given = {**dict.fromkeys(wanted), "layer": layer, "x": x, "topk_weights": weights}
            got = method.apply(**given | {"topk_ids": self._global(ids)})
            exact = spec.oracle(x, first, second, weights, ids, *how, **biases)
            step = torch.finfo(dtype).eps
            size = loud * (exact / loud).square().mean(1, keepdim=True).sqrt()
            allowed = step * exact.abs() + (ROUNDINGS * step + coarse) * size
            share, problem = Near(exact, allowed, dtype).deviation([got], ["the result"], None)
            rows.add(key, name, share, problem and f"{problem}; {tokens} random rows")

    def _weights(self, prefix: str, shape: tuple[int, int], widths: list[int]) -> Tensor | None:
        block = getattr(self.layer, "weight_block_size", None)
        named = ((name, value) for name, value in self.held.items() if name.startswith(prefix))
        own = {name.removeprefix(prefix): value for name, value in named}
        found = []
        for at in range(len(self.chosen)):
            one = {name: value[at] for name, value in own.items()}
            weight = dequantised(one, shape, widths, block)
            if weight is None:
                return None
            found.append(weight)
        return torch.stack(found)

    def _routing(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return (numbers of the chosen experts, weights) of random tokens."""
        k, count = int(self.layer.moe_config.experts_per_token), len(self.chosen)
        # The default dtype is that of the model while vLLM loads it.
        given: dict[str, Any] = {"generator": self.generator, "dtype": torch.float32}
        order = torch.rand(tokens, count, **given).argsort(1)
        weights = torch.rand(tokens, k, **given) + 0.1
        return order[:, :k], weights / weights.sum(1, keepdim=True)

    def _global(self, ids: Tensor) -> Tensor:
        """Return the numbers of experts over all ranks."""
        numbers = self.chosen.to(ids.device)
        placed = self.layer.expert_map
        if placed is not None:
            numbers = torch.stack([(placed == number).nonzero()[0, 0] for number in numbers])
        wanted: Any = getattr(self.layer.quant_method, "topk_indices_dtype", None)
        return numbers[ids].to(wanted or torch.int32)
