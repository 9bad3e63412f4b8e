"""Sizes of latent attention (MLA) from the configuration; 0 for other models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_fl.contracts.binding import SizeRule


def _make_reader(name: str) -> Callable[[Any], int]:
    def ask(config: Any) -> int:
        model = config.model_config
        return (
            int(getattr(model.hf_text_config, name, None) or 0)
            if getattr(model, "use_mla", False)
            else 0
        )

    return ask


KV_RANK = SizeRule("kv_lora_rank", _make_reader("kv_lora_rank"), 0, in_kit=False)
Q_RANK = SizeRule("q_lora_rank", _make_reader("q_lora_rank"), 0, in_kit=False)
ROPE_SIZE = SizeRule("qk_rope_head_dim", _make_reader("qk_rope_head_dim"), 0, in_kit=False)
VALUE_SIZE = SizeRule("v_head_dim", _make_reader("v_head_dim"), 0, in_kit=False)
