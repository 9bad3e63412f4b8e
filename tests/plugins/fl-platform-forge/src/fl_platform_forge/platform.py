"""The platform: vLLM's CPU with what this vendor overrides; its names are inherited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENABLED = ("+RMSNorm", "+SiluAndMul", "+RotaryEmbedding")


def register_attention() -> None:
    """Put the vendor's backend in the place of the one that vLLM has for the device."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(
        AttentionBackendEnum.CPU_ATTN, "fl_platform_forge.attention.ForgeAttentionBackend"
    )


class ForgePlatform(CpuPlatform):
    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        register_attention()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "fl_platform_forge.communicator.ForgeCommunicator"

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        register_attention()
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        from vllm.config import CompilationMode

        super().check_and_update_config(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.mode != CompilationMode.NONE:
            from .passes import ForgePass

            # vLLM's default for Inductor is `none`, which would leave the vendor's layers out.
            compilation.custom_ops += [op for op in ENABLED if op not in compilation.custom_ops]
            compilation.inductor_compile_config["post_grad_custom_post_pass"] = ForgePass()
