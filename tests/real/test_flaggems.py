"""FlagGems's kernels on layer inputs of a real model, through Triton's interpreter. Some tokens and
layers only, because the interpreter is slow. `nox -s real` runs this in a separate environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import prose
import pytest
from real_engines import SMOLLM2, Model

if not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("Triton's interpreter is off; nox -s real", allow_module_level=True)

import torch

from vllm_fl.contracts.spec import Sample
from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_flaggems.plugin import register_ops
from vllm_fl_verify.verification import compare

pytestmark = pytest.mark.slow

TOKENS = 32

LAYERS = (0, 5, 10, 15, 20, 29)
"""The first, some between, and the last, which has the largest values."""

OPS = ("rms_norm", "silu_and_mul", "rotary_embedding")


@pytest.fixture(scope="module")
def given(model: Model) -> dict[str, list[Sample]]:
    """Op -> inputs of its layers, shaped as in vLLM, from transformers' bfloat16 forward pass."""
    from transformers import AutoModelForCausalLM

    decoder: Any = AutoModelForCausalLM.from_pretrained(model(SMOLLM2), dtype=torch.bfloat16)
    text = prose.job(model(SMOLLM2)).scored[0][:TOKENS]
    seen: dict[Any, tuple[Any, Any]] = {}
    for part in decoder.modules():
        part.register_forward_hook(lambda part, given, got: seen.update({part: (given, got)}))
    with torch.inference_mode():
        decoder(torch.tensor([text]))
    found: dict[str, list[Sample]] = {op: [] for op in OPS}
    for at in LAYERS:
        for op, what, args in calls(decoder, decoder.model.layers[at], seen):
            found[op].append(Sample(f"{what} of layer {at}", args, scale_of(op, args)))
    return found


def scale_of(op: str, args: tuple[Any, ...]) -> float:
    """Magnitude of the results: 1 for norms, because their results do not scale with the inputs,
    and for gated products, where one large feature would hide errors in the others."""
    if op != "rotary_embedding":
        return 1.0
    return max(1.0, *(tensor.abs().max().item() for tensor in args[:2]))


def calls(decoder: Any, layer: Any, seen: Any) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(op, name, arguments) of a layer's calls, built from the inputs and outputs of its parts."""
    config, attention, mlp = decoder.config, layer.self_attn, layer.mlp
    norm, second = layer.input_layernorm, layer.post_attention_layernorm
    eps = config.rms_norm_eps

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(TOKENS, -1)

    entered = rows(seen[norm][0][0])
    attended = rows(seen[attention.o_proj][1])
    yield "rms_norm", "the first norm", (entered, None, norm.weight.data, eps)
    residual = (attended, entered, second.weight.data, eps)
    yield "rms_norm", "the second norm, with its residual", residual
    gate, up = (rows(seen[part][1]) for part in (mlp.gate_proj, mlp.up_proj))
    yield "silu_and_mul", "the activation", (torch.cat([gate, up], -1),)
    cos, sin = (table[0] for table in seen[decoder.model.rotary_emb][1])
    half = cos.shape[-1] // 2
    query, key = (
        seen[part][1].reshape(TOKENS, -1, 2 * half) for part in (attention.q_proj, attention.k_proj)
    )
    tables = (cos[:, :half].contiguous(), sin[:, :half].contiguous())
    yield "rotary_embedding", "the rope", (query, key, *tables, torch.arange(TOKENS))


@pytest.mark.parametrize("op", OPS)
def test_a_layers_own_tensors(op: str, given: dict[str, list[Sample]]) -> None:
    get_default_manager().ensure_initialized()  # the interpreter is a plugin
    (impl,) = (impl for impl in register_ops() if impl.op_name == op)
    spec = known_contracts().contracts[op]
    for sample in given[op]:
        missing = len(spec.parameters) - len(sample.args)
        args = (*sample.args, *(None if op == "rms_norm" else False for _ in range(missing)))
        found = compare(impl, spec, Sample(sample.name, args, sample.scale), torch.bfloat16)
        assert found.status == "ok", found
