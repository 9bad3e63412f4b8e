"""Which layers are replaced: the OOT settings, and options that the user gives vLLM directly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engines import Model, answer_of

SCRIPT = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs
from vllm_fl.errors import SettingsError
from vllm_fl.integration.planning import facts_of, plan_for

def outcome(variables, options):
    config = EngineArgs(sys.argv[1], skip_tokenizer_init=True, **options).create_engine_config()
    plan = plan_for(facts_of(config))
    return {
        "ops": {op: [entry.label, entry.reason] for op, entry in plan.entries.items()},
        "kept": sorted(plan.kept_layers),
        "custom_ops": config.compilation_config.custom_ops,
        "norms": config.kernel_config.ir_op_priority.rms_norm,
    }

answers = []
for variables, options in json.loads(sys.argv[2]):
    os.environ.update(variables)
    try:
        answers.append(outcome(variables, options))
    except SettingsError as error:
        answers.append({"error": str(error)})
    for name in variables:
        del os.environ[name]
print(json.dumps({"answers": answers}))
"""

VENDOR = {
    "VLLM_FL_PER_OP": "rms_norm=vendor|reference;silu_and_mul=vendor|reference;"
    "rotary_embedding=vendor|reference"
}

LISTS: list[tuple[dict[str, str], set[str], list[str]]] = [
    ({"VLLM_FL_OOT_ENABLED": "0"}, {"silu_and_mul", "rotary_embedding", "rms_norm"}, []),
    ({"VLLM_FL_OOT_BLACKLIST": "SiluAndMul"}, {"silu_and_mul"}, []),
    ({"VLLM_FL_OOT_BLACKLIST": "silu_and_mul,fused_moe"}, {"silu_and_mul"}, []),
    ({"VLLM_FL_OOT_BLACKLIST": "rms_norm"}, {"rms_norm"}, []),
    ({"VLLM_FL_OOT_WHITELIST": "RMSNorm"}, {"silu_and_mul", "rotary_embedding"}, []),
    ({"VLLM_FL_OOT_BLACKLIST": "Llama3RotaryEmbedding"}, set(), ["Llama3RotaryEmbedding"]),
]
"""Variables, the ops that stay stock, and the layer classes that do."""

UNKNOWN = ({"VLLM_FL_OOT_BLACKLIST": "SiluAndMull"}, {})

USERS: tuple[dict[str, str], dict[str, Any]] = (
    {},
    {
        "compilation_config": {"custom_ops": ["none", "-silu_and_mul"]},
        "kernel_config": {"ir_op_priority": {"rms_norm": ["native"]}},
    },
)


@pytest.fixture(scope="module")
def outcomes(model: Model) -> list[Any]:
    """The outcome of each configuration, or its error; all made in one process, in sequence."""
    cases = [*((variables, {}) for variables, _, _ in LISTS), UNKNOWN, USERS]
    answered, _ = answer_of(SCRIPT, model("qwen3"), json.dumps(cases), **VENDOR)
    return answered["answers"]


def impls(plan: Any) -> dict[str, str]:
    return {op: label for op, (label, _) in plan["ops"].items()}


@pytest.mark.parametrize("number", range(len(LISTS)), ids=lambda n: ",".join(LISTS[n][0].values()))
@pytest.mark.slow
def test_lists_leave_layers_to_vllm(outcomes: list[Any], number: int) -> None:
    _, stock, kept = LISTS[number]
    plan = outcomes[number]
    left = {op for op, label in impls(plan).items() if label == "stock"}
    assert left & {"silu_and_mul", "rotary_embedding", "rms_norm"} == stock
    assert plan["kept"] == kept
    assert ("+silu_and_mul" in plan["custom_ops"]) == ("silu_and_mul" not in stock)
    assert (plan["norms"][0] == "vllm_fl") == ("rms_norm" not in stock)


@pytest.mark.slow
def test_an_unknown_layer_is_an_error_with_the_near_name(outcomes: list[Any]) -> None:
    assert "Did you mean 'SiluAndMul'?" in outcomes[-2]["error"]


def test_the_users_setting_of_vllm_stays(outcomes: list[Any]) -> None:
    plan = outcomes[-1]
    assert plan["ops"]["silu_and_mul"] == ["stock", "custom_ops has -silu_and_mul"]
    assert impls(plan)["rms_norm"] == "stock"
    assert plan["norms"][0] == "native"
    assert impls(plan)["rotary_embedding"] == "vendor.cpu"
    assert "+rotary_embedding" in plan["custom_ops"]
    assert "+silu_and_mul" not in plan["custom_ops"]
