"""What a model is made of, without its weights: layers, what they provide, and what has none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import forked
import pytest

from vllm_fl.engine.facts import EngineFacts
from vllm_fl.settings.loading import load_settings

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

BUILT = """
import json, sys
import torch
from vllm import EngineArgs
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm_fl.integration.models import skeleton_of

config = EngineArgs(model=sys.argv[1], dtype="bfloat16", enforce_eager=True,
                    skip_tokenizer_init=True, **json.loads(sys.argv[2])).create_engine_config()
if sys.argv[3]:
    config.model_config.hf_config.architectures = [sys.argv[3]]
sys.modules["vllm.left_out"] = None  # so that it is not imported
torch.manual_seed(5)
state = torch.get_rng_state()
found = skeleton_of(config)
told = found and {
    "layers": found.layers, "absent": sorted(found.absent),
    "provided": {op: [{n: str(d) for n, d in kind.items()} for kind in kinds]
                 for op, kinds in found.provided.items()}}
left = [parallel_state._TP, config.compilation_config.static_forward_context,
        torch.equal(state, torch.get_rng_state()), str(torch.get_default_dtype()),
        [*map(str, rotary_embedding._ROPE_DICT)]]
print(json.dumps([told, left]))
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
BERT = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu"}


OURS_ALONE = {"VLLM_PLUGINS": "fl", "VLLM_FL_PLUGINS": "vllm-fl-ops", "HF_HUB_OFFLINE": "1"}
"""Ops without a backend."""


def built(
    folder: Path,
    own: dict[str, Any],
    architecture: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
    **arguments: Any,
) -> Any:
    (folder / "config.json").write_text(json.dumps(COMMON | own))
    done = forked.run(
        BUILT,
        str(folder),
        json.dumps(arguments),
        architecture,
        env={**os.environ, **OURS_ALONE, **variables},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    told, left = json.loads(done.stdout.splitlines()[-1])
    assert left == [None, {}, True, "torch.float32", []], "nothing of it is left"
    return told


def test_gemmas_norms_provide_a_float32_weight(tmp_path: Path) -> None:
    told = built(tmp_path, GEMMA)
    assert told["layers"]["rms_norm"]["GemmaRMSNorm"] == 13 and "silu_and_mul" not in told["layers"]
    assert told["provided"]["rms_norm"] == [{"weight": "torch.float32"}]
    assert "layer_norm" in told["absent"] and "rms_norm" not in told["absent"]
    assert "gelu_and_mul" not in told["absent"]
    assert "qk_norm_rope" not in told["absent"], "its queries and keys are normed by heads"


def test_a_llamas_norms_provide_one_of_the_models_dtype(tmp_path: Path) -> None:
    """Of four ranks the whole model is known, as on one."""
    told = built(tmp_path, LLAMA, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert told["provided"]["rms_norm"] == [{"weight": "torch.bfloat16"}]
    layers = told["layers"]
    assert layers["rms_norm"]["RMSNorm"] == 5 and layers["silu_and_mul"]["SiluAndMul"] >= 1
    assert "qk_norm_rope" in told["absent"], "it norms no heads"


def test_what_only_layers_run_and_the_model_has_none_of_is_absent(tmp_path: Path) -> None:
    told = built(tmp_path, BERT, runner="pooling")
    assert "layer_norm" in told["absent"], "its norms are PyTorch's"
    # What operators reach, too, is not told by layers.
    assert "silu_and_mul" not in told["absent"]


def test_a_model_that_cannot_be_built_so_is_not_known(tmp_path: Path) -> None:
    assert built(tmp_path, LLAMA, "NobodysForCausalLM") is None


def test_where_no_op_has_a_layer_nothing_is_built(tmp_path: Path) -> None:
    assert built(tmp_path, LLAMA, variables={"VLLM_FL_PLUGINS": ""}) is None


def test_an_op_is_the_models_where_it_makes_layers_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration may have another word for it, by which the op's binding rules it out."""
    from vllm_fl.integration import models

    settings = load_settings({})
    ruled_out = EngineFacts(settings, "eager", absent=frozenset({"xielu", "relu2"}))
    made = models.Skeleton({"xielu": {"XIELU": 2}}, frozenset({"layer_norm"}), {})
    monkeypatch.setattr(models, "facts_of", lambda config: ruled_out)
    monkeypatch.setattr(models, "skeleton_of", lambda config: made)
    config: Any = SimpleNamespace(model_config=object())
    facts, _ = models.model_facts(config)
    assert facts.absent == {"relu2", "layer_norm"}
