"""One engine in a process of its own, which is told over its pipes what to generate.

    python -m vllm_fl.integration.workload '{"model": DIR, "options": {…}}'

Answers are lines of JSON on what was its standard output, and logs go to standard error. It
answers once when it is ready: `report`, what the worker runs with, and `graph_tokens`, those of the
largest graph that was captured, 0 where none was. Then it answers each line that it reads, a
`Visit` as JSON, with `tokens` per prompt and the seconds of each of the engine's steps.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

__all__ = ["Visit"]


@dataclass(frozen=True)
class Visit:
    """What an engine does at one time: prompts of random tokens, answered greedily.

    Args:
        seed: of the prompts, which are the same in every engine.
        batch: prompts that run together.
        prompt_tokens: of each prompt.
        new_tokens: that are generated for each.
        repeats: how often, each time with other prompts.
    """

    seed: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    repeats: int = 1

    def prompts(self, vocabulary: int) -> list[list[list[int]]]:
        """The token ids, by repetition and prompt. The first three ids often have a meaning."""
        pick = random.Random(self.seed)
        return [
            [
                [pick.randrange(3, vocabulary) for _ in range(self.prompt_tokens)]
                for _ in range(self.batch)
            ]
            for _ in range(self.repeats)
        ]


def _main(request: dict[str, Any]) -> None:
    """Serve until standard input ends."""
    # What an engine starts inherits descriptor 1 and prints there: keep the answers apart.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    from vllm import LLM, SamplingParams

    llm = LLM(request["model"], skip_tokenizer_init=True, seed=0, **request["options"])
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    ends: list[float] = []
    engine_step = llm.llm_engine.step

    def step() -> Any:
        outputs = engine_step()
        ends.append(time.perf_counter())
        return outputs

    llm.llm_engine.step = step
    captured = llm.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes
    answer(
        report=llm.collective_rpc("vllm_fl_report")[0],
        graph_tokens=max(captured or (0,)),
    )
    for line in sys.stdin:
        visit = Visit(**json.loads(line))
        sampling = SamplingParams(
            temperature=0, max_tokens=visit.new_tokens, ignore_eos=True, detokenize=False
        )
        tokens: list[list[int]] = []
        steps: list[float] = []
        for batch in visit.prompts(vocabulary):
            prompts: Any = [{"prompt_token_ids": ids} for ids in batch]
            ends[:] = [time.perf_counter()]
            outputs = _together(llm, prompts, sampling)
            steps += [after - before for before, after in pairwise(ends)]
            tokens += [list(output.outputs[0].token_ids) for output in outputs]
        answer(tokens=tokens, steps=steps)


def _together(llm: Any, prompts: Any, sampling: Any) -> list[Any]:
    """Generate for a batch whose requests all wait before the engine takes its first step.

    `LLM.generate` sends them one by one to the engine's process, which begins with what is there:
    chance decides which are computed together, and with it how a sum is rounded.
    """
    if len(prompts) == 1:
        alone: list[Any] = llm.generate(prompts, sampling, use_tqdm=False)
        return alone
    llm.sleep(level=0)
    llm.enqueue(prompts, sampling, use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    outputs: list[Any] = llm.wait_for_completion(use_tqdm=False)
    return outputs


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
