"""Run one vLLM engine in a process that engine.py controls by pipes.

    python engine_server.py '{"model": DIR, "options": {…}, "ours": true}'

`"patch": "MODULE"` calls `install` of that module first: engine processes are forked from this one.

Writes JSON lines to its original standard output; logs go to standard error. It answers once when
it is ready, then once per input line: `seconds` in total, and `steps` for each step of the engine.
It answers `{"memory": true}` with `peak_mib`, and the bytes of the `weights` that a decoding step
of one token reads. A job with `"profile": true` is profiled in the first worker: `kernels` has the
µs and the calls of each kernel.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from itertools import pairwise
from typing import Any


def memory(worker: Any) -> dict[str, float]:
    """Peak device memory of PyTorch's tensors since the engine measured the free memory.

    Also the bytes of the weights that a decoding step of one token reads: only selected experts,
    and no embedding unless it is also the output layer.
    """
    import torch

    model = worker.get_model()
    config = worker.model_config.hf_text_config
    experts = getattr(config, "num_experts", 0) or 0
    share = config.num_experts_per_tok / experts if experts else 1.0
    read = 0.0
    for name, weight in model.named_parameters():
        if "embed_tokens" in name and not config.tie_word_embeddings:
            continue
        size = weight.numel() * weight.element_size()
        read += size * share if ".experts." in name else size
    return {"peak_mib": torch.cuda.max_memory_allocated() / 2**20, "weights": read}


def begin_profile(worker: Any) -> None:
    """Start PyTorch's profiler of the GPU."""
    from torch.profiler import ProfilerActivity, profile

    worker.profiled = profile(activities=[ProfilerActivity.CUDA])
    worker.profiled.start()


def end_profile(worker: Any) -> dict[str, list[float]]:
    """Kernel -> its µs and number of calls since `begin_profile`."""
    import torch

    from vllm_fl_tools.integration.profiling import device_times

    torch.cuda.synchronize()
    profiled = worker.__dict__.pop("profiled")
    profiled.stop()
    times, _ = device_times(profiled.events())
    return {name: [sum(each), len(each)] for name, each in times.items()}


def main() -> None:
    """Serve until standard input ends."""
    # Engine processes inherit descriptor 1 and print to it: answer on a copy.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    request = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    if "patch" in request:
        import_module(request["patch"]).install()
    start = time.perf_counter()
    llm = LLM(request["model"], **request["options"])
    config = llm.llm_engine.vllm_config
    ends: list[float] = []
    engine_step = llm.llm_engine.step

    def step() -> Any:
        outputs = engine_step()
        ends.append(time.perf_counter())
        return outputs

    llm.llm_engine.step = step
    answer(
        seconds=time.perf_counter() - start,
        kv_blocks=config.cache_config.num_gpu_blocks,
        custom_ops=list(config.compilation_config.custom_ops),
        report=llm.collective_rpc("vllm_fl_report")[0] if request["ours"] else None,
    )
    for line in sys.stdin:
        job = json.loads(line)
        if "memory" in job:
            answer(**llm.collective_rpc(memory)[0])
            continue
        sampling = SamplingParams(
            temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
        )
        prompts: Any = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        if "profile" in job:
            llm.collective_rpc(begin_profile)
        # Start all together, so that the batches and their kernels do not depend on timing.
        llm.sleep(level=0)
        llm.enqueue(prompts, sampling, use_tqdm=False)
        ends = [time.perf_counter()]
        llm.wake_up(tags=["scheduling"])
        outputs = llm.wait_for_completion(use_tqdm=False)
        if "profile" in job:
            answer(kernels=llm.collective_rpc(end_profile)[0])
            continue
        seconds = time.perf_counter() - ends[0]
        steps = [after - before for before, after in pairwise(ends)]
        answer(seconds=seconds, steps=steps, tokens=[list(o.outputs[0].token_ids) for o in outputs])


if __name__ == "__main__":
    main()
