"""The engine that `vllm-fl tune --accept` tells what to generate, over its pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.integration.workload import Visit

VLLM = """
import os
from types import SimpleNamespace

print("vLLM says something")
os.write(1, b"and so does what it starts\\n")


class SamplingParams(SimpleNamespace):
    pass


class Engine:
    model_config = SimpleNamespace(get_vocab_size=lambda: 50)

    def step(self):
        return []


class LLM:
    def __init__(self, model, **options):
        self.asleep, self.waiting, self.options = False, [], options
        self.llm_engine = Engine()

    def collective_rpc(self, name):
        return [{"digest": "dd", "asked": name, **self.options}]

    def sleep(self, level):
        self.asleep = True

    def wake_up(self, tags):
        self.asleep = False

    def enqueue(self, prompts, sampling, use_tqdm):
        assert self.asleep, "the engine begins with what is there"
        self.waiting, self.sampling = prompts, sampling

    def wait_for_completion(self, use_tqdm):
        assert not self.asleep
        return self.generate(self.waiting, self.sampling, use_tqdm)

    def generate(self, prompts, sampling, use_tqdm):
        for _ in range(sampling.max_tokens):
            self.llm_engine.step()
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[len(p["prompt_token_ids"])])])
            for p in prompts
        ]
"""


def test_prompts_follow_from_the_seed() -> None:
    visit = Visit("decode 3", 4, 16, 1, repeats=2)
    prompts = visit.prompts(50)
    assert prompts == visit.prompts(50) != Visit("decode 4", 4, 16, 1, repeats=2).prompts(50)
    assert prompts[0] != prompts[1], "the second would find the first in the prefix cache"
    assert [len(batch) for batch in prompts] == [4, 4]
    assert {len(ids) for batch in prompts for ids in batch} == {16}
    assert all(3 <= token < 50 for batch in prompts for ids in batch for token in ids)


@pytest.mark.parametrize("batch", [1, 3])
def test_it_answers_with_tokens_and_steps_and_nothing_else(tmp_path: Path, batch: int) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    visits = [Visit("a", batch, 5, 7), Visit("b", batch, 2, 1, repeats=4)]
    request = {"model": "a model", "options": {"dtype": "bfloat16"}}
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "vllm_fl.integration.workload", json.dumps(request)],
        input="".join(json.dumps(vars(visit)) + "\n" for visit in visits),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    ready, first, second = answers
    assert ready["report"]["asked"] == "vllm_fl_report"
    assert ready["report"]["dtype"] == "bfloat16"
    assert first["tokens"] == [[5]] * batch and len(first["steps"]) == 7
    assert second["tokens"] == [[2]] * (4 * batch) and len(second["steps"]) == 4
    assert "so does what it starts" in done.stderr
