"""Typical sizes of public models, of which the kit tries the calls of each op.

Plain data, as the models' own configurations tell it, on one rank. What a model does not have is
left out, so that an op has the calls of those models alone that use it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from vllm_fl.contracts import ModelSizes, OpSpec, Sample
from vllm_fl.contracts.batches import STANDING_COUNTS
from vllm_fl.logs import get_logger
from vllm_fl.text import quote
from vllm_fl_verify.trials import as_provided

__all__ = [
    "COUNTS",
    "FAMILIES",
    "Family",
    "calls_of",
    "families_of",
    "served_dtype",
    "smaller",
]

log = get_logger("testing")

COUNTS = (1, 5, 17, 130)
"""Token counts of a family's calls: decoding, and beyond tiles of 16 and 128 rows."""

MOST = 2**26
"""Elements of all calls of a family with one token, beyond which an op leaves it out: products of
the largest models take seconds, and smaller models show the same."""


@dataclass(frozen=True)
class Family:
    """One public model.

    Args:
        name: its configuration's, on the Hugging Face hub.
        sizes: of one rank.
        provided: op -> the dtypes in which its layers provide weights, where that is not its own.
    """

    name: str
    sizes: ModelSizes
    provided: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))


_SIZES = ("hidden", "intermediate", "heads", "kv_heads", "head_size", "rotary")


def _of(name: str, *sizes: int, positions: int, epsilon: float = 1e-6, **more: Any) -> Family:
    """A family, of `_SIZES`."""
    provided = more.pop("provided", MappingProxyType({}))
    more.setdefault("dense_intermediate", 0 if "experts" in more else sizes[1])
    if "experts" in more:
        more["router_experts"] = more["experts"]
    named = dict(zip(_SIZES, sizes, strict=True))
    made = ModelSizes(**named, max_position=positions, epsilon=epsilon, more=more)  # type: ignore[arg-type]
    return Family(name, made, provided)


_EXPERTS = ("experts", "experts_per_token", "expert_intermediate")
_LINEAR = (
    "linear_key_heads",
    "linear_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "conv_features",
    "gated_norm",
)


def _experts(count: int, taken: int, width: int) -> dict[str, int]:
    return dict(zip(_EXPERTS, (count, taken, width), strict=True))


def _linear(keys: int, values: int) -> dict[str, int]:
    """Gated delta rules with heads of 128: sizes of their convolution and norm, too."""
    features = (2 * keys + values) * 128
    told = zip(_LINEAR, (keys, values, 128, 128, features, 128), strict=True)
    return {**dict(told), "gated_norm_groups": 1, "conv_taps": 4, "block_size": 544}


_FP32_NORMS = {"rms_norm": {"weight": "float32"}}

FAMILIES = (
    _of("meta-llama/Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128, positions=131072, epsilon=1e-5),
    _of("meta-llama/Llama-3.2-1B", 2048, 8192, 32, 8, 64, 64, positions=131072, epsilon=1e-5),
    # One of 8 ranks: a single head of keys.
    _of("meta-llama/Llama-3.1-70B", 8192, 3584, 8, 1, 128, 128, positions=131072, epsilon=1e-5),
    _of("Qwen/Qwen2.5-7B-Instruct", 3584, 18944, 28, 4, 128, 128, positions=32768, biased=1),
    _of("Qwen/Qwen2.5-0.5B-Instruct", 896, 4864, 14, 2, 64, 64, positions=32768, biased=1),
    _of(
        "google/gemma-3-4b-it",
        *(2560, 10240, 8, 4, 256, 256),
        positions=131072,
        provided=_FP32_NORMS,
    ),
    _of("google/gemma-3-270m", 640, 2048, 4, 1, 256, 256, positions=32768, provided=_FP32_NORMS),
    _of("zai-org/glm-4-9b-chat-hf", 4096, 13696, 32, 2, 128, 64, positions=131072, epsilon=1.5e-7),
    _of(
        "microsoft/Phi-4-mini-instruct", 3072, 8192, 24, 8, 128, 96, positions=131072, epsilon=1e-5
    ),
    _of("bigcode/starcoder2-7b", 4608, 18432, 36, 4, 128, 128, positions=16384, epsilon=1e-5),
    _of(
        "mistralai/Mixtral-8x7B-v0.1",
        *(4096, 14336, 32, 8, 128, 128),
        positions=32768,
        epsilon=1e-5,
        **_experts(8, 2, 14336),
    ),
    _of(
        "Qwen/Qwen3-30B-A3B",
        *(2048, 6144, 32, 4, 128, 128),
        positions=40960,
        **_experts(128, 8, 768),
    ),
    _of(
        "openai/gpt-oss-20b",
        *(2880, 2880, 64, 8, 64, 64),
        positions=131072,
        epsilon=1e-5,
        biased=3,
        block_size=64,
        **_experts(32, 4, 2880),
    ),
    _of(
        "deepseek-ai/DeepSeek-V3",
        *(7168, 18432, 128, 128, 576, 576),
        positions=163840,
        expert_groups=8,
        expert_groups_per_token=4,
        shared_intermediate=2048,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        v_head_dim=128,
        block_size=64,
        **_experts(256, 8, 2048),
    ),
    # One of 8 ranks.
    _of(
        "moonshotai/Kimi-K2-Instruct",
        *(7168, 2304, 8, 8, 576, 576),
        positions=131072,
        expert_groups=1,
        expert_groups_per_token=1,
        shared_intermediate=256,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        v_head_dim=128,
        block_size=128,
        **_experts(384, 8, 256),
    ),
    _of(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        *(2048, 5120, 16, 2, 256, 64),
        positions=262144,
        shared_intermediate=512,
        provided=_FP32_NORMS,
        **_experts(512, 10, 512),
        **_linear(16, 32),
    ),
    # One of 4 ranks.
    _of(
        "Qwen/Qwen3.5-397B-A17B",
        *(4096, 1024, 8, 1, 256, 64),
        positions=262144,
        shared_intermediate=256,
        provided=_FP32_NORMS,
        **_experts(512, 10, 256),
        **_linear(4, 16),
    ),
    _of(
        "Qwen/Qwen3.5-27B",
        *(5120, 17408, 24, 4, 256, 64),
        positions=262144,
        provided=_FP32_NORMS,
        **_linear(16, 48),
    ),
    _of(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        *(2304, 9216, 32, 32, 576, 576),
        positions=1048576,
        epsilon=1e-5,
        expert_groups=1,
        expert_groups_per_token=1,
        shared_intermediate=1024,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        v_head_dim=128,
        conv_features=4096,
        conv_taps=4,
        gated_norm=128,
        gated_norm_groups=1,
        **_experts(256, 8, 1024),
    ),
    _of(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        *(4480, 15680, 40, 8, 128, 128),
        positions=131072,
        epsilon=1e-5,
        conv_features=12288,
        conv_taps=4,
        conv_bias=1,
        gated_norm=10240,
        gated_norm_groups=8,
    ),
    _of(
        "LiquidAI/LFM2-1.2B",
        *(2048, 8192, 32, 8, 64, 64),
        positions=128000,
        epsilon=1e-5,
        conv_features=2048,
        conv_taps=3,
    ),
)
"""The models, by their configurations."""


LENGTH = 32768
"""The longest a family's model is taken to be: tables of positions are made for each call."""


def served_dtype(spec: OpSpec) -> str:
    """In which dtype the families' calls are tried: the models', or an op's first of integers."""
    return "bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0]


def families_of(spec: OpSpec) -> list[str]:
    """The families that use the op; of those that make the same calls the first."""
    found, dtype = [], getattr(torch, served_dtype(spec))
    seen: set[tuple[str, ...]] = set()
    for family in FAMILIES:
        sizes = replace(family.sizes, tokens=(1,), max_position=64)
        calls = _made(spec, sizes, dtype)
        names = (*(call.name for call in calls), *map(str, family.provided.get(spec.name, {})))
        tensors = [arg for call in calls for arg in call.args if isinstance(arg, torch.Tensor)]
        if calls and names not in seen and sum(arg.numel() for arg in tensors) <= MOST:
            seen.add(names)
            found.append(family.name)
    return found


def _made(spec: OpSpec, sizes: ModelSizes, dtype: Any) -> list[Sample]:
    """The calls of a model of these sizes, without their numbers; none of an op of its author's own
    that asks for what these configurations do not have, or makes no call without numbers."""
    try:
        return list(spec.served(sizes, dtype, torch.device("meta")))
    except Exception as error:
        log.debug("%s has no calls of public models: %s", spec.name, quote(error))
        return []


def calls_of(spec: OpSpec, name: str, device: Any) -> Iterator[Sample]:
    """The calls of the family of this name with each number of tokens."""
    dtype = getattr(torch, served_dtype(spec))
    family = next(each for each in FAMILIES if each.name == name)
    told = family.provided.get(spec.name, {})
    provided = {name: getattr(torch, kind) for name, kind in told.items()}
    for count in STANDING_COUNTS if spec.stands else COUNTS:
        length = min(family.sizes.max_position, LENGTH)
        sizes = replace(family.sizes, tokens=(count,), max_position=length)
        for sample in spec.served(sizes, dtype, device):
            yield as_provided(spec, sample, provided)


def smaller(specs: Mapping[str, OpSpec]) -> dict[str, str]:
    """Op -> what of the families' calls a start and the kit try in a smaller size than the model's.

    Args:
        specs: the contracts by op.
    """
    found: dict[str, str] = {}
    for op, spec in specs.items():
        dtype = getattr(torch, served_dtype(spec))
        phrases: dict[str, list[str]] = {}
        for family in FAMILIES:
            counts = STANDING_COUNTS if spec.stands else COUNTS[:1]
            sizes = replace(family.sizes, tokens=counts, max_position=64)
            told = (call.smaller for call in _made(spec, sizes, dtype))
            if some := [*dict.fromkeys(filter(None, told))]:
                phrases[family.name.partition("/")[2]] = some
        if phrases:
            name, some = next(iter(phrases.items()))
            found[op] = f"{'; '.join(some)} (of {name})"
    return found
