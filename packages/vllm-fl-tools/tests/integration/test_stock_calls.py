"""vLLM's forms of ops, and a model's configuration, without an engine."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="the forms are vLLM's own")

from vllm_fl.contracts import ModelSizes
from vllm_fl.contracts.binding import Binding
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.policy import Mode
from vllm_fl_tools.integration.stock_calls import apart, stock_forms
from vllm_fl_verify.verification import compare

CPU = torch.device("cpu")
SIZES = ModelSizes(64, 32, heads=4, kv_heads=2, head_size=64, rotary=64, tokens=(1, 7))


@pytest.mark.parametrize(
    ("op", "mode"),
    [
        ("silu_and_mul", "eager"),
        ("rms_norm", "eager"),
        ("rotary_embedding", "eager"),
        ("rotary_embedding", "compiled"),
        ("qk_norm_rope", "compiled"),
    ],
)
def test_each_call_has_a_form_that_is_right(op: str, mode: Mode) -> None:
    spec = known_contracts().contracts[op]
    forms = stock_forms(op, known_contracts().bindings[op], mode, CPU)
    assert len({form.impl_id for form in forms}) == len(forms), "operators are named after ids"
    samples = list(spec.served(SIZES, torch.float32, CPU))
    assert samples
    for sample in samples:
        found = [compare(form, spec, sample, torch.float32) for form in forms]
        assert "ok" in {one.status for one in found}, [one.reason for one in found]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_runs_within_a_layers_call_alone_is_no_form(mode: Mode, device: str) -> None:
    binding = known_contracts().bindings["fused_experts"]
    assert stock_forms("fused_experts", binding, mode, torch.device(device)) == ()
    free = dataclasses.replace(
        binding, targets=tuple(dataclasses.replace(p, within=False) for p in binding.targets)
    )
    forms = stock_forms("fused_experts", free, mode, torch.device(device))
    assert forms
    for form in forms:
        with pytest.raises(NotImplementedError, match="inside a call of their layer"):
            form.fn()


def test_what_vllms_graph_has_of_heads_is_query_and_key() -> None:
    """Query and key without the projection; with the values appended they are the op's result."""
    binding = known_contracts().bindings["qk_norm_rope"]
    forms = stock_forms("qk_norm_rope", binding, "compiled", CPU)
    (impl_id, less), *others = apart(binding, forms).items()
    assert not others and impl_id == forms[0].impl_id
    other = known_contracts().bindings["rms_norm"]
    assert apart(other, stock_forms("rms_norm", other, "compiled", CPU)) == {}
    for sample in known_contracts().contracts["qk_norm_rope"].served(SIZES, torch.float32, CPU):
        parts = [part.flatten(1) for part in less(*sample.args)]
        whole = forms[0].fn(*sample.args)
        assert torch.equal(whole[:, : sum(part.shape[1] for part in parts)], torch.cat(parts, 1))


def test_what_a_layer_runs_comes_first() -> None:
    """On a CPU a rope's layer calls the operator; compiled, it is traced."""
    binding = known_contracts().bindings["rotary_embedding"]
    assert not stock_forms("rotary_embedding", binding, "eager", CPU)[0].traceable
    assert stock_forms("rotary_embedding", binding, "compiled", CPU)[0].traceable
    binding = known_contracts().bindings["silu_and_mul"]
    assert stock_forms("silu_and_mul", binding, "eager", CPU)[0].traceable


def test_there_is_none_where_vllm_runs_the_op_nowhere() -> None:
    assert (
        stock_forms("qk_norm_rope", known_contracts().bindings["qk_norm_rope"], "eager", CPU) == ()
    )
    assert stock_forms("acme_op", Binding(), "eager", CPU) == ()


DESCRIBED = """
import json, sys
from vllm_fl_tools.cli._engine import engine_of

output = {}
for mode, more in {"eager": ["--enforce-eager"], "compiled": []}.items():
    engine = engine_of(sys.argv[1], more)
    facts, sizes = engine.facts, engine.facts.sizes
    output[mode] = [sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_size, sizes.epsilon]
    output[mode] += [str(facts.dtype), "fused_experts" in facts.absent, "rms_norm" in facts.absent]
    scheduler = engine.config.scheduler_config
    output[mode] += [sizes.tokens[-1] == scheduler.max_num_batched_tokens >= 512]
    output[mode] += [list(facts.captured)]
offline = engine_of(sys.argv[1], [], offline=True).facts.sizes.tokens[-1]
output["offline"] = offline / sizes.tokens[-1]
print(json.dumps(output))
"""


@pytest.mark.slow
def test_a_models_configuration_is_enough(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    output = json.loads(done.stdout.splitlines()[-1])
    expected = [64, 4, 2, 32, 1e-5, "torch.bfloat16", True, False, True, []]
    assert output["eager"] == expected
    assert output["compiled"][:9] == expected[:9]
    assert output["offline"] >= 2, "vllm.LLM takes larger batches than vllm serve"
