"""Runs one engine in a separate process, which answers requests over its pipes.

    python -m vllm_fl_tools.integration.workload '{"model": DIR, "options": {…}}'

Optional keys:

- `arguments`, as for `vllm serve`; if they are invalid, the only answer has `usage`
- `longest`, the maximum tokens of a sequence, also limited by the model
- `as_served`: start the engine like `vllm serve`, without `options`, report its `ranks` for a lock
  file, and exit

Answers are lines of JSON on the original standard output; logs go to standard error. The engine
writes the first answer when it is ready: `report`, the worker report, or null without vllm-fl;
`vocabulary`, the number of tokens; `length`, the maximum tokens of a sequence; `graph_tokens`, the
tokens of the largest captured graph, 0 without graphs. Then it answers each line of input. A line
is an object with one key, the name of a method of `_Served`; the value has its arguments.
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
from ..cli._other_plugins import attributed

FORCED = "vllm_fl_forced"
"""Key of a request's `extra_args` with the tokens for `integration.forcing`."""

PROMPT_TOKENS, STEPS_AFTER_PROMPT, BATCHES = 96, 6, (1, 3, 8)
"""Steps that are run compiled and eager: tokens of each prompt, tokens after it, and numbers of
prompts. A batch of 3 is padded to a captured size."""

CERTAIN = 1e6
"""Number that is added to a token's logit to make the token the most likely one."""


@dataclass(frozen=True)
class Visit:
    """Prompts of random tokens, answered greedily or by repeating their last token.

    Args:
        seed: of the prompts, equal in every engine.
        batch: number of prompts that run together.
        prompt_tokens: tokens of each prompt.
        new_tokens: generated tokens for each prompt.
        repeated: whether a prompt is answered with its last token. Engines with rounding
            differences then compute the same steps. Otherwise they may generate different tokens,
            and the duration of a step may depend on its tokens, for example with experts.
        times: number of consecutive batches, each with other prompts.
    """

    seed: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    repeated: bool = False
    times: int = 1

    def batches(self, vocabulary: int) -> list[list[list[int]]]:
        """Return the token ids of all prompts, without the often special ids 0 to 2."""
        pick = random.Random(self.seed)
        return [
            [
                [pick.randrange(3, vocabulary) for _ in range(self.prompt_tokens)]
                for _ in range(self.batch)
            ]
            for _ in range(self.times)
        ]


class _Served:
    """The engine. The names of its public methods are the kinds of requests."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._ends: list[float] = []
        engine_step = llm.llm_engine.step

        def step() -> Any:
            outputs = engine_step()
            self._ends.append(time.perf_counter())
            return outputs

        llm.llm_engine.step = step

    def visit(self, **fields: Any) -> dict[str, Any]:
        """Run a `Visit`; return `tokens` by prompt, and the seconds of the engine's `steps`.

        Raises:
            RuntimeError: vLLM did not repeat the tokens.
        """
        visit = Visit(**fields)
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
                raise RuntimeError("vLLM did not repeat the requested tokens")
            answers += answered
        return {"tokens": answers, "steps": steps}

    def score(
        self, prompts: list[list[int]], new_tokens: int, forced: list[list[int]] | None = None
    ) -> dict[str, Any]:
        """Return the log-probabilities of tokens, with all prompts in one batch.

        Args:
            prompts: token ids.
            new_tokens: number of tokens after each prompt.
            forced: these tokens, by prompt; None for the most likely ones.

        Returns:
            By prompt: `tokens`, the tokens after it; `prefill`, the log-probability of each token
            of the prompt except the first; `decode`, of each token after it.

        Raises:
            RuntimeError: vLLM sampled tokens other than `forced`.
        """
        extras = [{"extra_args": {FORCED: ids}} for ids in forced or ()] or [{}] * len(prompts)
        sampling = [_sampling(new_tokens, logprobs=0, prompt_logprobs=0, **more) for more in extras]
        outputs = self._generate(prompts, sampling)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if forced is not None and tokens != forced:
            raise RuntimeError("vLLM did not sample the forced tokens")
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
        """Profile the first rank's steps during a visit, by `profiling.Profiling.vllm_fl_profile`.

        `visit` has the fields of a `Visit`.
        """
        self._llm.collective_rpc("vllm_fl_profile", args=(decode, steps))
        try:
            self.visit(**visit)
        finally:
            seen: list[dict[str, Any]] = self._llm.collective_rpc("vllm_fl_profiled")
        return seen[0]

    def stock(self, reload: bool) -> dict[str, Any]:
        """Compare vLLM's own code by `vllm_fl_verify.stock`; return the results of all `ranks`.

        Args:
            reload: whether to load the weights again, and compare them.
        """
        rpc, config = self._llm.collective_rpc, self._llm.llm_engine.vllm_config
        rpc("vllm_fl_stock_compare")
        if not config.model_config.enforce_eager:
            rpc("vllm_fl_stock_record")
            self._steps_of_stock()
            rpc("vllm_fl_stock_eager")
            self._steps_of_stock()
            rpc("vllm_fl_stock_recorded")
        if reload:
            rpc("vllm_fl_stock_reload")
        return {"ranks": rpc("vllm_fl_stock_rows")}

    def _steps_of_stock(self) -> None:
        """Run the same steps at each call, with the same batches and fixed tokens."""
        config = self._llm.llm_engine.vllm_config
        most = config.scheduler_config.max_num_seqs
        prompt = min(PROMPT_TOKENS, config.model_config.max_model_len - STEPS_AFTER_PROMPT)
        for batch in sorted({min(count, most) for count in BATCHES}):
            self._llm.reset_prefix_cache()
            self.visit(
                seed=f"stock {batch}",
                batch=batch,
                prompt_tokens=prompt,
                new_tokens=STEPS_AFTER_PROMPT,
                repeated=True,
            )

    def places(self) -> dict[str, Any]:
        """Return the result of `profiling.Profiling.vllm_fl_places`."""
        answers: list[dict[str, Any]] = self._llm.collective_rpc("vllm_fl_places")
        return answers[0]

    def _generate(self, prompts: list[list[int]], sampling: list[Any]) -> list[Any]:
        """Generate for a batch; all requests wait before the engine's first step.

        `LLM.generate` sends requests one by one to the engine's process, which starts with the
        first to arrive. Without waiting, chance would decide which requests are computed together,
        and how sums are rounded.
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
    return [logprobs[token].logprob for logprobs, token in zip(by_position, tokens, strict=True)]


def _length(options: dict[str, Any]) -> int:
    """Return the model's maximum tokens of a sequence; vLLM rejects requests for more."""
    from vllm.engine.arg_utils import EngineArgs

    length: int = EngineArgs(**options).create_model_config().max_model_len
    return length


def _parsed(model: str, arguments: list[str]) -> dict[str, Any]:
    """Return the EngineArgs fields that the command line changes.

    Raises:
        WrongArguments: vLLM rejects an argument.
    """
    plain, given = vars(arguments_of(model, ())), vars(arguments_of(model, arguments))
    return {name: value for name, value in given.items() if value != plain[name]}


def _as_served(model: str, arguments: list[str]) -> dict[str, Any]:
    """Start an engine like `vllm serve`, and return its first answer."""
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
    """Answer requests until standard input ends."""
    # An engine's processes inherit descriptor 1 and print there, so separate the answers.
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
    except ValueError as error:  # contradictions in vLLM's configuration
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
        ((kind, arguments),) = json.loads(line).items()
        answer(**getattr(served, kind)(**arguments))


if __name__ == "__main__":
    with attributed():
        _main(json.loads(sys.argv[1]))
