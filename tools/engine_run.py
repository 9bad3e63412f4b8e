"""Run vLLM's engine in a separate process and return its plan, call counts, answers and times.

    python engine_run.py '{"model": DIR, "out": FILE, ...}'

Environment variables control vllm-fl. `run()` starts such a process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import forked

__all__ = ["BIND", "STOCK", "EngineFailed", "Job", "cores", "end_all", "largest_difference", "run"]

STOCK = {"VLLM_FL_PREFER_ENABLED": "false"}
"""Variables that disable vllm-fl."""

SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable for the CPU cores of its engine; `|` separates ranks."""


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Job:
    """Work for one engine.

    Args:
        model: the model's folder.
        batches: batches of prompts (token ids), run one after the other. All prompts of a batch
            wait before its first step.
        new_tokens: tokens generated per prompt, greedily.
        eager: whether vLLM runs without torch.compile.
        options: further arguments of `vllm.LLM`.
        logits: whether to return the logits of prompts and answers.
        prompt_logits: whether `logits` includes the prompts; this disables vLLM's prefix cache.
        rounds: timed repetitions of the last batch, after one warm-up.
        scored: texts (token ids); returns the log-probability of each token except the first. Not
            with `logits`.
        leads: whether to return the likeliest token and its lead for each token of `scored` and of
            the answers. Not with `logits`.
        adapter: the folder of a LoRA adapter that all requests use; empty for none.
        updates: calls of all workers after the batches, each [method, keyword arguments, whether
            the batches run again afterwards]. The prefix cache is reset after each call. `LLM.NAME`
            calls a method of `vllm.LLM` instead.
        midway: a method called on all workers during another run of the last batch, at the end.
        meets: a folder in which data-parallel engines (numbered by VLLM_DP_RANK) create a file when
            they have finished. They exit together, because each step of one needs the others.
            Empty for a single engine.
    """

    model: str
    batches: list[list[list[int]]]
    new_tokens: int = 8
    eager: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    logits: bool = True
    prompt_logits: bool = True
    rounds: int = 0
    scored: list[list[int]] = field(default_factory=list)
    leads: bool = False
    adapter: str = ""
    updates: list[list[Any]] = field(default_factory=list)
    midway: str = ""
    meets: str = ""


class EngineFailed(RuntimeError):
    """The engine's process failed; `log` is its output."""

    def __init__(self, log: str) -> None:
        super().__init__(f"the engine failed; it printed:\n{log}")
        self.log = log


def run(
    job: Job,
    *,
    timeout: float = 600,
    python: str = sys.executable,
    forks: bool = False,
    **variables: str,
) -> dict[str, Any]:
    """Run a job in a new process with these environment variables added.

    With `forks` the process is forked by `forked` and `python` is ignored; tests use this.

    A single-rank engine computes in one thread, on the first core that this process may use.
    Engines then sum in the same order on all machines. Set VLLM_CPU_OMP_THREADS_BIND to override.

    Returns:
        A dictionary with `log`, the output of the process, and

        - per prompt of all batches: `tokens`, `logits`, `cached` (tokens found in the cache) and,
          with `leads`, `answer_leads`;
        - per text of `scored`: `logprobs` and, with `leads`, `leads`. Leads are `[likeliest token,
          log-probability above the next]` for each token;
        - `steps` (number of forward passes of the batches), `seconds` per round, `kv_blocks`,
          `report` (None for stock) and `custom_ops`;
        - `updates`, each with `answers` or `error`, and the `tokens` of the following batches;
          `midway`, with the same keys.

    Raises:
        EngineFailed: the process failed or, without `forks`, timed out.
        subprocess.TimeoutExpired: it timed out, with `forks`.
    """
    alone = {} if "tensor_parallel_size" in job.options else {BIND: str(min(cores()))}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        request = {"job": asdict(job), "out": str(out)}
        env = {**os.environ, **SMALL, **alone, **variables}
        if forks:
            done = forked.call(_main, request, env=env, timeout=timeout, merged=True)
        else:
            done = _fresh([python, __file__, json.dumps(request)], env, timeout)
        if done.returncode != 0 or not out.exists():
            raise EngineFailed(done.stdout)
        return {**json.loads(out.read_text()), "log": done.stdout}


def end_all() -> None:
    """Kill all running engines; for signal handlers that end this process."""
    for session in LIVE.copy():
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


LIVE: set[int] = set()
"""Session ids of the running engines."""


def _fresh(
    command: list[str], env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command in a new session, and kill the session's remaining processes afterwards.

    Raises:
        EngineFailed: it timed out.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            command,
            env=env,
            stdout=printed,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        late = ""
        LIVE.add(process.pid)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = f"it did not end within {timeout:g} s, and was killed\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills workers that hang
            process.wait()
            LIVE.discard(process.pid)
        printed.seek(0)
        log = printed.read()
    if late:
        raise EngineFailed(log + late)
    return subprocess.CompletedProcess(command, process.returncode, log)


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float]:
    """Return (largest difference of two runs' logits, largest magnitude in the first).

    An answer's logits are compared up to and including the first token that differs, because the
    runs then have different inputs.
    """
    worst = magnitude = 0.0
    for i, prompt in enumerate(a["logits"]):
        same = 0
        pairs = zip(a["tokens"][i], b["tokens"][i], strict=True)
        for mine, other in pairs:
            if mine != other:
                break
            same += 1
        length = len(prompt) - len(a["tokens"][i]) + min(same + 1, len(a["tokens"][i]))
        for row_a, row_b in zip(prompt[:length], b["logits"][i][:length], strict=True):
            worst = max(worst, *(abs(x - y) for x, y in zip(row_a, row_b, strict=True)))
            magnitude = max(magnitude, *map(abs, row_a))
    return worst, magnitude


def _main(request: dict[str, Any]) -> None:
    job = Job(**request["job"])
    from vllm import LLM, SamplingParams

    llm = LLM(
        job.model,
        skip_tokenizer_init=True,
        enforce_eager=job.eager,
        logprobs_mode="raw_logits" if job.logits else "raw_logprobs",
        max_logprobs=-1,
        disable_log_stats=False,  # `_steps` reads them
        **job.options,
    )

    logprobs = 2 if job.leads else None
    through: dict[str, Any] = {}
    if job.adapter:
        from vllm.lora.request import LoRARequest

        through = {"lora_request": LoRARequest("adapter", 1, job.adapter)}

    def sampling(logits: bool) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=job.new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if logits else logprobs,
            prompt_logprobs=-1 if logits and job.prompt_logits else None,
        )

    outputs = []
    for batch in job.batches:
        prompts: Any = [{"prompt_token_ids": ids} for ids in batch]
        if job.meets:  # data-parallel schedulers cannot wait for all prompts
            outputs += llm.generate(prompts, sampling(job.logits), use_tqdm=False, **through)
        else:
            outputs += _together(llm, prompts, sampling(job.logits), **through)
    steps = _steps(llm)
    scored = _scored(llm, job.scored, **through) if job.scored else []
    seconds = []
    for _ in range(job.rounds):
        start = time.perf_counter()
        llm.generate(prompts, sampling(False), use_tqdm=False, **through)
        seconds.append(time.perf_counter() - start)

    def asked(method: str, **kwargs: Any) -> dict[str, Any]:
        own = method.removeprefix("LLM.")
        try:
            if own != method:
                return {"answers": getattr(llm, own)(**kwargs)}
            return {"answers": llm.collective_rpc(method, kwargs=kwargs)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    updates = []
    for method, kwargs, runs_again in job.updates:
        answered = asked(method, **kwargs)
        llm.reset_prefix_cache()
        again = []
        for batch in job.batches if runs_again else ():
            prompts = [{"prompt_token_ids": ids} for ids in batch]
            again += _together(llm, prompts, sampling(False), **through)
        updates.append({**answered, "tokens": _tokens(again)})
    midway = {}
    if job.midway:
        llm.reset_prefix_cache()
        llm.sleep(level=0)
        llm.enqueue(prompts, sampling(False), use_tqdm=False, **through)
        llm.wake_up(tags=["scheduling"])
        for _ in range(3):
            llm.llm_engine.step()
        midway = asked(job.midway)
        midway["tokens"] = _tokens(llm.wait_for_completion(use_tqdm=False))
    config = llm.llm_engine.vllm_config
    ours = os.environ.get("VLLM_FL_PREFER_ENABLED", "true").lower() not in ("0", "false")
    result = {
        "tokens": _tokens(outputs),
        "logits": [_rows(o) for o in outputs] if job.logits else [],
        "logprobs": [
            [row[token].logprob for row, token in zip(rows, ids[1:], strict=True)]
            for rows, ids in zip(scored, job.scored, strict=True)
        ],
        "leads": [_leads(rows) for rows in scored] if job.leads else [],
        "answer_leads": [_leads(o.outputs[0].logprobs) for o in outputs] if job.leads else [],
        "cached": [o.num_cached_tokens for o in outputs],
        "steps": steps,
        "seconds": seconds,
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "report": llm.collective_rpc("vllm_fl_report") if ours else None,
        "custom_ops": list(config.compilation_config.custom_ops),
        "updates": updates,
        "midway": midway,
    }
    Path(request["out"]).write_text(json.dumps(result))
    if job.meets:
        Path(job.meets, os.environ["VLLM_DP_RANK"]).touch()
        while len(os.listdir(job.meets)) < int(os.environ["VLLM_DP_SIZE"]):
            time.sleep(0.1)


def _together(llm: Any, prompts: Any, sampling: Any, **through: Any) -> list[Any]:
    """Generate for a batch, and start only when all requests are in the engine's queue.

    `LLM.generate` sends requests one by one to the engine's process, which starts immediately, so
    chance decides which prompts are prefilled together. The number of tokens selects the matrix
    product's kernel (on AMX, another kernel up to four tokens), and thus the rounding of sums.
    """
    llm.sleep(level=0)
    llm.enqueue(prompts, sampling, use_tqdm=False, **through)
    llm.wake_up(tags=["scheduling"])
    outputs: list[Any] = llm.wait_for_completion(use_tqdm=False)
    return outputs


def _scored(llm: Any, texts: list[list[int]], **through: Any) -> list[Any]:
    """Log-probabilities of each token except a text's first, and of the two likeliest tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=2)
    prompts: Any = [{"prompt_token_ids": ids} for ids in texts]
    return [o.prompt_logprobs[1:] for o in _together(llm, prompts, sampling, **through)]


def _leads(rows: Any) -> list[tuple[int, float]]:
    """Per position: the likeliest token, and its lead over the second in log-probability."""
    found = []
    for row in rows:
        first, second = sorted(row, key=lambda token: -row[token].logprob)[:2]
        found.append((first, row[first].logprob - row[second].logprob))
    return found


def _steps(llm: Any) -> int:
    (tokens,) = [m for m in llm.get_metrics() if m.name == "vllm:iteration_tokens_total"]
    return int(tokens.count)


def _tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def _rows(output: Any) -> list[list[float]]:
    """Logits over the vocabulary of each prompt token but the first, and of each new token."""
    rows = [row for row in (output.prompt_logprobs or []) if row is not None]
    rows += output.outputs[0].logprobs
    return [[row[token].logprob for token in sorted(row)] for row in rows]


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
