"""Measure each implementation of each op on a GPU, in a CUDA graph and launched eagerly.

    python benchmarks/gpu/ops.py [--tokens 1 16 256 4096 16384] [--ops …] [--rounds 5]

Shapes: Qwen3-8B, bf16. `graph` is the time of the kernel, `eager` the host time to launch it,
`over` the overhead of the wrapper over the bare call of the kernel library, all in µs; `copy` is
the share of the bandwidth of a copy of as many bytes. JSON goes to $OUT/ops.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE = 4096, 12288, 32, 8, 128
EPSILON = 1e-6
TOKENS = (1, 16, 256, 4096, 16384)
LAUNCHES = 200
DTYPE = torch.bfloat16

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """Figures of an implementation for one op and shape: medians of `rounds`, in µs."""

    op: str
    tokens: int
    impl: str
    graph: float
    graph_spread: float
    eager: float
    copy_share: float
    over: float | None = None


@dataclass(frozen=True)
class Shape:
    """Arguments of an op, and the number of bytes that it must move."""

    op: str
    args: tuple[Any, ...]
    bytes_moved: int


def shapes(tokens: int) -> Iterator[Shape]:
    """Arguments for the ops of one Qwen3-8B layer."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(DTYPE)

    size = DTYPE.itemsize
    gated = normal(tokens, 2 * INTERMEDIATE)
    yield Shape("silu_and_mul", (gated,), 3 * tokens * INTERMEDIATE * size)
    yield Shape("gelu_and_mul", (gated, "tanh"), 3 * tokens * INTERMEDIATE * size)
    x, residual, weight = normal(tokens, HIDDEN), normal(tokens, HIDDEN), normal(HIDDEN)
    yield Shape("rms_norm", (x, None, weight, EPSILON), 2 * tokens * HIDDEN * size)
    yield Shape("rms_norm", (x, residual, weight, EPSILON), 4 * tokens * HIDDEN * size)
    qkv = normal(tokens, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
    widths = (HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE)
    q, k, _ = qkv.split(widths, dim=-1)
    query, key = q.view(tokens, HEADS, HEAD_SIZE), k.view(tokens, KV_HEADS, HEAD_SIZE)
    exponents = torch.arange(0, HEAD_SIZE, 2, device="cuda") / HEAD_SIZE
    angles = torch.arange(32768, device="cuda")[:, None] * 1e6**-exponents
    cos, sin = torch.cat((angles.cos(), angles.sin()), -1).to(DTYPE).chunk(2, dim=-1)
    at = torch.arange(tokens, device="cuda") % 32768
    moved = 2 * tokens * (HEADS + KV_HEADS) * HEAD_SIZE * size
    yield Shape("rotary_embedding", (query, key, cos, sin, at, False), moved)
    yield from others(tokens)


OWN = ("gelu_and_mul", "rms_norm", "rotary_embedding", "silu_and_mul")
"""Ops with arguments from `shapes`; other ops use the samples of their contracts."""


def others(tokens: int) -> Iterator[Shape]:
    """Ops that Qwen3-8B does not use, at its sizes."""
    from vllm_fl.plugins.registry import known_contracts
    from vllm_fl_ops.contracts.rules import typical_sizes

    sizes = replace(
        typical_sizes(known_contracts().bindings.values()),
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        rotary=HEAD_SIZE,
        tokens=(tokens,),
    )
    for op, spec in known_contracts().contracts.items():
        if op not in OWN:
            own = str(DTYPE)[6:]
            dtype = DTYPE if own in spec.dtypes else getattr(torch, spec.dtypes[0])
            for sample in spec.served(sizes, dtype, torch.device("cuda")):
                results = spec.fake(*sample.args)
                moved = (*sample.args, *(results if isinstance(results, tuple) else (results,)))
                size = sum(x.numel() * x.itemsize for x in moved if isinstance(x, torch.Tensor))
                yield Shape(op, sample.args, size)


def implementations(op: str) -> dict[str, Callable[..., Any]]:
    """Name -> the op as called by a layer in eager mode; Inductor's is the compiled reference.

    Each implementation has the guard of a plan, with `supports`, and may overwrite its arguments.
    """
    from vllm_fl.dispatch import SelectionPolicy, get_default_manager
    from vllm_fl.dispatch.guard import call_guard
    from vllm_fl.engine.plan import Plan, PlanEntry
    from vllm_fl.plugins.registry import known_contracts

    found: dict[str, Callable[..., Any]] = {}
    for name in ("reference.torch", "vendor.cuda", "default.flagos"):
        policy = SelectionPolicy(per_op_order={op: (f"impl:{name}",)})
        trace = get_default_manager().trace(op, policy=policy)
        plan = Plan(
            "eager", {op: PlanEntry(op, trace)}, strict=True, contracts=known_contracts().contracts
        )
        impl = plan.entries[op].impl
        if impl is None:
            print(f"{op} {name}: {trace.rejected}", file=sys.stderr)
            continue
        found[name] = call_guard(plan.chain(op, known_contracts().contracts[op].consumable))
        if name == "reference.torch":
            found["inductor"] = torch.compile(impl.fn, dynamic=False)
    return found


def bare(op: str, impl: str, args: tuple[Any, ...]) -> Call | None:
    """Direct call of the kernel library with these arguments; None if it is unknown here."""
    if op not in OWN:
        return None
    if impl == "default.flagos":
        import flag_gems

        if op == "silu_and_mul":
            (x,) = args
            half = x.shape[-1] // 2
            return lambda: flag_gems.silu_and_mul_out(
                x[..., :half], x[..., half:], x.new_empty((len(x), half))
            )
        if op == "gelu_and_mul":
            x, approximate = args
            half = x.shape[-1] // 2
            return lambda: flag_gems.gelu_and_mul(x[..., :half], x[..., half:], approximate)
        if op == "rms_norm":
            x, residual, weight, epsilon = args
            if residual is None:
                return lambda: flag_gems.rms_norm(x, weight.shape, weight, epsilon)
            return lambda: flag_gems.fused_add_rms_norm(x, residual, weight.shape, weight, epsilon)
        return lambda: flag_gems.apply_rotary_pos_emb(*args)
    if impl == "vendor.cuda":
        return bare_cuda(op, args)
    return None


def bare_cuda(op: str, args: tuple[Any, ...]) -> Call:
    """Direct call of vLLM's C++ kernel."""
    from vllm_fl_cuda.impl import kernel
    from vllm_fl_ops.contracts.cos_sin import joint_cos_sin

    if op == "silu_and_mul":
        (x,) = args
        silu = kernel("silu_and_mul")
        return lambda: silu(x.new_empty((len(x), x.shape[-1] // 2)), x)
    if op == "gelu_and_mul":
        x, _ = args
        gelu = kernel("gelu_and_mul")
        return lambda: gelu(x.new_empty((len(x), x.shape[-1] // 2)), x)
    if op == "rms_norm":
        x, residual, weight, epsilon = args
        if residual is None:
            norm = kernel("rms_norm")
            return lambda: norm(torch.empty_like(x), x, weight, epsilon)
        fused = kernel("fused_add_rms_norm")
        return lambda: fused(x, residual, weight, epsilon)
    query, key, cos, sin, at, _ = args
    rotary, cache = kernel("rotary_embedding"), joint_cos_sin(cos, sin)
    rows = (len(query), -1)
    return lambda: rotary(at, query.view(rows), key.view(rows), HEAD_SIZE, cache, True)


def host_time(call: Call) -> float:
    """µs of host time per eager launch, with few launches so that the queue does not fill."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(LAUNCHES):
        call()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / LAUNCHES * 1e6


def graph_time(call: Call) -> float:
    """Time of the kernels in a CUDA graph, in µs."""
    import triton

    return float(triton.testing.do_bench_cudagraph(call, rep=20)) * 1e3


def copy_time(bytes_moved: int) -> float:
    """Time in µs of a copy that reads half of these bytes and writes the other half."""
    source = torch.empty(max(bytes_moved // 2, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return graph_time(lambda: target.copy_(source))


def rows(tokens: int, ops: list[str], rounds: int) -> Iterator[Row]:
    """Measure all implementations of all ops for one batch size, in interleaved rounds."""
    for shape in shapes(tokens):
        if shape.op not in ops:
            continue
        name = shape.op + (
            ", residual" if shape.op == "rms_norm" and shape.args[1] is not None else ""
        )
        calls: dict[str, Call] = {
            impl: lambda fn=fn, args=shape.args: fn(*args)
            for impl, fn in implementations(shape.op).items()
        }
        for impl in list(calls):
            try:
                for _ in range(3):
                    calls[impl]()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{name} {impl}: {type(error).__name__}: {error}", file=sys.stderr)
                del calls[impl]
        copy = copy_time(shape.bytes_moved)
        straight = {impl: bare(shape.op, impl, shape.args) for impl in calls}
        graph: dict[str, list[float]] = {impl: [] for impl in calls}
        eager: dict[str, list[float]] = {impl: [] for impl in calls}
        over: dict[str, list[float]] = {impl: [] for impl in calls}
        for _ in range(rounds):
            for impl, call in calls.items():
                graph[impl].append(graph_time(call))
                eager[impl].append(host_time(call))
                direct = straight[impl]
                if direct is not None:
                    over[impl].append(eager[impl][-1] - host_time(direct))
        for impl in calls:
            middle = statistics.median(graph[impl])
            yield Row(
                name,
                tokens,
                impl,
                middle,
                (max(graph[impl]) - min(graph[impl])) / middle,
                statistics.median(eager[impl]),
                copy / middle,
                statistics.median(over[impl]) if over[impl] else None,
            )


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--ops", nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no NVIDIA GPU here")
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from host import facts

    from vllm_fl.plugins.registry import known_contracts

    out = Path(os.environ.get("OUT", ".")) / "ops.json"
    found: list[Row] = []
    print(
        f"{'op':22}{'tokens':>7} {'impl':18}{'graph':>9}{'±%':>6}{'eager':>8}{'over':>7}{'copy':>6}"
    )
    with torch.inference_mode():
        for tokens in options.tokens:
            for row in rows(
                tokens, options.ops or list(known_contracts().contracts), options.rounds
            ):
                found.append(row)
                added = "" if row.over is None else f"{row.over:.1f}"
                print(
                    f"{row.op:22}{row.tokens:>7} {row.impl:18}{row.graph:>9.1f}"
                    f"{row.graph_spread:>6.1%}{row.eager:>8.1f}{added:>7}{row.copy_share:>6.0%}",
                    flush=True,
                )
                out.write_text(
                    json.dumps({"host": facts(), "rows": [asdict(r) for r in found]}, indent=1)
                )
            torch.compiler.reset()


if __name__ == "__main__":
    main()
