"""vLLM's engine on a small model with each backend, eager and compiled, against stock's logits."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tiny_model
from engine_run import STOCK, EngineFailed, Job, largest_difference, run

__all__ = ["OPTIONS", "batches", "cases", "close", "side_by_side"]

VARIANTS = {
    "shipped": ({}, None),
    "reference": ({"VLLM_FL_PREFER": "reference"}, "reference.torch"),
    "vendor": ({"VLLM_FL_PREFER": "vendor"}, "vendor.cuda"),
    "flagos": ({"VLLM_FL_PREFER": "flagos"}, "default.flagos"),
}
"""Name -> (variables, the implementation of silu_and_mul that must be planned)."""

FILES = {
    "rows": {
        "extends": "platform",
        "op_backends": {"qk_norm_rope": {"<=64": ["flagos"], "rest": ["stock"]}},
    },
    "override": {"prefer": "flagos"},
}
"""Name -> settings file. `rows` keeps one op stock in the graphs of a range of sizes. `override`
drops the platform's policy, so FlagGems gets every op of the plan and attention, but no operator of
PyTorch, because no list selects one."""

OPTIONS = {
    # Fixed, not measured: engines that start together see each other's memory change.
    "kv_cache_memory_bytes": 2 << 30,
    "gpu_memory_utilization": 0.1,
    "num_gpu_blocks_override": 4096,
    "max_model_len": 512,
    "max_num_seqs": 16,
}


def batches(*lengths: int, seed: int = 0) -> list[list[list[int]]]:
    """One batch of prompts of these lengths."""
    pick = random.Random(seed)
    return [[[pick.randrange(3, 500) for _ in range(length)] for length in lengths]]


def close(stock: dict[str, object], mine: dict[str, object]) -> str:
    """Empty if the logits agree to bf16's precision, otherwise the difference."""
    worst, magnitude = largest_difference(stock, mine)
    # Both round each layer's results to 8 bits; over two layers and the head that adds up to a few
    # units of the largest logit's last place.
    limit = 0.05 * magnitude
    return "" if worst <= limit else f"logits differ by {worst:.3g} of {magnitude:.3g}"


def side_by_side() -> ThreadPoolExecutor:
    """A pool for as many engines as the host of one GPU starts reliably."""
    return ThreadPoolExecutor(max_workers=6)


def second_start(job: Job, cache: Path, **variables: str) -> dict[str, Any]:
    """The result of an engine that loads its model from vLLM's cache, filled by a first engine."""
    places = {"VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    run(job, **places, **variables)
    return run(job, **places, **variables)


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(variant and mode, the problem or "")."""
    model = str(tiny_model.make(folder, "qwen3"))
    by_file = {}
    for name, settings in FILES.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(settings))
        by_file[name] = {"VLLM_FL_CONFIG": str(file)}
    variants = {**VARIANTS, "override": (by_file["override"], "default.flagos")}
    again = {"flagos": VARIANTS["flagos"][0], "rows": by_file["rows"]}
    with side_by_side() as pool:
        started = {}
        for eager in (False, True):
            job = Job(model, batches(5, 33, 100), eager=eager, options=OPTIONS)
            stock = pool.submit(run, job, **STOCK)
            for name, (variables, planned) in variants.items():
                case = f"{'eager' if eager else 'compiled'}, {name}"
                started[case] = stock, pool.submit(run, job, **variables), planned
            for name, variables in again.items() if not eager else ():
                case = f"compiled, {name}, started a second time"
                mine = pool.submit(second_start, job, folder / f"cache-{name}", **variables)
                started[case] = stock, mine, None
        for case, (stock, mine, planned) in started.items():
            try:
                yield case, differs(stock.result(), mine.result(), planned)
            except EngineFailed as error:
                yield case, f"the engine failed: {error.log[-3000:]}"


def differs(stock: dict[str, Any], mine: dict[str, Any], planned: str | None) -> str:
    """Empty if the plan is as expected, the logits equal stock's logits, and vLLM forked the
    engine's processes, which requires that the GPU is not open yet."""
    if "CUDA is initialized" in mine["log"]:
        return "vLLM spawned its processes, since the one that started it had opened the GPU"
    impl = mine["report"][0]["ops"]["silu_and_mul"]["impl"]
    if planned and impl != planned:
        return f"silu_and_mul={impl}, expected {planned}"
    return close(stock, mine)
