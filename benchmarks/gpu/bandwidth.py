"""Measure the read bandwidth of GPU memory, which limits decoding, with one named kernel.

    python benchmarks/gpu/bandwidth.py

A decoding step of one token reads each weight once. `read_kernel` only sums 4 GiB of numbers, many
times the size of the caches. Prints JSON, in bytes per second.
"""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

BYTES = 4 * 2**30
BLOCK = 8192
TIMES = 20


@triton.jit
def read_kernel(numbers, sums, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum float32 numbers; program i of n sums the blocks i, i + n, i + 2n, …"""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
        total += tl.load(numbers + start + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


def seconds_of(run) -> float:  # type: ignore[no-untyped-def]
    """Minimum of several times, measured by the device."""
    best = float("inf")
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def main() -> None:
    numbers = torch.zeros(BYTES // 4, device="cuda")
    other = torch.empty_like(numbers)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    reads = []
    for per_processor, warps in ((4, 8), (8, 8), (8, 4), (16, 4)):
        programs = processors * per_processor
        sums = torch.empty(programs, device="cuda")

        def read(programs: int = programs, sums: torch.Tensor = sums, warps: int = warps) -> None:
            read_kernel[(programs,)](numbers, sums, BYTES // 4, BLOCK, num_warps=warps)

        read()
        reads.append(BYTES / seconds_of(read))
    copy = 2 * BYTES / seconds_of(lambda: other.copy_(numbers))
    print(json.dumps({"kernel": "read_kernel", "read": max(reads), "copy": copy}))


if __name__ == "__main__":
    main()
