"""Configurations of the measured models, for vLLM with dummy weights."""

from __future__ import annotations

from typing import Any

__all__ = ["MODEL", "MODELS"]

Config = dict[str, Any]

MODEL: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Configuration of Qwen3-8B."""

EXPERTS: Config = {
    **MODEL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 24,  # of 48, so that several engines fit
    "num_key_value_heads": 4,
}

LLAMA: Config = {
    **MODEL,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "vocab_size": 128_256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
}

NEMO: Config = {
    **MODEL,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 5120,
    "intermediate_size": 14336,
    "num_hidden_layers": 28,  # of 40, so that several engines fit
    "vocab_size": 131_072,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}

GEMMA: Config = {
    **MODEL,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 1024,
    "layer_types": ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(34)],
}

SMALL: Config = {
    **MODEL,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}

SEVEN: Config = {
    **MODEL,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
}

YI: Config = {
    **LLAMA,
    "intermediate_size": 11008,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 64_000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000,
    "max_position_embeddings": 4096,
}

MODELS: dict[str, tuple[Config, dict[str, Any]]] = {
    "qwen3-8b": (MODEL, {}),
    "llama-3.1-8b": (LLAMA, {}),
    "gemma-3-4b": (GEMMA, {}),
    "mistral-nemo": (NEMO, {}),
    "qwen2.5-1.5b": (SMALL, {}),
    "qwen2.5-7b": (SEVEN, {}),
    "yi-1.5-9b": (YI, {}),
    "qwen3-30b-a3b": (EXPERTS, {}),
    "qwen3-8b-fp8": (MODEL, {"quantization": "fp8"}),
}
"""Name -> (configuration, further arguments of vllm.LLM)."""
