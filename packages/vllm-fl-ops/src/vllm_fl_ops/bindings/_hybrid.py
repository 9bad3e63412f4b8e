"""Sizes of linear attention, Mamba and short convolutions, and which models have them."""

from __future__ import annotations

from typing import Any

from vllm_fl.contracts.binding import SizeRule

from ..contracts.rules import first_set

CONVOLVING = (
    *(
        f"vllm.model_executor.layers.mamba.{name}"
        for name in (
            "gdn.kimi_gdn_linear_attn",
            "gdn.olmo_gdn_linear_attn",
            "gdn.qwen_gdn_linear_attn",
            "mamba_mixer",
            "mamba_mixer2",
            "short_conv",
        )
    ),
    "vllm.model_executor.models.bailing_moe_v3",
    "vllm.models.glm5next.common.kda",
    "vllm.models.kimi_k3.amd.kda",
    "vllm.models.kimi_k3.nvidia.kda",
)
"""The modules that import vLLM's short convolutions by name."""

NULL_BLOCK = 0
"""The block in vLLM's caches that no sequence uses."""

FLA_EPSILON = 1e-6
"""The epsilon that vLLM's Triton kernels add to a head's squared length."""

CPU_EPSILON = 1e-5
"""The epsilon of the CPU build's recurrent kernel, instead of `FLA_EPSILON`. The chunked kernel has
a parameter for it."""


def has_states(config: Any) -> bool:
    """Return whether a model keeps states, with or without a KV cache.

    vLLM determines this from the model's class, because names in configurations differ.
    """
    model = config.model_config
    return bool(model.is_hybrid or model.is_attention_free)


def activation_of(activation: bool | str | None) -> str | None:
    """Return the contracts' name of an activation in vLLM's short convolutions."""
    return "silu" if activation in (True, "silu", "swish") else None


_KERNELS = (
    "linear_conv_kernel_dim",
    "conv_L_cache",
    "mamba_d_conv",
    "conv_kernel",
    "conv_kernel_size",
    "mamba_conv_kernel",
)
_STATES = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_BIASES = ("mamba_conv_bias", "use_conv_bias", "conv_bias")
"""Configuration names of the sizes of Mamba and of other short convolutions."""


def _text(config: Any) -> Any:
    return config.model_config.hf_text_config


def _ranks(config: Any) -> int:
    return int(config.parallel_config.tensor_parallel_size)


def mamba_width(config: Any) -> int:
    """Inner width of a Mamba layer, for all ranks together."""
    text = _text(config)
    whole = first_set(text, ("mamba_d_ssm", "mamba_intermediate_size"))
    if whole is None:
        heads = first_set(text, ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"))
        each = first_set(text, ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"))
        whole = heads * each
    return int(whole)


def _kimi(config: Any) -> Any:
    """The configuration of Kimi's delta attention, or an empty dictionary."""
    return getattr(_text(config), "linear_attn_config", None) or {}


def _conv_features(config: Any) -> int:
    """Features of a short convolution on one rank."""
    text, ranks = _text(config), _ranks(config)
    if getattr(text, "linear_num_value_heads", None):
        keys = int(text.linear_num_key_heads) * int(text.linear_key_head_dim)
        values = int(text.linear_num_value_heads) * int(text.linear_value_head_dim)
        return (2 * keys + values) // ranks
    if own := _kimi(config):
        return int(own["num_heads"]) * int(own["head_dim"]) // ranks
    if getattr(text, "conv_L_cache", None):
        return int(getattr(text, "conv_dim", None) or text.hidden_size) // ranks
    states = int(first_set(text, _GROUPS)) * int(first_set(text, _STATES))
    return (mamba_width(config) + 2 * states) // ranks


def _conv_taps(config: Any) -> int:
    own = _kimi(config)
    return int(own["short_conv_kernel_size"] if own else first_set(_text(config), _KERNELS))


def _linear(name: str, typical: int, *, shared: bool = False) -> SizeRule:
    """Rule for a size of linear attention; a `shared` size is divided among the ranks."""

    def ask(config: Any) -> int:
        value = int(getattr(_text(config), name.replace("linear_", "linear_num_", shared)))
        return value // _ranks(config) if shared else value

    return SizeRule(name, ask, typical, in_kit=False)


LINEAR_VALUE_HEADS = _linear("linear_value_heads", 8, shared=True)
LINEAR_SIZES = (
    _linear("linear_key_heads", 4, shared=True),
    _linear("linear_key_head_dim", 128),
    LINEAR_VALUE_HEADS,
    _linear("linear_value_head_dim", 128),
)
CONV_SIZES = (
    SizeRule("conv_bias", lambda config: bool(first_set(_text(config), _BIASES)), 0, in_kit=False),
    SizeRule("conv_features", _conv_features, 2048, in_kit=False),
    SizeRule("conv_taps", _conv_taps, 4, in_kit=False),
)
