"""FlagGems's attention in vLLM's engine, compared with FlashAttention's logits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import OPTIONS, batches, close, side_by_side
from engine_run import STOCK, EngineFailed, Job, run

__all__ = ["cases"]

FLAGOS = {"VLLM_FL_PER_OP": "attention_backend=flagos"}
LONG = 16_384


@dataclass(frozen=True)
class Work:
    batches: list[list[list[int]]]
    options: dict[str, Any] = field(default_factory=dict)
    eager: bool = True
    prompt_logits: bool = True


def works() -> dict[str, Work]:
    """Every phase of attention in vLLM's scheduler."""
    short = batches(1, 17, 100, 130)
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    again = batches(200, seed=1)
    return {
        "prefill and decode": Work(short),
        "prefill and decode, graphs": Work(short, eager=False),
        "chunked prefill": Work(batches(400, 30, 5), chunked),
        "prefix caching": Work(
            [*again, *again], {"enable_prefix_caching": True}, prompt_logits=False
        ),
        "16k tokens": Work(
            batches(LONG, seed=2), {"max_model_len": LONG + 64}, prompt_logits=False
        ),
    }


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(phase, the problem or "")."""
    model = str(tiny_model.make(folder / "long", "qwen3", max_position_embeddings=LONG + 64))
    jobs = {
        name: Job(
            model,
            work.batches,
            eager=work.eager,
            options={**OPTIONS, **work.options},
            prompt_logits=work.prompt_logits,
        )
        for name, work in works().items()
    }
    fp8 = Job(model, batches(5), options={**OPTIONS, "kv_cache_dtype": "fp8"})
    with side_by_side() as pool:
        pairs = {
            name: (pool.submit(run, job, **STOCK), pool.submit(run, job, **FLAGOS))
            for name, job in jobs.items()
        }
        left_to_vllm = pool.submit(run, fp8, **FLAGOS)
        for name, (stock, mine) in pairs.items():
            yield name, differs(stock, mine)
        yield "FP8 KV cache", refused(left_to_vllm)


def differs(stock: Future[dict[str, Any]], mine: Future[dict[str, Any]]) -> str:
    """Empty if FlagGems's attention ran and its logits equal FlashAttention's logits."""
    try:
        entry = mine.result()["report"][0]["ops"].get("attention_backend", {})
    except EngineFailed as error:
        return f"the engine failed: {error.log[-3000:]}"
    if entry.get("impl") != "default.flagos":
        return f"planned: {entry}"
    return close(stock.result(), mine.result())


def refused(mine: Future[dict[str, Any]]) -> str:
    """Empty if a cache that FlagGems computes incorrectly stays with vLLM, with the reason."""
    try:
        entry = mine.result()["report"][0]["ops"]["attention_backend"]
    except EngineFailed as error:
        return f"the engine failed: {error.log[-3000:]}"
    return "" if entry["impl"] == "stock" and "fp8" in entry["reason"] else f"planned: {entry}"
