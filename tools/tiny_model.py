"""Create tiny models with random weights for engine tests; no model hub is used."""

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
    # The default of 0.02 gives logits near zero, which would hide incorrect kernels.
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

EXPERTS = {"num_experts_per_tok": 2}

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
    "mixtral": ("Mixtral", {"head_dim": 64, **EXPERTS, "num_local_experts": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 64,
            **EXPERTS,
            "num_experts": 8,
            "moe_intermediate_size": 128,
            "norm_topk_prob": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **EXPERTS,
            "n_routed_experts": 8,
            "topk_method": "noaux_tc",
            "moe_intermediate_size": 128,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 8,
            "q_lora_rank": 128,
            "kv_lora_rank": 512,  # with 64 rotary dimensions: required by vLLM's CPU kernels
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 64,
            **EXPERTS,
            "num_local_experts": 8,
            "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 64,
            **EXPERTS,
            "num_experts": 8,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "head_dim": 64,
            **EXPERTS,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "intermediate_size_mlp": 512,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],  # 0: no rope and no head norms
        },
    ),
}
"""Name -> class prefix in transformers, and settings in addition to COMMON."""


def make(folder: Path, family: str = "qwen3", *, seed: int = 0, **sizes: object) -> Path:
    """Save a bfloat16 model of `family` in `folder/family` unless it exists; return that path."""
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
            if "norm" in name:  # initialised to ones, which hides how a norm uses its weight
                parameter.add_(torch.rand_like(parameter) - 0.5)
        model = model.to(torch.bfloat16)
    model.save_pretrained(path)
    _named_for_vllm(path)
    return path


def _named_for_vllm(path: Path) -> None:
    """Add `torch_dtype`, which `save_pretrained` may omit, to the configuration."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    config.setdefault("torch_dtype", "bfloat16")
    file.write_text(json.dumps(config, indent=2))
