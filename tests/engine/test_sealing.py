"""Engines in one process: two sealed plans, what a seal allows, a startup after a failed one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import IN_ONE_PROCESS, Model, answer_of

pytestmark = pytest.mark.slow

PRELUDE = """
import json, os, sys
import torch
from vllm import LLM, SamplingParams
from vllm.config.utils import replace
from vllm_fl.dispatch import (
    call_op, get_default_manager, reset_global_policy, set_global_policy, with_preference,
    SelectionPolicy,
)
from vllm_fl.errors import PolicySealedError


def start(model=sys.argv[1], **variables):
    os.environ.update(variables)
    return LLM(model, skip_tokenizer_init=True, enforce_eager=True, additional_config={"mine": 1})


def answer(llm):
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(5, 30))}
    return list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)


def refused(change):
    try:
        change()
    except PolicySealedError as error:
        return str(error)
    return ""
"""

TWO = """
first = start(VLLM_FL_PER_OP="rms_norm=vendor|reference;silu_and_mul=vendor|reference")
second = start(VLLM_FL_PER_OP="rms_norm=reference;silu_and_mul=reference")
reports = [llm.collective_rpc("vllm_fl_report")[0] for llm in (first, second)]
answers = [answer(first), answer(second), answer(first)]
x = torch.randn(2, 8)
manager = get_default_manager()
keys = [llm.llm_engine.vllm_config.compute_hash() for llm in (first, second)]
# As vLLM's drafters do, whose configuration is made from their engine's.
config = first.llm_engine.vllm_config
part = replace(config)
with with_preference("reference"):
    call_op("silu_and_mul", x)
print(json.dumps({
    "ops": [report["ops"] for report in reports],
    "digests": [report["digest"] for report in reports],
    "answers": answers,
    "set": refused(lambda: set_global_policy(SelectionPolicy(prefer="vendor"))),
    "reset": refused(reset_global_policy),
    "clear": refused(manager.clear_failed_impls),
    "config": config.additional_config,
    "part": part.additional_config,
    "calls": [llm.collective_rpc("vllm_fl_report")[0]["calls"] for llm in (first, second)],
    "keys": keys,
}))
"""


AGAIN = """
output = {}
try:
    start(sys.argv[2], VLLM_FL_PER_OP="rms_norm=reference;silu_and_mul=reference")
except Exception as error:
    output["error"] = str(error)
output["open"] = refused(lambda: set_global_policy(SelectionPolicy())) == ""
output["kernels"] = torch._C._dispatch_dump("_C::silu_and_mul").count("CPU")
reset_global_policy()
llm = start()
output["report"] = llm.collective_rpc("vllm_fl_report")[0]
output["answer"] = answer(llm)
output["sealed"] = refused(reset_global_policy)
llm.llm_engine.engine_core.shutdown()
output["again"] = refused(reset_global_policy)
print(json.dumps(output))
"""


def ran(script: str, *folders: Path) -> Any:
    """JSON printed by a script that runs its engines in-process."""
    more = {"VLLM_FL_DISPATCH_DEBUG": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return answer_of(PRELUDE + script, *folders, **IN_ONE_PROCESS, **more)[0]


def test_an_engine_starts_where_another_one_could_not_load(model: Model, tmp_path: Path) -> None:
    """vLLM's executor for one process does not shut down a worker that failed."""
    without_weights = tmp_path / "without"
    shutil.copytree(model("qwen3"), without_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    output = ran(AGAIN, model("qwen3"), without_weights)
    assert "Cannot find any model weights" in output["error"]
    assert output["open"] and output["kernels"] == 1, "the seal and the operators went with it"
    assert output["report"]["ops"]["silu_and_mul"]["impl"] == "reference.torch"
    assert len(output["answer"]) == 4
    assert output["sealed"] and not output["again"]


def test_two_engines_of_one_process(model: Model) -> None:
    output = ran(TWO, model("qwen3"))
    first, second = output["ops"]
    assert first["rms_norm"]["impl"] == first["silu_and_mul"]["impl"] == "vendor.cpu"
    assert second["rms_norm"]["impl"] == second["silu_and_mul"]["impl"] == "reference.torch"
    assert output["digests"][0] != output["digests"][1]
    assert output["answers"][0] == output["answers"][2]
    for change in ("set", "reset", "clear"):
        assert "sealed plan" in output[change]
    # vLLM names its compile cache's folder after this hash: two plans, two folders.
    assert output["keys"][0] != output["keys"][1]
    assert output["config"] == {"mine": 1, "vllm_fl": {"plan": output["digests"][0]}}
    assert output["part"] == output["config"]  # not planned again
    for calls, impl in zip(output["calls"], ("vendor.cpu", "reference.torch"), strict=True):
        assert set(calls["rms_norm"]) == set(calls["silu_and_mul"]) == {impl}
