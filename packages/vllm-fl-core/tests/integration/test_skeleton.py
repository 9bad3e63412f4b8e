"""A model's structure without its weights: layers, what they provide, and absent ops."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from typing import Any

import forked
import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

BUILT = """
import json, sys
import torch
from vllm import EngineArgs
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.integration.models import completed
from vllm_fl.settings.loading import load_settings

def built(model, arguments, architecture=None):
    config = EngineArgs(model=model, dtype="bfloat16", enforce_eager=True,
                        skip_tokenizer_init=True, **arguments).create_engine_config()
    if architecture:
        config.model_config.hf_config.architectures = [architecture]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    # A configuration may have another word for what rules an op out.
    ruled_out = EngineFacts(load_settings({}), "eager", absent=frozenset({"rms_norm", "relu2"}))
    found, layers = completed(ruled_out, config)
    facts = {
        "layers": layers, "absent": sorted(found.absent),
        "provided": {op: [{n: str(d) for n, d in kind.items()} for kind in kinds]
                     for op, kinds in found.provided.items()}}
    left = [parallel_state._TP, config.compilation_config.static_forward_context,
            torch.equal(state, torch.get_rng_state()), str(torch.get_default_dtype()),
            [*map(str, rotary_embedding._ROPE_DICT)]]
    return facts, left

print(json.dumps({name: built(*case) for name, case in json.loads(sys.argv[1]).items()}))
"""

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 128,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu"}


OURS_ALONE = {"VLLM_PLUGINS": "fl", "VLLM_FL_PLUGINS": "vllm-fl-ops", "HF_HUB_OFFLINE": "1"}
"""Our ops without a backend."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Case -> facts of its model; all are built in one process."""
    cases: dict[str, list[Any]] = {}
    for name, own, *more in (
        ("gemma", GEMMA, {}),
        ("llama on four ranks", LLAMA, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("mixtral", MIXTRAL, {}),
        ("bert", BERT, {"runner": "pooling"}),
        ("unknown", LLAMA, {}, "UnknownForCausalLM"),
    ):
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(COMMON | own))  # type: ignore[operator]
        cases[name] = [str(folder), *more]
    done = forked.run(BUILT, json.dumps(cases), env={**os.environ, **OURS_ALONE})
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (_, left) in found.items():
        assert left == [None, {}, True, "torch.float32", []], f"of {name} nothing is left"
    return {name: facts for name, (facts, _) in found.items()}


def test_gemmas_norms_provide_a_float32_weight(built: Any) -> None:
    facts = built["gemma"]
    assert (
        facts["layers"]["rms_norm"]["GemmaRMSNorm"] == 13 and "silu_and_mul" not in facts["layers"]
    )
    assert facts["provided"]["rms_norm"] == [{"weight": "torch.float32"}]
    assert {"layer_norm", "relu2"} <= {*facts["absent"]} and "rms_norm" not in facts["absent"]
    assert "gelu_and_mul" not in facts["absent"]
    assert "qk_norm_rope" not in facts["absent"], "its queries and keys are normed by heads"


def test_a_llamas_norms_provide_one_of_the_models_dtype(built: Any) -> None:
    """One of four ranks knows the whole model."""
    facts = built["llama on four ranks"]
    assert facts["provided"]["rms_norm"] == [{"weight": "torch.bfloat16"}]
    layers = facts["layers"]
    assert layers["rms_norm"]["RMSNorm"] == 5 and layers["silu_and_mul"]["SiluAndMul"] >= 1
    assert "qk_norm_rope" in facts["absent"], "it norms no heads"


def test_a_mixture_of_experts_is_known(built: Any) -> None:
    """Its layers ask for the size of the group of ranks that share the experts."""
    facts = built["mixtral"]
    assert facts["layers"]["rms_norm"]["RMSNorm"] == 5
    assert "rms_norm" not in facts["absent"] and "fused_experts" not in facts["absent"]


def test_what_only_layers_run_and_the_model_has_none_of_is_absent(built: Any) -> None:
    facts = built["bert"]
    assert "layer_norm" in facts["absent"], "its norms are PyTorch's"
    # Layers do not decide about ops that operators also cover.
    assert "silu_and_mul" not in facts["absent"]


def test_a_model_that_cannot_be_built_so_is_not_known(built: Any) -> None:
    assert built["unknown"] == {"layers": {}, "absent": ["relu2", "rms_norm"], "provided": {}}
