"""Operators of vLLM's that a model calls by name, without a CustomOp in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import STOCK, Job, largest_difference
from engines import IN_ONE_PROCESS, PLUGINS, answer_of, batches, run

LAYERS = 2

DIRECT = {
    **IN_ONE_PROCESS,
    "PYTHONPATH": str(PLUGINS / "direct"),
    "VLLM_FL_PLUGIN_MODULES": "direct_operators",
    "VLLM_FL_DISPATCH_DEBUG": "1",
}

OPERATOR = "_C::silu_and_mul"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model whose activation is `torch.ops._C.silu_and_mul`."""
    folder = tiny_model.make(tmp_path_factory.mktemp("direct"))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": ["DirectQwen3ForCausalLM"]}))
    return folder


def served(model: Path, *, eager: bool = True, **variables: str) -> dict[str, Any]:
    return run(Job(str(model), batches(), eager=eager), **{**DIRECT, **variables})


@pytest.mark.slow
def test_a_call_by_name_runs_the_planned_implementation(model: Path) -> None:
    stock = served(model, **STOCK)
    ours = served(model, VLLM_FL_PER_OP="silu_and_mul=vendor:direct")
    (report,) = ours["report"]
    (told,) = report["operators"]["silu_and_mul"].items()
    assert told[0] == OPERATOR and "torch_bindings.cpp" in told[1].pop("replaced")
    counted = {"without_engine": 0, "other_arguments": 0}
    assert told[1] == {"overridden_by": None, **counted}
    # All of the steps' calls, and those of the warm-up.
    assert report["calls"]["silu_and_mul"]["vendor.direct"] >= LAYERS * ours["steps"]
    assert not report["fallbacks"]
    worst, magnitude = largest_difference(stock, ours)
    assert 0 < worst < 0.05 * magnitude, "another order of roundings, in bfloat16"


@pytest.mark.slow
def test_an_implementation_that_calls_the_operator_leaves_it_to_vllm(model: Path) -> None:
    stock = served(model, VLLM_FL_PER_OP="silu_and_mul=stock")
    ours = served(model, VLLM_FL_PER_OP="silu_and_mul=vendor:cpu")
    (report,) = ours["report"]
    assert report["operators"]["silu_and_mul"][OPERATOR] == {"left": "vendor.cpu calls it itself"}
    assert largest_difference(stock, ours)[0] == 0.0


@pytest.mark.slow
def test_a_layer_left_to_vllm_gets_nothing_through_its_operator(model: Path) -> None:
    ours = served(
        model,
        VLLM_FL_PER_OP="silu_and_mul=vendor:direct",
        VLLM_FL_OOT_BLACKLIST="silu_and_mul",
    )
    (report,) = ours["report"]
    assert "silu_and_mul" not in report["operators"]
    assert "silu_and_mul" not in report["calls"]


@pytest.mark.slow
def test_compiled_code_and_what_is_loaded_from_the_cache_call_the_override(
    model: Path, tmp_path: Path
) -> None:
    cache = {
        "VLLM_FL_PER_OP": "silu_and_mul=vendor:direct",
        "VLLM_CACHE_ROOT": str(tmp_path),
    }
    made, loaded = (served(model, eager=False, **cache) for _ in range(2))
    assert "Directly load AOT compilation" not in made["log"]
    assert "saved AOT compiled function" in made["log"]
    assert "Directly load AOT compilation" in loaded["log"]
    for ours in (made, loaded):
        (report,) = ours["report"]
        assert report["mode"] == "compiled"
        assert report["calls"]["silu_and_mul"]["vendor.direct"] >= LAYERS * ours["steps"]
    assert made["tokens"] == loaded["tokens"]
    assert largest_difference(made, loaded)[0] == 0.0


TWO = """
import json, os, sys
import torch
from vllm import LLM, SamplingParams


def start(plan):
    os.environ["VLLM_FL_PER_OP"] = plan
    return LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=sys.argv[2] == "eager")


def answer(llm):
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(5, 30))}
    llm.generate([prompt], sampling, use_tqdm=False)


def calls():
    return [llm.collective_rpc("vllm_fl_report")[0]["calls"].get("silu_and_mul", {})
            for llm in engines]


def kernels():
    return torch._C._dispatch_dump("_C::silu_and_mul").count("CPU")


engines = [
    start(f"silu_and_mul={name}") for name in ("vendor:direct", "reference", "stock")
]
told = {"before": calls(), "kernels": [kernels()]}
for llm in engines:
    answer(llm)
told["after"] = calls()
torch.ops._C.silu_and_mul(torch.empty(1, 32), torch.randn(1, 64))
reports = [llm.collective_rpc("vllm_fl_report")[0] for llm in engines]
told["operators"] = [r["operators"] for r in reports]
told["digests"] = [r["digest"] for r in reports]
for llm in engines:
    llm.llm_engine.engine_core.shutdown()
    told["kernels"].append(kernels())
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_engines_of_one_process_have_each_their_own_and_shutdown_gives_it_back(
    model: Path, mode: str
) -> None:
    told, _ = answer_of(TWO, model, mode, **DIRECT, VLLM_CPU_KVCACHE_SPACE="1")
    made = [
        {impl: n - before.get(impl, 0) for impl, n in after.items()}
        for before, after in zip(told["before"], told["after"], strict=True)
    ]
    # A prompt and three further tokens: four forward passes.
    assert made == [{"vendor.direct": 4 * LAYERS}, {"reference.torch": 4 * LAYERS}, {}]
    assert told["operators"][0]["silu_and_mul"][OPERATOR]["without_engine"] == 1
    assert "silu_and_mul" not in told["operators"][2]
    assert len(set(told["digests"])) == 3
    assert told["kernels"] == [2, 2, 1, 1], "one override for all, until the last leaves"
