"""Tiny models with random weights, for real engine runs; nothing comes from a model hub."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["FAMILIES", "make"]

COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    # The default spread of 0.02 gives logits near zero, in which a wrong kernel would hide.
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": ("Qwen3", {"head_dim": 64}),
    "llama": (
        "Llama",
        {
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 128,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "phi": ("Phi3", {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 512}),
}
"""Name -> transformers' class prefix and what it has beside COMMON."""


def make(folder: Path, family: str = "qwen3", *, seed: int = 0, **sizes: int) -> Path:
    """Save a model of this family into `folder/family`, in bfloat16, and return that folder."""
    import torch
    import transformers

    path = folder / family
    if (path / "config.json").exists():
        return path
    prefix, own = FAMILIES[family]
    config_cls = getattr(transformers, f"{prefix}Config")
    model_cls = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    config = config_cls(**{**COMMON, **own, **sizes})
    torch.manual_seed(seed)
    with torch.no_grad():
        model = model_cls(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # made as ones, which would hide how a norm uses its weight
                parameter.add_(torch.rand_like(parameter) - 0.5)
        model = model.to(torch.bfloat16)
    model.save_pretrained(path)
    _named_for_vllm(path)
    return path


def _named_for_vllm(path: Path) -> None:
    """Add what a served checkpoint states and `save_pretrained` may leave out."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.setdefault("torch_dtype", "bfloat16")
    file.write_text(json.dumps(config, indent=2))
