"""A model whose activation is vLLM's operator, called by name; and an implementation that it gets.

Its folder also has what an installed distribution has, so that vLLM finds the entry point.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from vllm_fl import BackendImplKind, OpImpl, hookimpl

ARCHITECTURE = "DirectQwen3ForCausalLM"


def register() -> None:
    """Give vLLM the model: an entry point of the group `vllm.general_plugins`."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:{ARCHITECTURE}")
    _let_artefacts_load()


def _let_artefacts_load() -> None:
    """On the CPU vLLM saves Inductor's own artefacts, and trips over them when it loads them.

    It asks them for a method that only those of its own compiler have.
    """
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    def finalize_loading(self: Any, vllm_config: Any) -> None:
        """Nothing is left to load."""

    BundledAOTAutogradSerializableCallable.finalize_loading = finalize_loading


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """In float32 to the end."""
    gate, up = x.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


@hookimpl
def register_ops() -> list[OpImpl]:
    return [OpImpl("silu_and_mul", "vendor.direct", BackendImplKind.VENDOR, silu_and_mul, "direct")]


class Activation(torch.nn.Module):
    """silu_and_mul as a fused kernel, or a model of one hardware, calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        torch.ops._C.silu_and_mul(out, x)
        return out


def __getattr__(name: str) -> Any:
    """The model's class: vLLM's models may be imported only where one is built."""
    if name != ARCHITECTURE:
        raise AttributeError(name)
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    class DirectQwen3ForCausalLM(Qwen3ForCausalLM):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            for layer in self.model.layers:
                layer.mlp.act_fn = Activation()

    DirectQwen3ForCausalLM.__module__ = __name__
    DirectQwen3ForCausalLM.__qualname__ = name
    globals()[name] = DirectQwen3ForCausalLM
    return DirectQwen3ForCausalLM
