"""Norms and layers of plugins in an engine: the older form, names, refusals while it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_run import EngineFailed, Job, largest_difference
from engines import IN_ONE_PROCESS, Runner, answer_of, batches, run
from test_layer_lists import SCRIPT, VENDOR

Plugin = Callable[..., dict[str, str]]

VENDOR_SHARE = 0.05
"""As in test_plans: what is right differs from PyTorch in the last of bf16's 8 bits, and a tiny
model with random weights has near ties that this decides."""

DEBUG = {"VLLM_FL_DISPATCH_DEBUG": "1"}


def orders(**tokens: str) -> dict[str, str]:
    """VLLM_FL_PER_OP: these orders, and the reference for the rest."""
    every = {"rms_norm": "", "rotary_embedding": "", "silu_and_mul": "", **tokens}
    return {
        "VLLM_FL_PER_OP": ";".join(
            f"{op}={'|'.join(filter(None, (first, 'reference')))}" for op, first in every.items()
        )
    }


@pytest.mark.slow
def test_layers_of_the_older_form_serve_in_an_eager_engine(
    engine: Runner, model: Callable[[str], Path], plugin: Plugin
) -> None:
    """Their first parameter is the layer. Not compared at start, so that it is all theirs."""
    vendor = "impl:vendor.older"
    ours = run(
        Job(str(model("qwen3")), batches()),
        **plugin("older_layers"),
        **orders(rms_norm=vendor, rotary_embedding=vendor, silu_and_mul=vendor),
        **IN_ONE_PROCESS,
        **DEBUG,
        VLLM_FL_PREFLIGHT="off",
    )
    stock = engine("qwen3", "stock-native")
    worst, magnitude = largest_difference(stock, ours)
    assert worst <= VENDOR_SHARE * magnitude
    report = ours["report"][0]
    for op in ("rms_norm", "rotary_embedding", "silu_and_mul"):
        assert report["ops"][op]["impl"] == "vendor.older"
        assert report["calls"][op]["vendor.older"] > 0
    assert report["fallbacks"] == {} and report["demotions"] == {}


@pytest.mark.parametrize(
    "eager",
    [pytest.param(True, id="eager", marks=pytest.mark.slow), pytest.param(False, id="compiled")],
)
@pytest.mark.slow
def test_names_that_look_alike_are_not_mixed_up(
    engine: Runner, model: Callable[[str], Path], plugin: Plugin, tmp_path: Path, eager: bool
) -> None:
    notes = tmp_path / "notes"
    ours = run(
        Job(str(model("qwen3")), batches(), eager=eager),
        **plugin("look_alikes"),
        **orders(
            rms_norm="impl:vendor.华为|impl:vendor.é|impl:vendor.a_b",
            silu_and_mul="impl:vendor.a-b|impl:vendor.a_b|impl:vendor.A_B",
        ),
        **DEBUG,
        LOOK_ALIKES=str(notes),
    )
    ran = set(notes.read_text().splitlines())
    assert ran == {"rms_norm vendor.华为", "silu_and_mul vendor.a-b"}
    worst, magnitude = largest_difference(engine("qwen3", "stock-native", eager), ours)
    assert worst <= VENDOR_SHARE * magnitude
    report = ours["report"][0]
    assert report["ops"]["rms_norm"]["impl"] == "vendor.华为"
    assert set(report["calls"]["rms_norm"]) == {"vendor.华为"}
    assert set(report["calls"]["silu_and_mul"]) == {"vendor.a-b"}


@pytest.mark.slow
def test_a_norm_that_refuses_while_it_serves_leaves_the_call_to_the_next(
    engine: Runner, model: Callable[[str], Path], plugin: Plugin
) -> None:
    ours = run(
        Job(str(model("qwen3")), batches()),
        **plugin("late_refusal"),
        **orders(rms_norm="impl:vendor.late"),
    )
    assert ours["tokens"] == engine("qwen3", "stock-native")["tokens"]
    report, log = ours["report"][0], ours["log"]
    assert report["ops"]["rms_norm"]["impl"] == "vendor.late"
    assert report["fallbacks"]["rms_norm"]["reference.torch"] > 0 and report["demotions"] == {}
    refused = "Implementation 'vendor.late' refused op 'rms_norm': NotImplementedError: not while"
    assert log.count(refused) == 1
    assert log.count("Op 'rms_norm' fallback to 'reference.torch'") == 1


@pytest.mark.slow
def test_strict_mode_raises_the_refusal_by_name(
    model: Callable[[str], Path], plugin: Plugin
) -> None:
    with pytest.raises(EngineFailed) as failure:
        run(
            Job(str(model("qwen3")), batches()),
            **plugin("late_refusal"),
            **orders(rms_norm="impl:vendor.late"),
            VLLM_FL_STRICT="1",
        )
    log = failure.value.log
    assert " planned: " in log, "it starts, and refuses its first request"
    assert "Implementation 'vendor.late' refused op 'rms_norm': NotImplementedError" in log


TWO = """
import json, sys
from vllm import LLM, SamplingParams

def start():
    return LLM(sys.argv[1], skip_tokenizer_init=True)

def answer(llm):
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(5, 30))}
    return list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)

def report(llm):
    return llm.collective_rpc("vllm_fl_report")[0]

first = start()
answers = [answer(first)]
second = start()
before = [report(llm)["calls"] for llm in (first, second)]
answers.append(answer(first))
between = [report(llm)["calls"] for llm in (first, second)]
answers.append(answer(second))
after = [report(llm)["calls"] for llm in (first, second)]
print(json.dumps({
    "answers": answers, "calls": [before, between, after],
    "digests": [report(llm)["digest"] for llm in (first, second)],
}))
"""


@pytest.mark.slow
def test_two_compiled_engines_of_one_plan_count_for_themselves(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Again in the next process, whose engines have the names and digests of this one's."""
    rounds = []
    for _ in range(2):
        told, _ = answer_of(
            TWO,
            model("qwen3"),
            **orders(rms_norm="vendor", silu_and_mul="vendor", rotary_embedding="vendor"),
            **DEBUG,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CACHE_ROOT=str(tmp_path),
        )
        rounds.append(told)
        first, other, last = told["answers"]
        assert first == other == last
        before, between, after = told["calls"]
        for op in ("rms_norm", "silu_and_mul", "rotary_embedding"):
            count = [
                [calls[op]["vendor.cpu"] for calls in both] for both in (before, between, after)
            ]
            assert count[0][0] < count[1][0] == count[2][0]
            assert count[0][1] == count[1][1] < count[2][1]
    assert rounds[0]["digests"] == rounds[1]["digests"]
    assert len(set(rounds[0]["digests"])) == 2


EAGER = {"enforce_eager": True}

LISTS: list[tuple[dict[str, str], dict[str, Any], list[str], str]] = [
    ({}, {}, [], ""),
    ({"VLLM_FL_OOT_BLACKLIST": "RMSNorm"}, {}, ["RMSNorm"], ""),
    ({"VLLM_FL_OOT_WHITELIST": "rms_norm"}, {}, ["GemmaRMSNorm"], ""),
    (
        {"VLLM_FL_OOT_BLACKLIST": "RMSNorm,gemma_rms_norm"},
        {},
        [],
        "oot_blacklist names RMSNorm",
    ),
    ({}, {"custom_ops": ["all", "-gemma_rms_norm"]}, ["GemmaRMSNorm"], ""),
    ({}, {"custom_ops": ["none", "+rms_norm"]}, ["GemmaRMSNorm"], ""),
    ({}, {"custom_ops": ["none"]}, [], "custom_ops has none"),
]
"""Variables, `compilation_config`, the norms then kept, and why all are (or nothing)."""


@pytest.mark.slow
def test_in_eager_mode_norms_are_left_layer_by_layer(model: Callable[[str], Path]) -> None:
    cases = [
        (variables, EAGER | ({"compilation_config": options} if options else {}))
        for variables, options, _, _ in LISTS
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model("qwen3")), json.dumps(cases)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **VENDOR},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    answers = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    for plan, (variables, options, kept, why) in zip(answers, LISTS, strict=True):
        label, reason = plan["ops"]["rms_norm"]
        case = (variables, options)
        assert (label, reason if why else "") == ("stock" if why else "vendor.cpu", why), case
        assert [cls for cls in plan["kept"] if "Norm" in cls] == kept, case
        # A layer that is left to vLLM calls its IR, which then is left to vLLM, too.
        assert (plan["norms"][0] == "vllm_fl") == (not why and not kept), case
