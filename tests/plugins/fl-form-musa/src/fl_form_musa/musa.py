"""The backend: one method per op, the calling layer first."""

from __future__ import annotations

from vllm_fl.dispatch.backends.base import Backend


class MusaBackend(Backend):
    """Emulated Musa: available if torch is."""

    _available: bool | None = None

    @property
    def name(self) -> str:
        return "musa"

    @property
    def vendor(self) -> str | None:
        return "musa"

    def is_available(self) -> bool:
        if MusaBackend._available is None:
            try:
                import torch

                MusaBackend._available = torch.get_num_threads() > 0
            except ImportError:
                MusaBackend._available = False
        return MusaBackend._available

    def silu_and_mul(self, obj, x):
        from .impl.activation import silu_and_mul_musa

        return silu_and_mul_musa(obj, x)

    def rms_norm(self, obj, x, residual=None):
        from .impl.normalization import rms_norm_musa

        return rms_norm_musa(obj, x, residual)

    def rotary_embedding(
        self, obj, query, key, cos, sin, position_ids, rotary_interleaved=False, inplace=True
    ):
        from .impl.rotary import rotary_embedding_musa

        return rotary_embedding_musa(
            obj, query, key, cos, sin, position_ids, rotary_interleaved, inplace
        )

    def attention_backend(self, use_mla=False, use_sparse=False) -> str:
        if use_mla or use_sparse:
            raise NotImplementedError("no MLA on this device")
        return "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
