"""A model with an activation that calls vLLM's operator by name, and an implementation for it. The
folder has the metadata of an installed distribution, so vLLM finds the entry point."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from vllm_fl import BackendImplKind, OpImpl, hookimpl

ARCHITECTURE = "DirectQwen3ForCausalLM"


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: registers the model."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:{ARCHITECTURE}")
    _let_artefacts_load()


def _let_artefacts_load() -> None:
    """Work around a vLLM fault on the CPU: loading Inductor artefacts calls `finalize_loading`,
    which only artefacts of vLLM's compiler have."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    def finalize_loading(self: Any, vllm_config: Any) -> None:
        """No-op: an Inductor artefact is already loaded."""

    BundledAOTAutogradSerializableCallable.finalize_loading = finalize_loading


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Rounds once, at the end; float32 until then."""
    gate, up = x.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


@hookimpl
def register_ops() -> list[OpImpl]:
    return [OpImpl("silu_and_mul", "vendor.direct", BackendImplKind.VENDOR, silu_and_mul, "direct")]


class Activation(torch.nn.Module):
    """Calls the operator silu_and_mul as a fused kernel or a hardware-specific model does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        torch.ops._C.silu_and_mul(out, x)
        return out


def __getattr__(name: str) -> Any:
    """Import the model's class lazily: vLLM's models may be imported only while one is built."""
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
