"""Real engines on tiny models; each run is made once and shared by tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import engine_run
import forked
import pytest
import tiny_model
from engine_run import STOCK, Job, largest_difference

import envs

PLUGINS = Path(__file__).parent / "plugins"


FRESH = {"python", "TRITON_INTERPRET"}
"""Options that need a new Python process. Triton reads TRITON_INTERPRET when it is imported."""


def run(job: Job, **options: Any) -> dict[str, Any]:
    """`engine_run.run`, in a forked process unless an option needs a new one."""
    return engine_run.run(job, forks=not FRESH & options.keys(), **options)


def answer_of(script: str, *arguments: str | Path, **variables: str) -> tuple[dict[str, Any], str]:
    """(the JSON object that a script prints on its own line, all its output)."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    done = forked.run(script, *map(str, arguments), env=env)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(line), printed


def command(
    *words: str | Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `vllm-fl WORDS` in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "vllm_fl_tools.cli", *words],
        env={**os.environ, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def path_of(*folders: str | Path) -> dict[str, str]:
    """PYTHONPATH with these folders first."""
    folders = (*folders, os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(map(str, filter(None, folders)))}


REFERENCE, VENDOR = {"VLLM_FL_PREFER": "reference"}, {"VLLM_FL_PREFER": "vendor"}

VARIANTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "stock": (STOCK, {}),
    "stock-float32": (STOCK, {"dtype": "float32"}),
    "stock-native": (STOCK, {"compilation_config": {"custom_ops": ["none"]}}),
    "reference": (REFERENCE, {}),
    "no plugin": ({"VLLM_FL_PLUGINS": ""}, {}),
    "cast-order": (
        {
            "VLLM_FL_PLUGIN_MODULES": "cast_order",
            "PYTHONPATH": str(PLUGINS),
            **REFERENCE,
            "VLLM_FL_PER_OP": "rms_norm=vendor:castorder",
        },
        {},
    ),
    "vendor": (VENDOR, {}),
}
"""Name -> environment variables and arguments of vllm.LLM."""

IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""For tests that do not inspect the engine's processes: saves importing vLLM again, half of a
startup. test_server, test_startup_ranks and test_preflight start engines like users."""

Model = Callable[[str], Path]
Plugin = Callable[..., dict[str, str]]
Result = dict[str, Any]
Once = Callable[..., Result]
Runner = Callable[..., Result]
Pair = Callable[..., tuple[Result, Result]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """`model(family)`: the folder of a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: tiny_model.make(folder, family))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder common to all pytest-xdist workers."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def once(shared_folder: Path) -> Once:
    """`once(name, job, VARIABLE=…)`: the result of this job, run once and stored under `name`.
    Workers of pytest-xdist share it: a second request waits for the first."""

    def kept(name: str, job: Job, **options: Any) -> Result:
        file = shared_folder / f"{name}.json"
        with envs.locked(file):
            if not file.exists():
                try:
                    made = run(job, **options)
                except engine_run.EngineFailed as failure:
                    made = {"failed": failure.log}
                file.write_text(json.dumps(made))
        answered: Result = json.loads(file.read_text())
        if "failed" in answered:
            raise engine_run.EngineFailed(answered["failed"])
        return answered

    return kept


@pytest.fixture(scope="session")
def engine(model: Model, once: Once) -> Runner:
    """`engine(family, variant, eager=True)`: that engine's result: answers, plan and counts. It
    generates greedily for one prompt, then for eight in a batch, and returns all logits."""

    @cache
    def answer(family: str, variant: str, eager: bool = True) -> Result:
        variables, options = VARIANTS[variant]
        name = f"{family}-{variant}-{'eager' if eager else 'compiled'}"
        job = Job(str(model(family)), batches(), eager=eager, options=options)
        return once(name, job, VLLM_FL_DISPATCH_DEBUG="1", **IN_ONE_PROCESS, **variables)

    return answer


@pytest.fixture(scope="session")
def both(engine: Runner) -> Pair:
    """`both(family, variant, variant, eager=True)`: the results of two engines. The second starts
    first, because another pytest worker is more likely to be running the first."""

    def pair(family: str, first: str, second: str, eager: bool = True) -> tuple[Result, Result]:
        other = engine(family, second, eager)
        return engine(family, first, eager), other

    return pair


def difference(stock: Result, ours: Result) -> float:
    """The largest difference of two runs' logits, relative to the largest logit of the first."""
    worst, magnitude = largest_difference(stock, ours)
    return worst / magnitude


def assert_same_bits(stock: Result, ours: Result) -> None:
    """Equal tokens and bitwise equal logits, after forward passes over the same batches."""
    assert ours["steps"] == stock["steps"]
    assert ours["tokens"] == stock["tokens"]
    assert difference(stock, ours) == 0.0


def assert_near_transformers(model: Path, answer: Result) -> None:
    """An engine's float32 logits are close to Hugging Face's model on the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompts = [prompt for batch in batches() for prompt in batch]
    for prompt, tokens, rows in zip(prompts, answer["tokens"], answer["logits"], strict=True):
        got = torch.tensor(rows)
        with torch.inference_mode():
            want = exact(torch.tensor([prompt + tokens])).logits[0]
        # The first token has no logits, because it has no predecessor.
        want = want[len(prompt) + len(tokens) - 1 - len(got) : -1]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.fixture
def plugin() -> Plugin:
    """`plugin(name)`: variables that load a module of tests/engine/plugins."""

    def variables(*names: str) -> dict[str, str]:
        return {"VLLM_FL_PLUGIN_MODULES": ",".join(names), "PYTHONPATH": str(PLUGINS)}

    return variables


def direct_model(folder: Path) -> Path:
    """The model in this folder, changed to one of plugins/direct: `torch.ops._C.silu_and_mul` is
    its activation."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "architectures": ["DirectQwen3ForCausalLM"]}))
    return folder


def change(folder: Path) -> None:
    """Scale a model's weights by 1.25."""
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    save_file({name: tensor * 1.25 for name, tensor in load_file(file).items()}, file)


def batches() -> list[list[list[int]]]:
    """One prompt, then eight of different lengths, all shorter than a tiny model's window."""
    prompts = [[(11 * i + 5 * j) % 500 + 3 for j in range(9 + 3 * i)] for i in range(9)]
    return [prompts[:1], prompts[1:]]
