"""Typical sizes of public models, for the calls that the kit tests.

The sizes are from the models' configurations, for one rank. Sizes that a model does not have are
omitted, because it does not call ops that need them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from vllm_fl.contracts import ModelSizes, OpSpec, Sample
from vllm_fl.logs import get_logger
from vllm_fl.text import quote
from vllm_fl_verify.batches import FIXED_COUNTS
from vllm_fl_verify.trials import as_provided

__all__ = [
    "COUNTS",
    "FAMILIES",
    "Family",
    "calls_of",
    "families_of",
    "served_dtype",
]

log = get_logger("testing")

COUNTS = (1, 5, 17, 130)
"""Numbers of tokens of a family's calls: decoding, and just above tiles of 16 and 128 rows."""

MOST = 2**26
"""Maximum elements of a family's calls with one token. Larger families are omitted for the op:
their products take seconds, and smaller models reveal the same errors.
"""


@dataclass(frozen=True)
class Family:
    """One public model.

    Args:
        name: on the Hugging Face hub.
        sizes: of one rank.
        provided: op -> parameter -> dtype of layers' weights that have another dtype than the
            model.
    """

    name: str
    sizes: ModelSizes
    provided: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))


_SIZES = ("hidden", "intermediate", "heads", "kv_heads", "head_size", "rotary", "max_position")

TABLE = """
meta-llama/Llama-3.1-8B 4096 14336 32 8 128 128 131072 1e-5
meta-llama/Llama-3.2-1B 2048 8192 32 8 64 64 131072 1e-5
meta-llama/Llama-3.1-70B 8192 3584 8 1 128 128 131072 1e-5
Qwen/Qwen2.5-7B-Instruct 3584 18944 28 4 128 128 32768 1e-6 biased=1
Qwen/Qwen2.5-0.5B-Instruct 896 4864 14 2 64 64 32768 1e-6 biased=1
google/gemma-3-4b-it 2560 10240 8 4 256 256 131072 1e-6 fp32_norms
google/gemma-3-270m 640 2048 4 1 256 256 32768 1e-6 fp32_norms
zai-org/glm-4-9b-chat-hf 4096 13696 32 2 128 64 131072 1.5e-7
microsoft/Phi-4-mini-instruct 3072 8192 24 8 128 96 131072 1e-5
bigcode/starcoder2-7b 4608 18432 36 4 128 128 16384 1e-5
mistralai/Mixtral-8x7B-v0.1 4096 14336 32 8 128 128 32768 1e-5 experts=8,2,14336
Qwen/Qwen3-30B-A3B 2048 6144 32 4 128 128 40960 1e-6 experts=128,8,768
openai/gpt-oss-20b 2880 2880 64 8 64 64 131072 1e-5 experts=32,4,2880 biased=3 block_size=64
deepseek-ai/DeepSeek-V3 7168 18432 128 128 576 576 163840 1e-6 experts=256,8,2048 expert_groups=8
    expert_groups_per_token=4 shared_intermediate=2048 q_lora_rank=1536 kv_lora_rank=512
    qk_rope_head_dim=64 v_head_dim=128 block_size=64
moonshotai/Kimi-K2-Instruct 7168 2304 8 8 576 576 131072 1e-6 experts=384,8,256 expert_groups=1
    expert_groups_per_token=1 shared_intermediate=256 q_lora_rank=1536 kv_lora_rank=512
    qk_rope_head_dim=64 v_head_dim=128 block_size=128
Qwen/Qwen3-Next-80B-A3B-Instruct 2048 5120 16 2 256 64 262144 1e-6 experts=512,10,512 linear=16,32
    fp32_norms shared_intermediate=512
Qwen/Qwen3.5-397B-A17B 4096 1024 8 1 256 64 262144 1e-6 experts=512,10,256 linear=4,16 fp32_norms
    shared_intermediate=256
Qwen/Qwen3.5-27B 5120 17408 24 4 256 64 262144 1e-6 linear=16,48 fp32_norms
moonshotai/Kimi-Linear-48B-A3B-Instruct 2304 9216 32 32 576 576 1048576 1e-5 experts=256,8,1024
    expert_groups=1 expert_groups_per_token=1 shared_intermediate=1024 kv_lora_rank=512
    qk_rope_head_dim=64 v_head_dim=128 conv_features=4096 conv_taps=4 gated_norm=128
    gated_norm_groups=1
nvidia/NVIDIA-Nemotron-Nano-9B-v2 4480 15680 40 8 128 128 131072 1e-5 conv_features=12288
    conv_taps=4 conv_bias=1 gated_norm=10240 gated_norm_groups=8
LiquidAI/LFM2-1.2B 2048 8192 32 8 64 64 128000 1e-5 conv_features=2048 conv_taps=3
"""
"""Each entry: a model, its sizes, the epsilon of its norms, and further sizes. `experts=8,2,14336`:
experts, experts per token, and their width. `linear=16,32`: gated delta rules with this many key
and value heads. `fp32_norms`: norms have float32 weights. The sizes of Llama-3.1-70B and Kimi-K2
are for one of 8 ranks, those of Qwen3.5-397B for one of 4.
"""


def _family(words: Sequence[str]) -> Family:
    name, *numbers = words[: len(_SIZES) + 2]
    sizes: dict[str, Any] = dict(zip(_SIZES, map(int, numbers), strict=False))
    more, provided = {"dense_intermediate": sizes["intermediate"]}, {}
    for word in words[len(_SIZES) + 2 :]:
        key, _, value = word.partition("=")
        if key == "fp32_norms":
            provided = {"rms_norm": {"weight": "float32"}}
        elif key == "experts":
            count, taken, width = map(int, value.split(","))
            more |= {"experts": count, "experts_per_token": taken, "expert_intermediate": width}
            more |= {"router_experts": count, "dense_intermediate": 0}
        elif key == "linear":
            keys, values = map(int, value.split(","))
            more |= {"linear_key_heads": keys, "linear_value_heads": values}
            more |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "gated_norm": 128}
            more |= {"conv_features": (2 * keys + values) * 128, "conv_taps": 4}
            more |= {"gated_norm_groups": 1, "block_size": 544}
        else:
            more[key] = int(value)
    return Family(name, ModelSizes(**sizes, epsilon=float(numbers[-1]), more=more), provided)


FAMILIES = tuple(_family(entry.split()) for entry in re.split(r"\n(?! )", TABLE.strip()))


LENGTH = 32768
"""Maximum sequence length of a model, because each call makes tables of positions."""


def served_dtype(spec: OpSpec) -> str:
    """Return the dtype of the families' calls: bfloat16 if the op has it, else its first dtype."""
    return "bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0]


def families_of(spec: OpSpec) -> list[str]:
    """Return the families that use the op, one for each set of identical calls."""
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
    """Return a model's calls on the meta device, without values.

    The result is empty for a third-party op that needs other sizes, or cannot make calls without
    values.
    """
    try:
        return list(spec.served(sizes, dtype, torch.device("meta")))
    except Exception as error:
        log.debug("%s has no calls of public models: %s", spec.name, quote(error))
        return []


def calls_of(spec: OpSpec, name: str, device: Any) -> Iterator[Sample]:
    """Yield the calls of a family, with each number of tokens."""
    dtype = getattr(torch, served_dtype(spec))
    family = next(each for each in FAMILIES if each.name == name)
    kinds = family.provided.get(spec.name, {})
    provided = {name: getattr(torch, kind) for name, kind in kinds.items()}
    for count in FIXED_COUNTS if spec.fixed_batch else COUNTS:
        length = min(family.sizes.max_position, LENGTH)
        sizes = replace(family.sizes, tokens=(count,), max_position=length)
        for sample in spec.served(sizes, dtype, device):
            yield as_provided(spec, sample, provided)
