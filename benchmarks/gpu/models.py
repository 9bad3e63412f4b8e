"""Compare default settings with stock vLLM on a GPU: shapes of several models, dummy weights.

    python benchmarks/gpu/models.py [--models qwen3-8b llama-3.1-8b …] [--rounds 5] [--kernels 3]
        [--new-tokens 64] [--seconds 480] [--ranks 4]

For each model three engines run one at a time: stock, stock again, and vllm-fl with default
settings. Their KV cache has a fixed size, and they start together. The second and third are
compared with the first:

    tokens per second      of prompts and outputs, as seen by a client; median and range
    steady decoding        steps per second of the fastest quarter of a visit's steps
    kernels' time          the sum of all kernels' times of one step (less is faster)
    of the read bandwidth  the bytes of the weights that a decoding step of one token reads, by its
                           time, as a share of the bandwidth of `read_kernel` (bandwidth.py)

With `--ranks` each engine uses that many GPUs, tensor parallel, and shares them with the others;
the weights, and the bytes that a GPU reads, are then those of one rank.

Appends one line of JSON for each model to $OUT/models.jsonl. With `--seconds` it stops in time, and
prints the skipped models: measure these by another call.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import engine
from engine import Engine, compare, kernel_table, profiled, running, spread
from host import facts, memory_gib
from shapes import MODELS

HERE = Path(__file__).resolve().parent
VARIANTS = ("stock", "stock-again", "shipped")

CACHE_BYTES = 3 * 2**30
"""Bytes of KV cache of an engine: 64 sequences of 256 tokens, and 16 prompts of 1024."""

SHARE = 0.29
"""Share of the device's memory that must be free when an engine starts."""

LEAST_SECONDS = 230.0
"""Remaining time that another model needs at least."""


def bandwidth() -> dict[str, Any]:
    """Read and copy bandwidth of the device, in bytes per second."""
    asked = [sys.executable, str(HERE / "bandwidth.py")]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(
    name: str, options: argparse.Namespace, folder: Path, deadline: float
) -> dict[str, Any]:
    """Measure one model until its rounds or the time end."""
    config, further = MODELS[name]
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    shared = {
        **further,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "tensor_parallel_size": options.ranks,
    }
    begun = time.monotonic()
    layers = config["num_hidden_layers"]
    result: dict[str, Any] = {"model": name, "layers": layers, "ranks": options.ranks}
    with contextlib.ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for variant in options.variants:
            start = running(variant, "compiled", model, folder, SHARE, waits=False, **shared)
            engines[variant] = stack.enter_context(start)
        for each in engines.values():
            each.wait()
        result["start_seconds"] = time.monotonic() - begun
        for found in compare("compiled", engines, options.rounds):
            result |= found
            if time.monotonic() > deadline:
                break
        for kernels in profiled(engines, options.kernels) if time.monotonic() < deadline else ():
            result["kernels"] = kernels
            if time.monotonic() > deadline:
                break
        weights = engines["stock"].ask({"memory": True})["weights"]
    result["weights"] = weights
    result["seconds"] = time.monotonic() - begun
    return result


def shown(result: dict[str, Any], read: float) -> str:
    """Format the figures of a model, one line for each engine and workload."""
    lines = [
        f"{result['model']}, {result['layers']} layers, ranks: {result['ranks']}, "
        f"{result['weights'] / 1e9:.2f} GB of "
        f"weights a token; {result['rounds']} rounds; engines ready together in "
        f"{result['start_seconds']:.0f} s, {result['seconds']:.0f} s in all"
    ]
    for name, entry in result["engines"].items():
        for workload, share in entry["of_stock"].items():
            steady = entry["steady"].get(workload)
            line = f"  {name:12} {workload:9} tokens/s {spread(share)}"
            if steady:
                line += f"  steady {spread(entry['steady_of_stock'][workload])}"
            if steady and workload == "batch 1":
                reached = statistics.median(steady) * result["weights"] / read
                line += f"  {reached:.3f} of the read bandwidth"
            lines.append(line)
        for step, of_step in result.get("kernels", {}).get(name, {}).items():
            share = of_step["of_stock"]
            if share is not None:
                us = statistics.median(of_step["us"])
                lines.append(f"  {name:12} {step:17} kernels {spread(share)}  {us:.0f} µs")
        report = entry["ready"].get("report") or {}
        if planned := report.get("ordered_for_device"):
            lines.append(f"  {name:12} ordered for this device: {', '.join(planned)}")
        if sites := report.get("fusions"):
            # A product with its activation has the kernel of a plain product: the profile does not
            # show which of them a model has.
            found = (f"{op} {of['found']} in {of['graphs']}" for op, of in sites.items())
            lines.append(f"  {name:12} found in graphs: {', '.join(found)}")
    return "\n".join(lines)


def main() -> None:
    """Measure the models of the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=engine.VARIANTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=3, metavar="ROUNDS")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a visit's decoding")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end by then")
    parser.add_argument("--ranks", type=int, default=1, metavar="GPUS")
    parser.add_argument("--longest", action="store_true", help="name the longest kernels, too")
    options = parser.parse_args()
    if "stock" not in options.variants or options.rounds < 1:
        parser.error("--variants takes stock, and --rounds 1 or more")
    for workload, (batch, length, new) in engine.WORKLOADS.items():
        engine.WORKLOADS[workload] = batch, length, min(new, options.new_tokens)
    deadline = time.monotonic() + options.seconds
    if shutil.which("nvidia-smi") is None:
        print("skipped: no NVIDIA GPU here (there is no nvidia-smi)")
        return
    out = Path(os.environ.get("OUT", "."))
    speed = bandwidth()
    print(f"{facts()['gpus'][0]}: {memory_gib():.0f} GiB", flush=True)
    print(f"read_kernel {speed['read'] / 1e12:.3f} TB/s, a copy {speed['copy'] / 1e12:.3f}")
    for name in options.models:
        if deadline - time.monotonic() < LEAST_SECONDS:
            print(f"{name}: left out, since the time is up", flush=True)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            try:
                result = measure(name, options, Path(scratch), deadline - 20)
            except RuntimeError as error:  # it contains an engine's log
                print(f"{name}: not measured: {error}", flush=True)
                result = {"model": name, "failed": str(error)}
            for log in Path(scratch).glob("*shipped.log"):
                shutil.copy(log, out / f"{name}-shipped.log")
        line = {"host": facts(), "bandwidth": speed, **result}
        with (out / "models.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
        if "failed" not in result:
            print(shown(result, speed["read"]), flush=True)
            if options.longest and "kernels" in result:
                print(kernel_table(result["kernels"]), flush=True)


if __name__ == "__main__":
    main()
