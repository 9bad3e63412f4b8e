"""One run of vLLM's engine in a process of its own: what it planned, counted, answered and took.

    python engine_run.py '{"model": DIR, "out": FILE, ...}'

The environment says whether and how vllm-fl takes part. `run()` starts such a process.
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

__all__ = ["BIND", "STOCK", "EngineFailed", "Job", "cores", "largest_difference", "run"]

STOCK = {"VLLM_FL_PREFER_ENABLED": "false"}
"""The variables under which vllm-fl steps aside."""

SMALL = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable for the cores of its CPU engine, `|` between those of different ranks."""


def cores() -> list[int]:
    """The numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Job:
    """What one engine does.

    Args:
        model: the model's folder.
        batches: prompts that run together, as token ids, one batch after the other. All of a
            batch are there before its first step.
        new_tokens: tokens generated for each, greedily.
        eager: whether vLLM runs without torch.compile.
        options: further arguments of `vllm.LLM`.
        logits: whether to return the logits of prompt and answer.
        prompt_logits: whether the prompt's are among them; asking for them turns vLLM's prefix
            cache off.
        rounds: timed repetitions of the last batch, after one that warms up.
        scored: texts, as token ids, of which the log-probability of each token but the first is
            returned; not with `logits`.
        leads: whether to return which token was the likeliest, and by how much, of `scored` and of
            the answers; not with `logits`.
        adapter: the folder of a LoRA adapter that all of it goes through; empty for none.
        updates: what all workers are asked behind the batches, [method, keyword arguments,
            whether the batches run again afterwards], with nothing in vLLM's cache. A method
            `LLM.sleep` is one of `vllm.LLM`.
        midway: what they are asked while the last batch is under way, once more at the end.
        meets: a folder in which the data-parallel engines of a model leave word of their end, each
            told its number by VLLM_DP_RANK: none ends before all have answered, since a step of
            one needs the others. Empty for an engine alone.
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
    """The engine's process ended with an error; `log` is what it printed."""

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
    """Run a job in a fresh process of this Python with these environment variables added.

    With `forks` it is a process of `forked`, as in tests, of the Python that runs.

    An engine of one rank computes in one thread, on the first core that this process may use: so
    engines on machines of any size add up in one order. VLLM_CPU_OMP_THREADS_BIND says otherwise.

    Returns:
        `tokens`, `logits` and `cached` (tokens found in the cache) per prompt of all batches,
        `logprobs` per text of `scored`; with `leads` also `leads` per text and `answer_leads` per
        prompt, `[likeliest token, log-probability above the next]` for each token; `steps` (how
        many forward passes the batches took), `seconds` per round, `kv_blocks`, `report` (None for
        stock), `custom_ops`, and `log`, all that the process printed. Of each of `updates` what was
        answered (`answers`), or raised (`error`), and the `tokens` afterwards; so of `midway`.

    Raises:
        EngineFailed: it did not end well, or not in time.
        subprocess.TimeoutExpired: not in time, with `forks`.
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


def _fresh(
    command: list[str], env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """A process with all that it starts, of which nothing is left behind.

    Raises:
        EngineFailed: it did not end in time.
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
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = f"it did not end within {timeout:g} s, and was killed\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a worker that hangs, too
            process.wait()
        printed.seek(0)
        log = printed.read()
    if late:
        raise EngineFailed(log + late)
    return subprocess.CompletedProcess(command, process.returncode, log)


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float]:
    """(largest difference of two runs' logits, largest magnitude in the first).

    An answer's logits are compared up to and with the first token in which the two differ: after
    it the runs see different inputs.
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
        disable_log_stats=False,  # which count the steps
        **job.options,
    )

    told = 2 if job.leads else None
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
            logprobs=-1 if logits else told,
            prompt_logprobs=-1 if logits and job.prompt_logits else None,
        )

    outputs = []
    for batch in job.batches:
        prompts: Any = [{"prompt_token_ids": ids} for ids in batch]
        if job.meets:  # whose schedulers cannot wait for their prompts
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
        except Exception as error:  # the engine's, or a worker's in its own words
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
    """Generate for a batch whose requests all wait before the engine takes its first step.

    `LLM.generate` sends them one by one to the engine's process, which begins with what is there:
    chance decides which prompts are prefilled together. The number of rows decides which kernel
    a matrix product gets (on AMX another one up to four rows), and with it how a sum is rounded.
    """
    llm.sleep(level=0)
    llm.enqueue(prompts, sampling, use_tqdm=False, **through)
    llm.wake_up(tags=["scheduling"])
    outputs: list[Any] = llm.wait_for_completion(use_tqdm=False)
    return outputs


def _scored(llm: Any, texts: list[list[int]], **through: Any) -> list[Any]:
    """Of each text what vLLM tells of every token but the first, and of the two likeliest there."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=2)
    prompts: Any = [{"prompt_token_ids": ids} for ids in texts]
    return [o.prompt_logprobs[1:] for o in _together(llm, prompts, sampling, **through)]


def _leads(rows: Any) -> list[tuple[int, float]]:
    """At each place the likeliest token, and its log-probability above the next's."""
    found = []
    for row in rows:
        first, second = sorted(row, key=lambda token: -row[token].logprob)[:2]
        found.append((first, row[first].logprob - row[second].logprob))
    return found


def _steps(llm: Any) -> int:
    """How many forward passes the engine has taken."""
    (tokens,) = [m for m in llm.get_metrics() if m.name == "vllm:iteration_tokens_total"]
    return int(tokens.count)


def _tokens(outputs: list[Any]) -> list[list[int]]:
    """The answers."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def _rows(output: Any) -> list[list[float]]:
    """Logits over the vocabulary, of every prompt token but the first and every new one."""
    rows = [row for row in (output.prompt_logprobs or []) if row is not None]
    rows += output.outputs[0].logprobs
    return [[row[token].logprob for token in sorted(row)] for row in rows]


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
