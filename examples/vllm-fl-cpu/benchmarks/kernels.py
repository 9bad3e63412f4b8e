"""Time vLLM's CPU kernels against PyTorch for each op, on the shapes of Qwen3-0.6B.

    python benchmarks/kernels.py [--threads 1 2] [--tokens 1 16 256] [--rounds 15]

Prints the median µs per call of both, in interleaved rounds, and torch / kernel (above 1 the kernel
is faster). PyTorch's implementation is vllm-fl-reference, which must be installed. In-place kernels
are timed in place, as layers call them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import vllm_fl_reference.impl.activation as torch_activation
import vllm_fl_reference.impl.normalization as torch_normalization
import vllm_fl_reference.impl.rotary as torch_rotary
from vllm_fl_cpu.impl import activation, normalization, rotary

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE, EPSILON = 1024, 3072, 16, 8, 128, 1e-6
DTYPES = (torch.bfloat16, torch.float32)

Call = Callable[[], Any]


def cases(tokens: int, dtype: torch.dtype) -> Iterator[tuple[str, Call, Call]]:
    """Yield (name, PyTorch's call, the kernel's call) for each op of one layer."""
    gated = torch.randn(tokens, 2 * INTERMEDIATE).to(dtype)
    yield (
        "silu_and_mul",
        lambda: torch_activation.silu_and_mul(gated),
        lambda: activation.silu_and_mul(gated),
    )
    for approximate in ("none", "tanh"):
        yield (
            f"gelu_and_mul {approximate}",
            lambda a=approximate: torch_activation.gelu_and_mul(gated, a),
            lambda a=approximate: activation.gelu_and_mul(gated, a),
        )

    x = torch.randn(tokens, HIDDEN).to(dtype)
    residual = torch.randn(tokens, HIDDEN).to(dtype)
    weight, per_head = torch.ones(HIDDEN, dtype=dtype), torch.ones(HEAD_SIZE, dtype=dtype)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_SIZE).to(dtype)
    q, k, _ = qkv.split([HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE], dim=-1)
    query, key = q.view(tokens, HEADS, HEAD_SIZE), k.view(tokens, KV_HEADS, HEAD_SIZE)
    for name, values, rest, scale in (
        ("rms_norm", x, None, weight),
        ("rms_norm, residual", x, residual, weight),
        ("rms_norm, strided q heads", query, None, per_head),
    ):
        yield (
            name,
            lambda v=values, r=rest, w=scale: torch_normalization.rms_norm(v, r, w, EPSILON),
            lambda v=values, r=rest, w=scale: normalization.rms_norm(v, r, w, EPSILON),
        )

    angles = torch.arange(2048)[:, None] * 10000.0 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    cos, sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype).chunk(2, dim=-1)
    at = torch.arange(tokens)
    yield (
        "rotary_embedding",
        lambda: torch_rotary.rotary_embedding(query, key, cos, sin, at),
        lambda: rotary.rotary_embedding(query, key, cos, sin, at),
    )


def medians(calls: tuple[Call, ...], repeats: int, rounds: int) -> list[float]:
    """Median µs per call of each, in interleaved rounds."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for call, record in zip(calls, times, strict=True):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            record.append((time.perf_counter() - start) / repeats * 1e6)
    return [statistics.median(record) for record in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{'op':28}{'dtype':>10}{'threads':>9}{'tokens':>8}", end="")
    print(f"{'torch µs':>11}{'kernel µs':>11}{'ratio':>7}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for tokens in options.tokens:
                for name, plain, kernel in cases(tokens, dtype):
                    slow, fast = medians((plain, kernel), max(3, 200 // tokens), options.rounds)
                    kind = str(dtype).removeprefix("torch.")
                    print(
                        f"{name:28}{kind:>10}{threads:>9}{tokens:>8}"
                        f"{slow:>11.1f}{fast:>11.1f}{slow / fast:>7.2f}"
                    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
