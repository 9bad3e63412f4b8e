"""Names that are promised: the ids of implementations and the ops that one distribution may bring.

They are what settings and documentation promise by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..contracts import OPS
from .installed import canonical
from .plugin import Owner, Plugin

__all__ = [
    "OPS",
    "RESERVED_OPS",
    "TOOLS",
    "VERIFY",
    "brings_ops",
    "may_extend",
    "op_holder",
    "reservation",
    "why_absent",
]

RESERVED = {
    "reference.": "vllm-fl-reference",
    "default.flagos": "vllm-fl-flaggems",
    "stock.": None,
}
"""Ids, or what they begin with, and the one distribution that may use them; None: nobody."""

VERIFY, TOOLS = "vllm-fl-verify", "vllm-fl-tools"
EXTENDERS = frozenset((VERIFY, TOOLS))
"""The distributions that may have extensions."""

RESERVED_OPS = frozenset(
    (
        "causal_conv1d",
        "causal_conv1d_update",
        "chunk_gated_delta_rule",
        "concat_and_cache_mla",
        "fatrelu_and_mul",
        "fused_experts",
        "gdn_gating",
        "gelu_and_mul",
        "gelu_and_mul_sparse",
        "gelu_fast",
        "gelu_new",
        "grouped_topk",
        "layer_norm",
        "linear",
        "linear_fp8",
        "linear_gelu_tanh_and_mul",
        "linear_silu_and_mul",
        "merge_attn_states",
        "moe_align_block_size",
        "moe_sum",
        "moe_topk",
        "mul_and_silu",
        "multimodal_rotary_embedding",
        "qk_norm_rope",
        "quant_fp8",
        "quant_fp8_group",
        "quant_int8",
        "quick_gelu",
        "recurrent_gated_delta_rule",
        "relu2",
        "reshape_and_cache",
        "rms_norm",
        "rms_norm_gated",
        "rotary_embedding",
        "silu_and_mul",
        "silu_and_mul_with_clamp",
        "swigluoai_and_mul",
        "xielu",
    )
)
"""The ops whose contracts are those of `OPS`. This is the one table of core's that names ops."""


def reservation(impl_id: str, owner: Owner) -> str:
    """Why `owner` may not use this id; empty when it may.

    What has no distribution (a script, a module that the user named) is held to `stock.` alone.
    """
    for reserved, holder in RESERVED.items():
        is_prefix = reserved.endswith(".")
        given = impl_id.lower()
        if not (given.startswith(reserved) if is_prefix else given == reserved):
            continue
        ids = f"ids that begin with {reserved!r}" if is_prefix else f"the id {reserved!r}"
        if holder is None:
            return f"{ids} mean vLLM's own path and are nobody's to use"
        if owner.distribution is not None and canonical(owner.distribution) != holder:
            return f"{ids} {'are' if is_prefix else 'is'} {holder}'s to use"
    return ""


def brings_ops(owner: Owner) -> bool:
    """Whether it is the distribution whose ops these are."""
    return owner.distribution is not None and canonical(owner.distribution) == OPS


def may_extend(distribution: str | None) -> bool:
    """Whether a distribution may have extensions."""
    return distribution is not None and canonical(distribution) in EXTENDERS


def op_holder(op: str, owner: Owner) -> str:
    """Who alone may bring a contract of this name, where that is not `owner`; else empty."""
    return OPS if op in RESERVED_OPS and not brings_ops(owner) else ""


def why_absent(plugins: Iterable[Plugin]) -> str:
    """Why an op of `OPS` has no contract among these plugins, and what to do; a clause."""
    for plugin in plugins:
        if not brings_ops(plugin.owner):
            continue
        if plugin.status == "disabled":
            return f"VLLM_FL_PLUGINS leaves out {OPS}"
        if plugin.status == "ok":
            return f"{plugin.owner.name} does not have it: pip install --upgrade {OPS}"
        return f"{OPS} failed to load: `vllm-fl plugins` says why"
    return f"{OPS} is not installed: pip install {OPS}"
