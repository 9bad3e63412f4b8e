"""Compilations after startup, from vLLM's JIT monitor, with FlagGems's attention and without.

python tests/gpu/run.py warmup
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import tiny_model
from cases_engines import OPTIONS, batches, side_by_side
from engine_run import STOCK, EngineFailed, Job, run

__all__ = ["cases"]

PLANS = {
    "stock": STOCK,
    "attention": {"VLLM_FL_PER_OP": "attention_backend=flagos"},
    "everything": {"VLLM_FL_PREFER": "flagos"},
}
COMPILED = re.compile(r"(?:JIT compilation|autotuning)\S* during inference: ([\w<>]+)")
WATCHED = re.compile(r"JIT monitor activated")
OURS = ("flash_varlen_fwd_kernel", "reshape_and_cache_flash_kernel")
"""FlagGems's kernels for attention."""

LONG = 4096
LIMITS = {"max_model_len": LONG, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
"""Attention runs between such graphs, and vLLM's first runner does not call it at startup. Eager
mode has no monitor."""

ENGINES = {
    "qwen3, graphs": ({}, tuple(PLANS)),
    "qwen3, piecewise graphs": (PIECEWISE, ("stock", "attention")),
    "gemma3, graphs": ({}, ("stock", "attention")),
}
"""Family and mode -> (vLLM's options, the plans)."""


def served() -> list[list[list[int]]]:
    """Batches that decode, that prefill short and long prompts, that do both, and many at once."""
    alone = [batches(length, seed=length)[0] for length in (1, 3, 17, 100, 700, LONG - 64)]
    return [*alone, *batches(1, 40, 900), *batches(*[33] * 48), *batches(*[2] * 64, 600)]


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(model, mode and plan; kernels compiled after startup that stock does not compile, or "")."""
    found: dict[str, str] = {}
    with side_by_side() as pool:
        started = {}
        for name, (further, plans) in ENGINES.items():
            family = name.partition(",")[0]
            model = str(tiny_model.make(folder / name, family, max_position_embeddings=LONG))
            options = {**OPTIONS, **LIMITS, **further}
            job = Job(model, served(), eager=False, options=options, logits=False, leads=True)
            for plan in plans:
                started[f"{name}, {plan}"] = pool.submit(run, job, **PLANS[plan])
        for case, engine in started.items():
            try:
                found[case] = engine.result()["log"]
            except EngineFailed as error:
                yield case, f"the engine failed: {error.log[-3000:]}"
    for case, log in found.items():
        stocks = found.get(f"{case.rpartition(', ')[0]}, stock", "")
        yield case, problem(log, set(COMPILED.findall(stocks)))


def problem(log: str, stocks: set[str]) -> str:
    """Empty if only kernels that stock's engine also compiles were compiled; prints all."""
    compiled = set(COMPILED.findall(log))
    names = ", ".join(sorted(compiled)) or "nothing"
    print(f"{'':11}compiled after the start: {names}", flush=True)
    if not WATCHED.search(log):
        return "this vLLM watches nothing"
    later = sorted((compiled - stocks) | compiled.intersection(OURS))
    return f"compiled while it served: {', '.join(later)}" * bool(later)
