"""What the GPU does in one step of vLLM's engine, kernel by kernel; compiled, with graphs.

    python benchmarks/gpu/kernels.py stock > stock.txt
    python benchmarks/gpu/kernels.py flagos --model qwen3-30b-a3b > flagos.txt

One variant of engine.py per process, which holds the engine itself so that PyTorch's profiler sees
it. JSON goes to $OUT/kernels-MODEL-VARIANT.json: µs and calls of each kernel per step.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from engine import ALONE, FURTHER, MODELS, OPTIONS, VARIANTS, prompts
from host import facts

STEPS = {
    "decode, batch 1": (1, 1, 33),
    "decode, batch 8": (8, 1, 33),
    "decode, batch 64": (64, 1, 33),
    "prefill of 1024": (1, 1024, 1),
    "prefill": (16, 1024, 1),
}
"""Name -> (prompts, tokens of each, new tokens of each: as many steps)."""

SHOWN = 20


def main() -> None:
    """Profile the variant that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=[name for name in VARIANTS if name != "direct"])
    parser.add_argument("--model", default="qwen3-8b", choices=MODELS)
    options = parser.parse_args()
    variant, (config, further) = options.variant, MODELS[options.model]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        os.environ |= {
            **VARIANTS[variant][0],
            **ALONE,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": f"{folder}/cache",
        }
        from vllm import LLM

        llm = LLM(folder, **OPTIONS, **FURTHER.get(variant, {}), **further)
        found = {name: step(llm, *sizes) for name, sizes in STEPS.items()}
    for name, kernels in found.items():
        print(f"{variant}, {name}: {sum(k['us'] for k in kernels.values()):.1f} µs of kernels")
        for kernel, figures in list(kernels.items())[:SHOWN]:
            print(f"{figures['us']:10.1f} µs {figures['calls']:7.1f} calls  {kernel[:100]}")
    out = Path(os.environ.get("OUT", ".")) / f"kernels-{options.model}-{variant}.json"
    out.write_text(json.dumps({"host": facts(), variant: found}, indent=1))


def step(llm: Any, batch: int, length: int, new: int) -> dict[str, dict[str, float]]:
    """Kernel -> its µs and calls in one step; the longest first."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)

    def generate(seed: int) -> None:
        jobs: Any = [{"prompt_token_ids": ids} for ids in prompts(str(seed), batch, length)]
        llm.generate(jobs, sampling, use_tqdm=False)

    generate(1)
    generate(2)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        generate(3)
    kernels: dict[str, dict[str, float]] = defaultdict(lambda: {"us": 0.0, "calls": 0.0})
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            kernels[event.name]["us"] += event.device_time / new
            kernels[event.name]["calls"] += 1 / new
    return dict(sorted(kernels.items(), key=lambda item: -item[1]["us"]))


if __name__ == "__main__":
    main()
