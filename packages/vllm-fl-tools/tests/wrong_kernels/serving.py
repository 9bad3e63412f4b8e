"""Serve wrong kernels one by one, without verification, in one eager vLLM engine.

    python -m wrong_kernels.serving MODEL OUT NAME…

Each kernel runs in a child forked from the started engine, so that the engine stays unchanged.
Writes one line of JSON for each kernel to OUT: column -> [outcome, reason].
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import judged
from .corpus import Wrong, corpus

__all__ = ["COLUMNS", "CONTROL", "in_a_child", "variables"]

COLUMNS = ("live", "shadow", "served")
"""Verification on live tensors, the shadow check, and answers without any check."""

CONTROL = "stock"
"""Name of the control: vLLM's implementations, which are correct and round differently."""

TIE = 0.15
"""Largest difference in nats between two tokens that counts as a tie.

Correct kernels that round differently from `right.py`, such as vLLM's, change tokens with
differences of up to half of it.
"""

SHORT = 16
LONG = 1100
"""Tokens of a short and a long answer; the long one calls each kernel more than 2000 times."""

SECONDS = 60.0
"""Seconds after which a child counts as hanging."""

Answers = list[list[dict[int, float]]]
"""For each prompt and new token: token -> log-probability, with the chosen token first."""

forked = multiprocessing.get_context("fork")


def variables() -> dict[str, str]:
    """Environment variables of the engine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # a process with more threads cannot be forked
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_FL_PLUGIN_MODULES": judged.__name__,
        "VLLM_FL_PER_OP": ";".join(f"{op}=vendor:{judged.VENDOR}|stock" for op in judged.OPS),
        "VLLM_FL_PREFLIGHT": "off",
        "VLLM_FL_SHADOW": "1",  # `_Engine` sets its rate to 0 for other columns
    }


class _Engine:
    def __init__(self, model: str) -> None:
        from vllm import LLM

        from vllm_fl_verify.sampling import Canary

        self.llm: Any = LLM(
            model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            async_scheduling=False,
            max_num_batched_tokens=2048,
            max_logprobs=20,
        )
        (self.worker,) = self.llm.collective_rpc(lambda worker: worker)
        self.shadow = self.worker.vllm_fl_engine.state[Canary].shadow
        self.shadow.rate = 0.0
        self.right: dict[int, Answers] = {}

    def answers(self, prompts: list[list[int]], tokens: int) -> Answers:
        """Generate greedily."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=20
        )
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            [
                {token: row[token].logprob, **{t: p.logprob for t, p in row.items()}}
                for token, row in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
            for done in self.llm.generate(given, sampling, use_tqdm=False)
            for answer in done.outputs
        ]

    def short(self) -> Answers:
        """Answer single and batched prompts of many lengths: 11 tokens, 1357, beyond 2048."""
        found = self.answers([_prompt(9, 0)], SHORT)
        found += self.answers([_prompt(9 + 3 * i, i) for i in range(8)], SHORT)
        found += self.answers([_prompt(5, 50 + i) for i in range(20)], 4)
        for lengths in ((11,), (257, 300), (1357,), (2500, 40)):
            found += self.answers([_prompt(n, n) for n in lengths], SHORT)
        return found + self.answers([_prompt(9, 0)], SHORT)

    def long(self) -> Answers:
        """Generate one answer of `LONG` tokens."""
        return self.answers([_prompt(20, 4)], LONG)

    def parts(self, wrong: Wrong | None) -> Iterator[Callable[[], Answers]]:
        """Yield the sets of prompts for a kernel; None is the control."""
        yield self.short
        if wrong is not None and wrong.later:
            time.sleep(wrong.later)
            yield self.short
        elif wrong is None or wrong.kind == "process":  # the fault depends on the number of calls
            yield self.long

    def live(self, wrong: Wrong | None) -> tuple[str, str]:
        from vllm_fl_verify import probe
        from vllm_fl_verify.live import Live

        runner = self.worker.model_runner
        models = {"": runner.get_model()}
        live = Live(self.worker.vllm_fl_engine.plan, models, self.worker.device)
        with live.watching():
            for tokens in sorted(probe.FORWARD_SIZES, reverse=True):  # like a worker
                not_run = probe.forward(runner, models, self.worker.vllm_config, tokens)
                assert not not_run, not_run
        reason = next((objection.reason for objection in live.objections.values()), "")
        return ("named" if reason else "passes"), reason

    def shadowed(self, wrong: Wrong | None) -> tuple[str, str]:
        """Run the shadow check on each step of short answers, and on 1 in 10 of the long one."""
        for part in self.parts(wrong):
            self.shadow.rate = 0.1 if part == self.long else 1.0
            part()
            for op, impls in self.shadow.report()["compared"].items():
                for tokens, tally in impls.get(f"vendor.{judged.VENDOR}", {}).items():
                    if tally["wrong"]:
                        return "named", f"{op}, up to {tokens} tokens: {tally}"
        return "passes", ""

    def served(self, wrong: Wrong | None) -> tuple[str, str]:
        """Compare answers until one is wrong."""
        others = seen = 0
        for part in self.parts(wrong):
            for right, other in zip(self.right[part.__name__], part(), strict=True):
                others += _wrong(right, other)
                seen += len(right)
            if others:
                return "wrong", f"{others} of {seen} tokens"
        return "right", ""


def _prompt(length: int, salt: int) -> list[int]:
    return [(11 * salt + 5 * i + i * i // 7) % 500 + 3 for i in range(length)]


def _wrong(right: list[dict[int, float]], other: list[dict[int, float]]) -> int:
    """Number of tokens of an answer that differ; 0 if the first of them is a near tie."""
    chosen = [(next(iter(a)), next(iter(b))) for a, b in zip(right, other, strict=True)]
    first = next((i for i, (a, b) in enumerate(chosen) if a != b), None)
    if first is None:
        return 0
    a, b = chosen[first]
    row = right[first]
    if row[a] - row.get(b, min(row.values())) <= TIE:
        return 0
    return sum(a != b for a, b in chosen)


def in_a_child(run: Callable[..., Any], *args: Any, seconds: float, context: Any = forked) -> Any:
    """Return the result of `run` in a child, or that the child hangs or died."""
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, run, *args))
    child.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return "hangs", f"no verdict within {seconds:.0f} s"
        return ours.recv()
    except EOFError:
        child.join()
        return "dies", f"the process ended with status {child.exitcode}"
    finally:
        child.kill()
        child.join()
        ours.close()


def _child(out: Any, run: Callable[..., Any], *args: Any) -> None:
    try:
        answer = run(*args)
    except BaseException as error:
        try:
            answer = "ends", f"{type(error).__name__}: {error}"
        except Exception:
            answer = "ends", type(error).__name__
    out.send(answer)
    out.close()
    os._exit(0)  # do not wait for threads of a kernel


def _judged(engine: _Engine, wrong: Wrong | None, column: str) -> tuple[str, str]:
    if wrong is None:
        judged.refuse()
    else:
        os.environ.update(wrong.environ)
        judged.judge(wrong.impl())  # made in the serving process, like in a worker
    judge = {"live": engine.live, "shadow": engine.shadowed, "served": engine.served}[column]
    return judge(wrong)


def _main(model: str, out: str, *names: str) -> None:
    engine = _Engine(model)
    for part in (engine.short, engine.long):
        engine.right[part.__name__] = in_a_child(part, seconds=SECONDS)
    with Path(out).open("w") as lines:
        for name in names:
            wrong = None if name == CONTROL else corpus()[name]
            seconds = SECONDS + (wrong.later if wrong else 0.0)
            seen = {c: in_a_child(_judged, engine, wrong, c, seconds=seconds) for c in COLUMNS}
            print(json.dumps({"name": name, **seen}), file=lines, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
