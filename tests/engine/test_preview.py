"""`vllm-fl plan` prints what a worker plans: for settings, files, modes and vLLM's arguments."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from engines import Model, answer_of

BOTH = """
import io, json, os, pickle, sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import torch
from vllm import EngineArgs
from vllm.usage.usage_lib import UsageContext

from vllm_fl_tools.cli import main
from vllm_fl.dispatch import reset_default_manager
from vllm_fl.errors import StartError, VllmFLError
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.models import completed
from vllm_fl.integration.planning import facts_of
from vllm_fl.integration.settling import set_plan, settle
from vllm_fl.plugins.inspection import Moment
from vllm_fl.settings.loading import load_startup

torch.set_num_threads(1)  # as in a worker
clean = dict(os.environ)


def previewed(case):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(["plan", "--json", "--model", case["model"], *case["words"]])
    if status == 2:
        return {"error": err.getvalue()}
    plan = json.loads(out.getvalue())["plan"]
    of_model = "layers", "in_model"
    ops = {
        op: {k: v for k, v in each.items() if k not in of_model} for op, each in plan["ops"].items()
    }
    sizes = [plan["tokens"], plan["sequences"]]
    assert plan["verified"] is False and status == bool(plan["ends"])
    return {"mode": plan["mode"], "ops": ops, "ends": bool(plan["ends"]), "sizes": sizes}


def planned(case):
    # As a worker that was spawned has it.
    arguments = EngineArgs(case["model"], **case["options"])
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    sizes = [config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs]
    if not load_startup().enabled:
        mode = "compiled" if config.compilation_config.mode else "eager"
        return {"mode": mode, "ops": {}, "ends": False, "sizes": sizes}
    sent = pickle.loads(pickle.dumps(config))
    engine = Engine(completed(facts_of(sent), sent)[0], 0, SimpleNamespace(vllm_config=sent), True)
    engine.device = torch.device("cpu")
    ends = False
    set_plan(engine)
    try:
        settle(engine, Moment.PLANNED)
    except StartError:
        ends = True
    plan = engine.plan
    ops = {op: entry.to_json() for op, entry in plan.entries.items()}
    return {"mode": plan.mode, "ops": ops, "ends": ends, "sizes": sizes}


found = []
for case in json.loads(sys.argv[1]):
    os.environ.clear()
    os.environ.update(clean | case["variables"])
    outcomes = []
    for ask in (previewed, planned):
        reset_default_manager()
        try:
            outcomes.append(ask(case))
        except VllmFLError as error:
            outcomes.append({"error": error.code})
    found.append(outcomes)
print(json.dumps({"found": found}))
"""

Settings = dict[str, str]
Arguments = tuple[list[str], dict[str, Any]]

EAGER: Arguments = (["--enforce-eager"], {"enforce_eager": True})
FOUND_BY_NEWCOMERS: list[tuple[Settings, Arguments]] = [
    ({"VLLM_FL_PREFER_ENABLED": "false"}, EAGER),
    ({"VLLM_FL_OOT_ENABLED": "0"}, EAGER),
    ({"VLLM_FL_OOT_WHITELIST": "RMSNorm,GemmaRMSNorm", "VLLM_FL_PREFER": "vendor"}, EAGER),
    ({"VLLM_FL_CONFIG": "norms.yaml"}, EAGER),
    ({"VLLM_FL_CONFIG": "extends.yaml"}, EAGER),
    ({"VLLM_FL_DENY_VENDORS": "cpu"}, EAGER),
    ({"VLLM_FL_CONFIG": "norms.yaml", "VLLM_FL_STRICT": "1"}, EAGER),
    ({}, ([], {})),
]
"""Cases in which the command line formerly disagreed with the engine."""

FILES = {
    "norms.yaml": "op_backends:\n"
    + "".join(f"  {op}: [vendor, stock]\n" for op in ("rms_norm", "layer_norm", "rms_norm_gated")),
    "sizes.yaml": "op_backends:\n  silu_and_mul: {<=16: 'vendor:cpu', rest: [reference, stock]}\n",
    "modes.yaml": "prefer: vendor\nop_backends:\n  rms_norm:\n    eager: [reference]\n"
    "    compiled: [vendor, stock]\n",
    "strict.yaml": "strict: true\nop_backends: {silu_and_mul: ['vendor:cuda']}\n",
    "extends.yaml": "extends: platform\nop_backends: {'group:activations': [vendor, stock]}\n",
    "wrong.yaml": "op_backends: {silu_and_mul: [vendr]}\n",
}

SETTINGS: dict[str, tuple[str, ...]] = {
    "VLLM_FL_PREFER": ("vendor", "reference", "flagos", "stock"),
    "VLLM_FL_PER_OP": (
        "rms_norm=reference|vendor",
        "silu_and_mul=vendor:cpu;rotary_embedding=vendor",
        "rms_norm=stock",
        "silu_and_mul=vendor:cuda",
        "group:norms=reference",
    ),
    "VLLM_FL_DENY_VENDORS": ("cpu", "cpu,cuda"),
    "VLLM_FL_ALLOW_VENDORS": ("cpu", "cuda"),
    "VLLM_FL_STRICT": ("1",),
    "VLLM_FL_OOT_ENABLED": ("0",),
    "VLLM_FL_OOT_WHITELIST": ("RMSNorm", "rms_norm,silu_and_mul", ""),
    "VLLM_FL_OOT_BLACKLIST": ("SiluAndMul", "RMSNorm,RotaryEmbedding"),
    "VLLM_FL_PREFER_ENABLED": ("0",),
    "VLLM_FL_PLATFORM": ("cpu", "cuda", "none"),
    "VLLM_FL_PLUGINS": ("vllm-fl-ops,vllm-fl-reference", "vllm-fl-ops,vllm-fl-cpu"),
    "VLLM_FL_CONFIG": tuple(FILES),
    "VLLM_FL_REQUIRE": ("batch_invariant",),
    "VLLM_FL_DISPATCH_DEBUG": ("1",),
}

NO_CUSTOM_OPS = {"custom_ops": ["none"]}
NORMS_LEFT = {"custom_ops": ["-rms_norm"]}
NATIVE = {"rms_norm": ["native"]}
ARGUMENTS: list[Arguments] = [
    (["--dtype", "float32"], {"dtype": "float32"}),
    (["--max-num-batched-tokens", "96"], {"max_num_batched_tokens": 96}),
    (["--max-num-seqs=3"], {"max_num_seqs": 3}),
    (["--max-model-len", "256"], {"max_model_len": 256}),
    (["--tensor-parallel-size", "2"], {"tensor_parallel_size": 2}),
    (["-cc", json.dumps(NO_CUSTOM_OPS)], {"compilation_config": NO_CUSTOM_OPS}),
    (["-cc.custom_ops+", "-rms_norm"], {"compilation_config": NORMS_LEFT}),
    (["--ir-op-priority", json.dumps(NATIVE)], {"ir_op_priority": NATIVE}),
    (["--attention-backend", "CPU_ATTN"], {"attention_backend": "CPU_ATTN"}),
    (["--port", "8001", "--served-model-name", "m"], {"served_model_name": ["m"]}),
]
DRAWN = 64
Case = tuple[str, Settings, Arguments]


def drawn() -> list[Case]:
    """A few random settings and arguments per case; the seed makes every run the same."""
    pick, found = random.Random(44), []
    for n in range(DRAWN):
        names = pick.sample([*SETTINGS], pick.randint(0, 3))
        words: list[str] = []
        options: dict[str, Any] = {}
        for more, own in [*pick.sample(ARGUMENTS, pick.randint(0, 2)), *[EAGER] * (n % 3 > 0)]:
            if not options.keys() & own.keys():
                words, options = [*words, *more], {**options, **own}
        settings = {name: pick.choice(SETTINGS[name]) for name in names}
        family = pick.choice(("qwen3", "qwen3", "mixtral", "gemma3", "qwen3_next"))
        found.append((family, settings, (words, options)))
    return found


def compared(cases: list[Case], model: Model, folder: Path) -> list[tuple[Case, Any, Any]]:
    """Each case, the preview's plan and the worker's plan."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    asked = [
        {
            "model": str(model(family)),
            "variables": {n: str(folder / v) if "." in v else v for n, v in settings.items()},
            "words": words,
            "options": options,
        }
        for family, settings, (words, options) in cases
    ]
    answered, _ = answer_of(
        BOTH, json.dumps(asked), VLLM_FL_PREFLIGHT="off", VLLM_LOGGING_LEVEL="ERROR"
    )
    return [(case, *outcome) for case, outcome in zip(cases, answered["found"], strict=True)]


def differ(preview: Any, planned: Any) -> bool:
    """Whether they differ. If startup fails, the preview must print the same error code."""
    if "error" in preview and "error" in planned:
        return f"[{planned['error']}]" not in preview["error"]
    return bool(preview != planned)


def test_what_newcomers_tried(model: Model, tmp_path: Path) -> None:
    cases = [("qwen3", *case) for case in FOUND_BY_NEWCOMERS]
    assert [each for each in compared(cases, model, tmp_path) if differ(*each[1:])] == []


@pytest.mark.slow
def test_combinations_of_settings_and_arguments(model: Model, tmp_path: Path) -> None:
    found = compared(drawn(), model, tmp_path)
    assert len(found) >= 60 and [each for each in found if differ(*each[1:])] == []
    plans = [json.dumps(planned) for _, _, planned in found]
    assert len(set(plans)) >= 30, "they say something of different plans"
    assert sum('"error"' in plan for plan in plans) < 10
