"""vLLM's rope classes: the op that runs in each computes what the native form does."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_fl.contracts.binding import LayerTarget
from vllm_fl.plugins.registry import known_contracts

pytest.importorskip("vllm", reason="the layers are vLLM's own")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_fl.integration.patchers.layers import layer_table

PLAIN, MULTIMODAL = "rotary_embedding", "multimodal_rotary_embedding"

SERVED = {
    "BailingMRotaryEmbedding": PLAIN,
    "DeepseekScalingRotaryEmbedding": PLAIN,
    "DynamicNTKAlphaRotaryEmbedding": PLAIN,
    "DynamicNTKScalingRotaryEmbedding": PLAIN,
    "Ernie4_5_VLRotaryEmbedding": PLAIN,
    "Gemma4RotaryEmbedding": PLAIN,
    "LinearScalingRotaryEmbedding": PLAIN,
    "Llama3RotaryEmbedding": PLAIN,
    "Llama4VisionRotaryEmbedding": PLAIN,
    "MRotaryEmbedding": MULTIMODAL,
    "NTKScalingRotaryEmbedding": PLAIN,
    "RotaryEmbedding": PLAIN,
    "YaRNScalingRotaryEmbedding": PLAIN,
}
NOT_SERVED = {
    "ApplyRotaryEmb": "takes rows of cos and sin",
    "DeepseekV4ScalingRotaryEmbedding": "is never called",
    "DualChunkRotaryEmbedding": "turns a query five times",
    "FourierRotaryEmbedding": "has another formula",
    "MRotaryEmbeddingInterleaved": "goes past vLLM's dispatch",
    "RotaryEmbeddingBase": "has no forward",
}
FORMER = {"XDRotaryEmbedding", "TeleChat3RoPEScaledRotaryEmbedding"}
"""Classes of older releases; the second is RotaryEmbedding with another cache."""


def rope_classes() -> Iterator[str]:
    for found in pkgutil.iter_modules(rotary_embedding.__path__):
        module = importlib.import_module(f"{rotary_embedding.__name__}.{found.name}")
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, CustomOp) and cls.__module__ == module.__name__:
                yield name


def test_every_rope_of_vllms_runs_an_op_or_has_a_reason_not_to() -> None:
    assert set(rope_classes()) - FORMER <= set(SERVED) | set(NOT_SERVED)
    table = {layer.cls: layer.op for layer in layer_table()}
    for name in set(rope_classes()) - FORMER:
        assert table.get(name) == SERVED.get(name), name


TOKENS, HEADS, KV_HEADS = 7, 4, 2

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "RotaryEmbedding": {"rope_type": "default"},
    "DeepseekScalingRotaryEmbedding": {"rope_type": "deepseek_yarn", **YARN},
    "MRotaryEmbedding": {"rope_type": "default", "mrope_section": [4, 6, 6]},
    "MRotaryEmbedding, axes in turns": {
        "rope_type": "default",
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
    "MRotaryEmbedding, YaRN, half of the head": {
        "rope_type": "yarn",
        "mrope_section": [2, 3, 3],
        "partial_rotary_factor": 0.5,
        **YARN,
    },
    "BailingMRotaryEmbedding": {"rope_type": "bailing_mrope", "mrope_section": [4, 6, 6]},
}


@pytest.fixture(autouse=True)
def vllms_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's classes without registrations of other tests, and no rope made before."""
    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    with set_current_vllm_config(VllmConfig()):
        yield


def made(name: str, head_size: int = 32, **options: Any) -> Any:
    if name == "Ernie4_5_VLRotaryEmbedding":
        module = importlib.import_module(f"{rotary_embedding.__name__}.ernie45_vl_rope")
        given = (head_size, head_size, 64, 1e4, True, torch.float32)
        return getattr(module, name)(*given, mrope_section=[6, 6, 4])
    given = ROPES.get(name, {"rope_type": "mllama4"})
    options = {"dtype": torch.float32} | options
    return get_rope(head_size, 64, rope_parameters=given, **options)


def ours(layer: Any, *, native: bool = False) -> Any:
    """The forward that its binding makes for the layer, with the contract's oracle as the op."""
    (target,) = (
        (op, target)
        for op in (PLAIN, MULTIMODAL)
        for target in known_contracts().bindings[op].targets
        if isinstance(target, LayerTarget) and target.cls == type(layer).__name__
    )
    spec = known_contracts().contracts[target[0]]

    def op(*args: Any) -> Any:
        assert spec.check(*args) is None
        return tuple(x if x is None else x.to(args[0].dtype) for x in spec.oracle(*args))

    assert target[1].adapt
    return target[1].adapt(layer, target[1].native if native else op)


def flat(*axes: int) -> tuple[torch.Tensor, ...]:
    """Positions, and query and key shaped like a model's projections."""
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * 32)
    query, key, _ = qkv.split((HEADS * 32, KV_HEADS * 32, KV_HEADS * 32), dim=-1)
    return torch.randint(64, (*axes, TOKENS)), query, key


def agree(layer: Any, *args: Any) -> None:
    found = ours(layer)(*args)
    for one, other in zip(found, layer.forward_native(*args), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("axes", [(), (3,)], ids=["text", "three axes"])
@pytest.mark.parametrize(
    "name", [*(name for name in ROPES if "MRotary" in name), "Ernie4_5_VLRotaryEmbedding"]
)
def test_ropes_of_three_axes(name: str, axes: tuple[int, ...], neox: bool) -> None:
    if "Bailing" in name and not hasattr(rotary_embedding, "BailingMRotaryEmbedding"):
        pytest.skip("this vLLM has no such rope")
    options = {} if "Ernie" in name else {"is_neox_style": neox}
    agree(made(name, **options), *flat(*axes))


@pytest.mark.parametrize("offsets", [None, torch.tensor([2, 0, 1, 0, 3, 0, 5])])
@pytest.mark.parametrize("neox", [True, False])
def test_deepseeks_heads_are_apart(neox: bool, offsets: torch.Tensor | None) -> None:
    layer = made("DeepseekScalingRotaryEmbedding", is_neox_style=neox)
    heads = torch.randn(TOKENS, HEADS, 96)[..., 64:]
    agree(layer, torch.randint(48, (TOKENS,)), heads, torch.randn(TOKENS, 1, 32), offsets)


def test_deepseeks_indexer_turns_a_query_alone() -> None:
    layer = made("DeepseekScalingRotaryEmbedding")
    positions, heads = torch.arange(TOKENS), torch.randn(TOKENS, HEADS, 32)
    found, nothing = ours(layer)(positions, heads)
    assert nothing is None
    torch.testing.assert_close(found, layer.forward_native(positions, heads, heads)[0])


def test_llama_4s_patches() -> None:
    layer = made("Llama4VisionRotaryEmbedding", 16, dtype=torch.complex64)
    query, key = torch.randn(2, 3, 65, HEADS, 32)[:, :2].unbind()
    agree(layer, query, key)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("RotaryEmbedding", ()),
        ("MRotaryEmbedding", (3,)),
        ("MRotaryEmbedding, axes in turns", (3,)),
        ("Ernie4_5_VLRotaryEmbedding", (3,)),
        ("DeepseekScalingRotaryEmbedding", None),
    ],
)
def test_a_compiler_traces_it_whole(name: str, axes: tuple[int, ...] | None) -> None:
    heads = torch.randn(TOKENS, HEADS, 96)[..., 64:]
    layer = made(name)
    args = (
        (torch.arange(TOKENS), heads, torch.randn(TOKENS, 1, 32)) if axes is None else flat(*axes)
    )
    if name == "RotaryEmbedding":
        agree(layer, *args)
    forward = torch.compile(ours(layer, native=True), backend="eager", fullgraph=True)
    for one, other in zip(forward(*args), layer.forward_native(*args), strict=True):
        torch.testing.assert_close(one, other)
