"""FlagGems's attention in vLLM's engine against FlashAttention's logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import OPTIONS, batches, close
from engine_run import STOCK, EngineFailed, Job, run

__all__ = ["cases"]

FLAGOS = {"VLLM_FL_PER_OP": "attention_backend=flagos"}
LONG = 16_384


@dataclass(frozen=True)
class Work:
    """What the engine is given."""

    batches: list[list[list[int]]]
    options: dict[str, Any] = field(default_factory=dict)
    eager: bool = True
    logits: bool = True


def works() -> dict[str, Work]:
    """Each phase that attention has in vLLM's scheduler."""
    short = batches(1, 17, 100, 130)
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    again = batches(200, seed=1)
    return {
        "prefill and decode": Work(short),
        "prefill and decode, graphs": Work(short, eager=False),
        "chunked prefill": Work(batches(400, 30, 5), chunked),
        # Prompt logits would turn the cache off: the tokens are compared.
        "prefix caching": Work([*again, *again], {"enable_prefix_caching": True}, logits=False),
        "16k tokens": Work(batches(LONG, seed=2), {"max_model_len": LONG + 64}, logits=False),
    }


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(phase, what is wrong or empty)."""
    model = str(tiny_model.make(folder / "long", "qwen3", max_position_embeddings=LONG + 64))
    for name, work in works().items():
        options = {**OPTIONS, **work.options}
        job = Job(model, work.batches, eager=work.eager, options=options, logits=work.logits)
        stock = run(job, **STOCK)
        try:
            mine = run(job, **FLAGOS)
        except EngineFailed as error:
            yield name, f"the engine failed: {error.log[-3000:]}"
            continue
        entry = mine["report"][0]["ops"].get("attention_backend", {})
        problem = "" if entry.get("impl") == "default.flagos" else f"planned: {entry}"
        if work.logits:
            problem = problem or close(stock, mine)
        elif mine["tokens"] != stock["tokens"]:
            problem = problem or f"tokens {mine['tokens']}, stock {stock['tokens']}"
        yield name, problem
    yield "FP8 KV cache", refused(model, "fp8")


def refused(model: str, kv_cache_dtype: str) -> str:
    """Empty when a cache that FlagGems would get wrong is left to vLLM, with the reason."""
    job = Job(model, batches(5), options={**OPTIONS, "kv_cache_dtype": kv_cache_dtype})
    try:
        entry = run(job, **FLAGOS)["report"][0]["ops"]["attention_backend"]
    except EngineFailed as error:
        return f"the engine failed: {error.log[-3000:]}"
    return "" if entry["impl"] == "stock" else f"planned: {entry}"
