"""Tables of release 0.2.0: what they call things, and what of them still holds.

They may act until the release after the next: this module, and what asks it, goes with 0.4.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType

from ..contracts import OpSpec
from .digest import CORE, digest

__all__ = ["CONTRACTS", "HOLDS", "was_measured"]

HOLDS = MappingProxyType({CORE: "0.2.0"})
"""Distribution -> the release of it with which a table was measured that still holds."""

CONTRACTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "causal_conv1d": ("02937e901216934c", "02eb0dcaf1a81e60"),
        "causal_conv1d_update": ("d79446a46551e88a", "f68df00b3a342b1f"),
        "chunk_gated_delta_rule": ("c344191aa73482d4", "a88fd1db322f322e"),
        "concat_and_cache_mla": ("b0b25f886908d76c", "550f41e9b4a71498"),
        "fatrelu_and_mul": ("c93c894fb0a38c5f", "90adb95791e3399b"),
        "fused_experts": ("1b8aaca1ef9b4347", "5ae5c55bb11ecb6a"),
        "gdn_gating": ("150f01704332a0d0", "ec2a0055a2d23b1d"),
        "gelu_and_mul": ("3fcc30933cd93402", "3dc3ccf73bf2db90"),
        "gelu_and_mul_sparse": ("680fc833dd43b583", "61018a184f506732"),
        "gelu_fast": ("802e51b299d9d312", "63f3f5a8f2e24aab"),
        "gelu_new": ("23820d3aaeaeff41", "d4479c6e861622c4"),
        "grouped_topk": ("97e3f049ab56f5fe", "71fcddaebdd654d7"),
        "layer_norm": ("8db05c2e20f93942", "2d84558a373e1cb1"),
        "linear": ("63e7687d405ac0f1", "44953435d22c82c8"),
        "merge_attn_states": ("b30c27aeb1473667", "96f291c7349df25a"),
        "moe_align_block_size": ("c089d11e10df5dd2", "c7166d0274c4d1b9"),
        "moe_sum": ("555b288da1c2241b", "c755d712e1e23f32"),
        "moe_topk": ("25f9a448aa889b86", "e47f0017438a44f9"),
        "mul_and_silu": ("22dbe4d07d237601", "e14e73e184f0afea"),
        "multimodal_rotary_embedding": ("c50f2a2fcf0fb09a", "35c15c256cd337c0"),
        "qk_norm_rope": ("1f6c8e7fa4294162", "87c8ac00466884e3"),
        "quant_fp8": ("ef1a8fbb6f3b1b82", "df07bf0215f6ce28"),
        "quant_fp8_group": ("e11d7dce0f77b811", "43eba8b59d324e7c"),
        "quant_int8": ("63fe7835eb3c07c1", "327224d72f1537fd"),
        "quick_gelu": ("5342e704a8698793", "78f9e7b3033a8c1a"),
        "recurrent_gated_delta_rule": ("6724e52fa3fdf4f7", "88faf80e0ebd3479"),
        "relu2": ("c921d9833ac156e2", "b90a6664a5948f06"),
        "reshape_and_cache": ("287042bc88d7f500", "ec8d1ac35d231627"),
        "rms_norm": ("3b27983e146d2546", "2a0d8b28cf8bcf9f"),
        "rms_norm_gated": ("593a3298077f59ea", "7470d3d66b340899"),
        "rotary_embedding": ("6874adb9a0ef934f", "45c7d3dac2dcb2f4"),
        "silu_and_mul": ("5d6261ea3638c97e", "4ba6b830864b2004"),
        "silu_and_mul_with_clamp": ("ebba594662b1b19b", "783a109b55128a3a"),
        "swigluoai_and_mul": ("622415966dc42259", "c2b39a49cee37820"),
        "xielu": ("eb6ee437f7efc88d", "eacc2fb10c316b45"),
    }
)
"""Op -> the digest of its contract in such tables; `contract_digest` of that same contract.

A contract that means something else than in 0.2.0 has no entry: such tables do not hold for it.
"""


def was_measured(spec: OpSpec, told: str, now: str) -> bool:
    """Whether a table of 0.2.0 was measured by a contract.

    Args:
        spec: the contract.
        told: its digest, as the table has it.
        now: its digest.
    """
    if spec.name in CONTRACTS:
        return (told, now) == CONTRACTS[spec.name]
    return told == _of_source(spec)


def _of_source(spec: OpSpec) -> str:
    """As 0.2.0 had it: a hash of the source of the contract's module."""
    module = inspect.getmodule(spec.oracle)
    try:
        source = inspect.getsource(module) if module is not None else ""
    except OSError:  # a contract that was made at a prompt
        source = ""
    return digest({"op": spec.name, "source": source})
