"""Sizes of latent attention (MLA) from the configuration; 0 for other models."""

from __future__ import annotations

from typing import Any

from vllm_fl.contracts.binding import SizeRule


def _size(name: str) -> SizeRule:
    def ask(config: Any) -> int:
        model = config.model_config
        is_latent = getattr(model, "use_mla", False)
        return int(getattr(model.hf_text_config, name, None) or 0) if is_latent else 0

    return SizeRule(name, ask, 0, in_kit=False)


KV_RANK, Q_RANK = _size("kv_lora_rank"), _size("q_lora_rank")
ROPE_SIZE, VALUE_SIZE = _size("qk_rope_head_dim"), _size("v_head_dim")
