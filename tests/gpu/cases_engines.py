"""vLLM's engine on a small model with each backend, eager and compiled, against stock's logits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import tiny_model
from engine_run import STOCK, EngineFailed, Job, largest_difference, run

__all__ = ["OPTIONS", "batches", "cases", "close"]

LAYERS = "silu_and_mul={0};gelu_and_mul={0};rms_norm={0};rotary_embedding={0}"
VARIANTS = {
    "shipped": ({}, None),
    "reference": ({"VLLM_FL_PER_OP": LAYERS.format("reference")}, "reference.torch"),
    "vendor": ({"VLLM_FL_PER_OP": LAYERS.format("vendor:cuda")}, "vendor.cuda"),
    "flagos": ({"VLLM_FL_PREFER": "flagos"}, "default.flagos"),
}
"""Name -> (variables, the implementation that silu_and_mul must be planned with)."""

OPTIONS = {
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
    """Empty when the logits agree as bf16 lets them; else by how much they do not."""
    worst, magnitude = largest_difference(stock, mine)
    # Both round each layer's results to 8 bits; through two layers and the head that adds up to a
    # few units of the largest logit's last place.
    limit = 0.05 * magnitude
    return "" if worst <= limit else f"logits differ by {worst:.3g} of {magnitude:.3g}"


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(variant and mode, what is wrong or empty)."""
    model = str(tiny_model.make(folder, "qwen3"))
    work = batches(5, 33, 100)
    for eager in (True, False):
        mode = "eager" if eager else "compiled"
        job = Job(model, work, eager=eager, options=OPTIONS)
        stock = run(job, **STOCK)
        for name, (variables, planned) in VARIANTS.items():
            try:
                mine = run(job, **variables)
            except EngineFailed as error:
                yield f"{mode}, {name}", f"the engine failed: {error.log[-3000:]}"
                continue
            problem = close(stock, mine)
            impl = mine["report"][0]["ops"]["silu_and_mul"]["impl"]
            if planned and impl != planned:
                problem += f" silu_and_mul={impl}, expected {planned}"
            if mine["kv_blocks"] != stock["kv_blocks"]:
                problem += f" {mine['kv_blocks']} KV blocks, stock has {stock['kv_blocks']}"
            yield f"{mode}, {name}", problem.strip()
