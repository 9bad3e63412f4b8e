"""One engine in a process of its own, which is told over its pipes what to generate.

    python -m vllm_fl_tools.integration.workload '{"model": DIR, "options": {…}}'

`arguments` in it are further ones as `vllm serve` takes them; of wrong ones it answers once, with
`usage`, and ends. With `longest` in it, the engine takes sequences of so many tokens, or of as many
as the model does where these are fewer. With `as_served`, it has what `vllm serve` gives it, and no
`options`: its report is what its `ranks` say for a lock, and it ends then. Answers are lines of
JSON on what was its standard output, and logs go to standard error. It answers once when it is
ready: `report`, what the worker runs with, or null where vllm-fl steps aside; `vocabulary`, how
many tokens there are; `length`, of how many a sequence may be; and `graph_tokens`, those of the
largest graph that was captured, 0 where none was. Then it answers each line that it reads: an
object whose one key is a method of `_Served`, and whose value has that method's arguments.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..cli._engine_args import WrongArguments, arguments_of
from ..cli._neighbours import attributed

__all__ = ["FORCED", "Visit"]

FORCED = "vllm_fl_forced"
"""The key of a request's `extra_args` under which `integration.forcing` finds its tokens."""

CERTAIN = 1e6
"""What is added to a token's logit so that no other is the likeliest."""


@dataclass(frozen=True)
class Visit:
    """What an engine does at one time: prompts of random tokens, each answered greedily, or with
    its own last token again and again.

    Args:
        seed: of the prompts, which are the same in every engine.
        batch: prompts that run together.
        prompt_tokens: of each prompt.
        new_tokens: that are generated for each.
        repeated: whether a prompt is answered with its last token. Engines that differ by a
            rounding then compute the same steps; otherwise one of them may be sent tokens whose
            steps take another time, as they do where experts are chosen by token.
        times: how often in a row, each time with other prompts.
    """

    seed: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    repeated: bool = False
    times: int = 1

    def batches(self, vocabulary: int) -> list[list[list[int]]]:
        """The token ids by prompt, each time. The first three ids often have a meaning."""
        pick = random.Random(self.seed)
        return [
            [
                [pick.randrange(3, vocabulary) for _ in range(self.prompt_tokens)]
                for _ in range(self.batch)
            ]
            for _ in range(self.times)
        ]


class _Served:
    """The engine, with what it can be asked: each public method's name is a kind of request."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._ends: list[float] = []
        engine_step = llm.llm_engine.step

        def step() -> Any:
            outputs = engine_step()
            self._ends.append(time.perf_counter())
            return outputs

        llm.llm_engine.step = step

    def visit(self, **told: Any) -> dict[str, Any]:
        """A `Visit`: `tokens` per prompt, and the seconds of each of the engine's `steps`.

        Raises:
            RuntimeError: vLLM answered with other tokens than those that shall be repeated.
        """
        visit = Visit(**told)
        answers: list[list[int]] = []
        steps: list[float] = []
        for batch in visit.batches(self._llm.llm_engine.model_config.get_vocab_size()):
            more = [{"logit_bias": {ids[-1]: CERTAIN}} if visit.repeated else {} for ids in batch]
            sampling = [_sampling(visit.new_tokens, **of_prompt) for of_prompt in more]
            self._ends[:] = [time.perf_counter()]
            outputs = self._generate(batch, sampling)
            steps += [after - before for before, after in pairwise(self._ends)]
            answered = [list(output.outputs[0].token_ids) for output in outputs]
            if visit.repeated and answered != [[ids[-1]] * visit.new_tokens for ids in batch]:
                raise RuntimeError("vLLM did not repeat the tokens that it was told to repeat")
            answers += answered
        return {"tokens": answers, "steps": steps}

    def score(
        self, prompts: list[list[int]], new_tokens: int, forced: list[list[int]] | None = None
    ) -> dict[str, Any]:
        """How likely the engine holds tokens to be, with all prompts in one batch.

        Args:
            prompts: token ids.
            new_tokens: that follow each prompt.
            forced: those tokens, by prompt; None for the likeliest.

        Returns:
            By prompt `tokens`, those that followed; `prefill`, the log-probability of each of the
            prompt's but the first; `decode`, of each of those that followed.
        """
        told = [{"extra_args": {FORCED: ids}} for ids in forced or ()] or [{}] * len(prompts)
        sampling = [_sampling(new_tokens, logprobs=0, prompt_logprobs=0, **more) for more in told]
        outputs = self._generate(prompts, sampling)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if forced is not None and tokens != forced:
            raise RuntimeError("vLLM did not sample the tokens that were forced")
        return {
            "tokens": tokens,
            "prefill": [
                _of_tokens(output.prompt_logprobs[1:], ids[1:])
                for output, ids in zip(outputs, prompts, strict=True)
            ],
            "decode": [
                _of_tokens(output.outputs[0].logprobs, ids)
                for output, ids in zip(outputs, tokens, strict=True)
            ],
        }

    def profile(self, visit: dict[str, Any], decode: bool, steps: int) -> dict[str, Any]:
        """The profile of the first rank's steps of one kind, during a visit.

        Args:
            visit: a `Visit`, by field.
            decode, steps: as for `profiling.Profiling.vllm_fl_profile`.

        Returns:
            As `vllm_fl_profiled`.
        """
        self._llm.collective_rpc("vllm_fl_profile", args=(decode, steps))
        try:
            self.visit(**visit)
        finally:
            seen: list[dict[str, Any]] = self._llm.collective_rpc("vllm_fl_profiled")
        return seen[0]

    def places(self) -> dict[str, Any]:
        """What names in a profile stand for, as `profiling.Profiling.vllm_fl_places` says."""
        told: list[dict[str, Any]] = self._llm.collective_rpc("vllm_fl_places")
        return told[0]

    def _generate(self, prompts: list[list[int]], sampling: list[Any]) -> list[Any]:
        """Generate for a batch whose requests all wait before the engine takes its first step.

        `LLM.generate` sends them one by one to the engine's process, which begins with what is
        there: chance decides which are computed together, and with it how a sum is rounded.
        """
        llm, asked = self._llm, [{"prompt_token_ids": ids} for ids in prompts]
        if len(asked) == 1:
            alone: list[Any] = llm.generate(asked, sampling, use_tqdm=False)
            return alone
        llm.sleep(level=0)
        llm.enqueue(asked, sampling, use_tqdm=False)
        llm.wake_up(tags=["scheduling"])
        outputs: list[Any] = llm.wait_for_completion(use_tqdm=False)
        return outputs


def _sampling(new_tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **more
    )


def _of_tokens(by_position: Any, tokens: list[int]) -> list[float]:
    """The log-probability of each token, out of what vLLM tells for its position."""
    return [told[token].logprob for told, token in zip(by_position, tokens, strict=True)]


def _length(options: dict[str, Any]) -> int:
    """How many tokens a sequence of the model may have; vLLM refuses to be asked for more."""
    from vllm.engine.arg_utils import EngineArgs

    length: int = EngineArgs(**options).create_model_config().max_model_len
    return length


def _parsed(model: str, arguments: list[str]) -> dict[str, Any]:
    """The fields of vLLM's EngineArgs that arguments of a command line give other values to.

    Raises:
        WrongArguments: vLLM knows one of them not, or not with this value.
    """
    plain, given = vars(arguments_of(model, ())), vars(arguments_of(model, arguments))
    return {name: value for name, value in given.items() if value != plain[name]}


def _as_served(model: str, arguments: list[str]) -> dict[str, Any]:
    """The answer of an engine as `vllm serve` starts one."""
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        arguments_of(model, arguments),
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_multiprocessing=True,
    )
    ranks = engine.collective_rpc("vllm_fl_report")
    report = {"ranks": [{**r["lock"], "seed": r["seed"]} for r in ranks]}
    length = engine.model_config.max_model_len
    return {"report": report, "vocabulary": 0, "length": length, "graph_tokens": 0}


def _main(request: dict[str, Any]) -> None:
    """Serve until standard input ends."""
    # What an engine starts inherits descriptor 1 and prints there: keep the answers apart.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    from vllm import LLM

    options = {"model": request["model"], "skip_tokenizer_init": True, "seed": 0}
    options |= request["options"]
    given, longest = request.get("arguments"), request.get("longest")
    try:
        if request.get("as_served"):
            return answer(**_as_served(request["model"], given or []))
        if given:
            options |= _parsed(request["model"], given)
        if longest is not None:
            options["max_model_len"] = min(longest, _length(options))
        llm = LLM(**options)
    except WrongArguments as error:
        return answer(usage=str(error))
    except ValueError as error:  # vLLM's configuration, whose parts contradict each other
        if not given:
            raise
        traceback.print_exc()
        return answer(usage=str(error))
    served = _Served(llm)
    steps_aside = request.get("steps_aside", False)
    captured = llm.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes
    answer(
        report=None if steps_aside else llm.collective_rpc("vllm_fl_report")[0],
        vocabulary=llm.llm_engine.model_config.get_vocab_size(),
        length=llm.llm_engine.model_config.max_model_len,
        graph_tokens=max(captured or (0,)),
    )
    for line in sys.stdin:
        ((kind, told),) = json.loads(line).items()
        answer(**getattr(served, kind)(**told))


if __name__ == "__main__":
    with attributed():
        _main(json.loads(sys.argv[1]))
