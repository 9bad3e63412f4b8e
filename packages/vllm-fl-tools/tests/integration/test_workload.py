"""The engine process that generates for `tune --accept` and `bisect`, controlled over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fl_tools.integration.workload import Visit

VLLM = """
import os
from types import SimpleNamespace

print("vLLM says something")
os.write(1, b"and so does what it starts\\n")


class SamplingParams(SimpleNamespace):
    pass


class Engine:
    model_config = SimpleNamespace(get_vocab_size=lambda: 50, max_model_len=512)
    vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 8, 4])
    )

    def step(self):
        return []


class LLM:
    def __init__(self, model, **options):
        if options.get("max_model_len") == 9999:
            raise ValueError("max_model_len is more than the model's 512")
        self.asleep, self.waiting, self.options = False, [], options
        self.llm_engine = Engine()
        if "max_model_len" in options:
            Engine.model_config.max_model_len = options["max_model_len"]

    def collective_rpc(self, name, args=()):
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
        for _ in range(sampling[0].max_tokens):
            self.llm_engine.step()
        return [answered(p["prompt_token_ids"], s) for p, s in zip(prompts, sampling, strict=True)]


def answered(prompt, sampling):
    tokens = [len(prompt)] * sampling.max_tokens
    if hasattr(sampling, "logit_bias"):
        ((token, bias),) = sampling.logit_bias.items()
        assert bias > 1e5
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[min(token, 48)] * len(tokens))])
    if not hasattr(sampling, "logprobs"):
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens[:1])])
    assert sampling.logprobs == sampling.prompt_logprobs == 0
    if hasattr(sampling, "extra_args") and max(sampling.extra_args["vllm_fl_forced"]) < 50:
        tokens = sampling.extra_args["vllm_fl_forced"]
    likely = [{t: SimpleNamespace(logprob=-t), 49: None} for t in (*prompt, *tokens)]
    return SimpleNamespace(
        prompt_logprobs=[None, *likely[1:len(prompt)]],
        outputs=[SimpleNamespace(token_ids=tokens, logprobs=likely[len(prompt):])],
    )
"""

ARGUMENTS = """
from types import SimpleNamespace


class EngineArgs(SimpleNamespace):
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model")
        parser.add_argument("--dtype", default="auto", choices=["auto", "float32"])
        parser.add_argument("--max-model-len", type=int)
        parser.add_argument("--enforce-eager", action="store_true")
        return parser

    @classmethod
    def from_cli_args(cls, args):
        return cls(**vars(args))

    def create_model_config(self):
        assert self.model == "a model" and self.skip_tokenizer_init
        return SimpleNamespace(max_model_len=512)
"""


def test_prompts_follow_from_the_seed() -> None:
    visit = Visit("decode 3", 4, 16, 1)
    (prompts,) = visit.batches(50)
    assert [prompts] == visit.batches(50) != Visit("decode 4", 4, 16, 1).batches(50)
    first, second = Visit("decode 3", 4, 16, 1, times=2).batches(50)
    assert first == prompts != second
    assert prompts[0] != prompts[1], "the second would find the first in the prefix cache"
    assert len(prompts) == 4 and {len(ids) for ids in prompts} == {16}
    assert all(3 <= token < 50 for ids in prompts for token in ids)


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """`engine(*asked)`: the process over a stand-in for vLLM, after these requests."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(VLLM)
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(ARGUMENTS)
    (tmp_path / "vllm" / "utils").mkdir()
    parser = "from argparse import ArgumentParser as FlexibleArgumentParser"
    (tmp_path / "vllm" / "utils" / "argparse_utils.py").write_text(parser)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def run(*asked: dict[str, Any], check: bool = True, **fields: Any) -> Any:
        request = {"model": "a model", "options": {"dtype": "bfloat16"}, **fields}
        return subprocess.run(
            [sys.executable, "-P", "-m", "vllm_fl_tools.integration.workload", json.dumps(request)],
            input="".join(json.dumps(one) + "\n" for one in asked),
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=check,
        )

    return run


def answers(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("batch", [1, 3])
def test_it_answers_with_tokens_and_steps_and_nothing_else(engine: Any, batch: int) -> None:
    visits = [Visit("a", batch, 5, 7), Visit("b", batch, 2, 1), Visit("c", batch, 2, 1, times=3)]
    done = engine(*({"visit": vars(visit)} for visit in visits))
    ready, first, second, third = answers(done)
    assert ready["report"]["asked"] == "vllm_fl_report" and ready["vocabulary"] == 50
    assert ready["graph_tokens"] == 8
    assert ready["report"]["dtype"] == "bfloat16"
    assert first["tokens"] == [[5]] * batch and len(first["steps"]) == 7
    assert second["tokens"] == [[2]] * batch and len(second["steps"]) == 1
    assert third["tokens"] == [[2]] * batch * 3 and len(third["steps"]) == 3
    assert "so does what it starts" in done.stderr


@pytest.mark.parametrize(("longest", "length"), [(100, 100), (512, 512), (2048, 512)])
def test_sequences_are_no_longer_than_the_model_takes(
    engine: Any, longest: int, length: int
) -> None:
    """vLLM rejects a length beyond the model's; the user did not set one."""
    (ready,) = answers(engine(longest=longest))
    assert ready["length"] == ready["report"]["max_model_len"] == length


def test_it_is_given_arguments_as_vllm_serve_takes_them(engine: Any) -> None:
    """Arguments that the user did not set keep the command's values."""
    (ready,) = answers(engine(arguments=["--max-model-len", "100", "--enforce-eager"]))
    assert ready["report"]["max_model_len"] == 100 and ready["report"]["enforce_eager"]
    assert ready["report"]["dtype"] == "bfloat16" and ready["report"]["seed"] == 0
    (ready,) = answers(engine(arguments=["--dtype=float32"]))
    assert ready["report"]["dtype"] == "float32" and "max_model_len" not in ready["report"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--dtype", "int3"], "argument --dtype: invalid choice"),
        (["--max-model-len", "9999"], "max_model_len is more than the model's 512"),
    ],
)
def test_of_wrong_arguments_it_says_what_vllm_says(
    engine: Any, arguments: list[str], said: str
) -> None:
    (only,) = answers(engine(arguments=arguments))
    assert said in only["usage"]


def test_it_lets_every_prompt_repeat_its_last_token(engine: Any) -> None:
    """So two engines compute the same although their results differ by a rounding."""
    visit = Visit("c", 3, 5, 4, repeated=True)
    _, done = answers(engine({"visit": vars(visit)}))
    assert done["tokens"] == [[ids[-1]] * 4 for ids in visit.batches(50)[0]]
    assert len(done["steps"]) == 4


def test_tokens_that_differ_from_the_forced_ones_are_an_error(engine: Any) -> None:
    seed = next(s for s in map(str, range(999)) if Visit(s, 1, 1, 1).batches(50) == [[[49]]])
    done = engine({"visit": vars(Visit(seed, 1, 1, 2, repeated=True))}, check=False)
    assert done.returncode and "did not repeat the requested tokens" in done.stderr
    assert len(answers(done)) == 1


def test_it_says_how_likely_tokens_are(engine: Any) -> None:
    prompts, forced = [[3, 4, 5], [6]], [[8, 9], [7, 7]]
    asked = {"prompts": prompts, "new_tokens": 2}
    free, forced_score = {"score": asked}, {"score": {**asked, "forced": forced}}
    ready, first, second = answers(engine(free, forced_score, steps_aside=True))
    assert ready["report"] is None
    assert first["tokens"] == [[3, 3], [1, 1]]
    assert first["prefill"] == second["prefill"] == [[-4, -5], []]
    assert second["tokens"] == forced and second["decode"] == [[-8, -9], [-7, -7]]
