"""Compare stock, shipped and FlagGems on vLLM's GPU engine, with dummy weights.

    python benchmarks/gpu/engine.py [--model qwen3-8b] [--modes compiled eager] [--variants …]
        [--rounds 6] [--kernels 5] [--ranks 2]

The engines of one mode are loaded together, each in its own process with its part of the memory,
and run one at a time: every round visits all of them with each workload, in another order, because
after an idle moment the GPU is cooler and its clocks are higher. Ratios are computed within a
round; with twice as many rounds as engines, each of a pair is first equally often. `steady` is the
speed of the fastest quarter of the decode steps of a visit, because other load of the host only
makes steps longer. JSON goes to $OUT/engine.json after every round, with the µs of each step.

`--kernels` adds rounds that profile single steps with PyTorch: the sum of all kernel times, as a
ratio within a round, and the longest kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from host import facts, memory_gib
from shapes import MODELS

SERVER = Path(__file__).resolve().parents[1] / "engine_server.py"
START_TIMEOUT, ANSWER_TIMEOUT = 400.0, 120.0

OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 4096,
    "max_num_batched_tokens": 16384,
    "enable_prefix_caching": False,
}
"""Options of all engines."""

ALONE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""Environment variables that disable downloads and usage reports."""

WORKLOADS = {
    "batch 1": (1, 128, 128),
    "batch 8": (8, 128, 128),
    "batch 64": (64, 128, 128),
    "prefill": (16, 1024, 1),
}
"""Name -> (number of prompts, tokens per prompt, new tokens per prompt)."""

STEPS = {
    "decode, batch 1": (1, 1, 17),
    "decode, batch 8": (8, 1, 17),
    "decode, batch 64": (64, 1, 17),
    "prefill of 1024": (1, 1024, 1),
    "prefill": (16, 1024, 1),
}
"""Profiled jobs: name -> (prompts, tokens of each, new tokens of each = steps)."""

MEMORY_GIB = 35.0
"""Memory of a GPU for one engine; an equal share of the GPU if that is less."""

SHOWN = 16
"""Number of printed kernels per engine."""

STOCK = {"VLLM_PLUGINS": ""}
ONLY_LAYERS = {"VLLM_FL_PREFER": "flagos", "VLLM_FL_PER_OP": "attention_backend=stock"}
VARIANTS: dict[str, tuple[dict[str, str], bool]] = {
    "stock": (STOCK, False),
    "stock-again": (STOCK, False),
    "stock-fusion": (STOCK, False),
    "shipped": ({}, True),
    "shipped-early": ({"TORCHINDUCTOR_ENABLE_PDL": "1"}, True),
    "flagos": (ONLY_LAYERS, True),
    "flagos-shadow-0": ({**ONLY_LAYERS, "VLLM_FL_SHADOW": "0"}, True),
    "flagos-shadow-1": ({**ONLY_LAYERS, "VLLM_FL_SHADOW": "0.01"}, True),
    "flagos-shadow-100": ({**ONLY_LAYERS, "VLLM_FL_SHADOW": "1"}, True),
    "direct": (STOCK, False),
    "experts": ({"VLLM_FL_PER_OP": "fused_experts=flagos"}, True),
    "flagos-attention": ({"VLLM_FL_PER_OP": "attention_backend=flagos"}, True),
    "table": ({"VLLM_FL_TABLE": os.environ.get("TABLE", "")}, True),
}
"""Name -> (environment variables, whether vllm-fl is enabled).

`table` uses default settings and the tuning table at the path in the variable TABLE. In
`shipped-early` a kernel starts while the previous one ends.

`stock-again` shows the difference between two identical engines; `stock-fusion` is stock with its
fusion pass for norms of heads and rope. `flagos` is FlagGems for all layers except attention,
`experts` only for experts; `direct` is `flagos` without vllm-fl, only in eager mode (direct.py).
`flagos-shadow-1` is `flagos` with 1 % of its steps sampled: `steady` shows unsampled steps there,
and sampled steps in `flagos-shadow-100`.
"""

FURTHER: dict[str, dict[str, Any]] = {
    "stock-fusion": {
        "compilation_config": {
            "custom_ops": ["+rotary_embedding"],
            "pass_config": {"enable_qk_norm_rope_fusion": True},
        },
    },
}
"""Variant -> options of vLLM in addition to OPTIONS."""

BARS = {
    ("compiled", "shipped"): {"batch 1": 0.995, "batch 64": 0.995, "prefill": 0.995},
    ("eager", "shipped"): {"batch 1": 0.995, "batch 64": 0.995, "prefill": 0.995},
    ("compiled", "flagos"): {"batch 1": 0.88, "batch 64": 0.90, "prefill": 0.94},
    ("eager", "flagos"): {"batch 1": 0.48, "batch 64": 0.52, "prefill": 0.96},
}
"""(mode, variant) -> the minimum share of stock's tokens per second."""

OTHERS = ("stock", "direct", "flagos")
"""Baselines of the comparisons."""

Speeds = dict[str, dict[str, list[float]]]
"""Engine -> workload -> tokens per second of each round."""


def prompts(seed: str, batch: int, length: int, vocabulary: int) -> list[list[int]]:
    """Random prompts, which do not share prefixes with other rounds."""
    pick = random.Random(seed)
    return [[pick.randrange(3, vocabulary) for _ in range(length)] for _ in range(batch)]


class Engine:
    """Running engine, idle between jobs."""

    def __init__(
        self, name: str, process: subprocess.Popen[str], log: Path, vocabulary: int
    ) -> None:
        self.name, self.process, self.log, self.vocabulary = name, process, log, vocabulary
        self.ready: dict[str, Any] = {}

    def wait(self) -> None:
        self.ready = self.answer(START_TIMEOUT)
        print(f"{self.name}: ready in {self.ready['seconds']:.0f} s", flush=True)

    def generate(self, workload: str, seed: int) -> tuple[float, float | None, list[float]]:
        """Tokens per second in total, and of steady decoding if any; seconds of the steps."""
        batch, length, new = WORKLOADS[workload]
        words = prompts(f"{workload} {seed}", batch, length, self.vocabulary)
        answer = self.ask({"prompts": words, "new_tokens": new})
        decoding = sorted(answer["steps"][1:])
        steady = batch / decoding[len(decoding) // 4] if len(decoding) > 4 else None
        return batch * (length + new) / float(answer["seconds"]), steady, answer["steps"]

    def kernels(self, step: str, seed: int) -> dict[str, list[float]]:
        """Kernel -> its µs and calls in one step, longest first."""
        batch, length, new = STEPS[step]
        for part in ("before", "seen"):  # the first steps after an idle moment are slower
            words = prompts(f"{step} {seed} {part}", batch, length, self.vocabulary)
            job = {"prompts": words, "new_tokens": new}
            answer = self.ask({**job, "profile": True} if part == "seen" else job)
        found: dict[str, list[float]] = answer["kernels"]
        per_step = {name: [us / new, calls / new] for name, (us, calls) in found.items()}
        return dict(sorted(per_step.items(), key=lambda item: -item[1][0]))

    def unprofiled(self, step: str) -> str:
        """Message about a profile without kernels, with the last related line of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-400:]
        words = ("cupti", "kineto", "profiler")
        about = [line for line in lines if any(word in line.lower() for word in words)]
        why = about[-1] if about else "its log names no reason"
        return f"the profile of {step!r} has no kernel: this round is left out ({why})"

    def peak_mib(self) -> float:
        """Peak device memory of its tensors; unlike the driver's number, without slack."""
        return float(self.ask({"memory": True})["peak_mib"])

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Send a job, and return the answer."""
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin)
        self.process.stdin.flush()
        return self.answer(ANSWER_TIMEOUT)

    def answer(self, timeout: float) -> dict[str, Any]:
        """Return the next answer; raise RuntimeError with the log if there is none in time."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(timeout) else ""
        if not line:
            raise RuntimeError(f"{self.name}: {self.log.read_text(errors='replace')[-5000:]}")
        values: dict[str, Any] = json.loads(line)
        return values


@contextlib.contextmanager
def running(
    name: str,
    mode: str,
    model: Path,
    folder: Path,
    share: float,
    *,
    waits: bool = True,
    **further: Any,
) -> Iterator[Engine]:
    """Start an engine and wait until it is ready; kill all its processes on exit.

    Engines start one by one, because they measure the free memory. Engines with a fixed size of the
    KV cache may start together: `waits` is false then.
    """
    variables, ours = VARIANTS[name]
    request = {
        "model": str(model),
        "ours": ours,
        "options": {
            **OPTIONS,
            "enforce_eager": mode == "eager",
            "gpu_memory_utilization": share,
            **FURTHER.get(name, {}),
            **further,
        },
        **({"patch": "gpu.direct"} if name == "direct" else {}),
    }
    log = folder / f"{mode}-{name}.log"
    environment = {
        **os.environ,
        **ALONE,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to the worker
        # `stock` and `stock-again` share compiled code, unless they start at once.
        "VLLM_CACHE_ROOT": str(folder / f"cache-{mode}-{name.removesuffix('-again' * waits)}"),
        **variables,
    }
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), json.dumps(request)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    engine = Engine(f"{mode} {name}", process, log, vocabulary)
    try:
        if waits:
            engine.wait()
        yield engine
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def memory_of(session: int) -> int | None:
    """MiB of device memory of the processes of an engine; None if the driver reports none."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    asked = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    used = None
    for line in asked.splitlines():
        pid, _, size = line.partition(",")
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(pid)) == session:
                used = (used or 0) + int(size)
    return used


def compare(mode: str, engines: Mapping[str, Engine], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield after each round: tokens per second and ratios to stock, by workload."""
    names = list(engines)
    speeds: Speeds = {n: {w: [] for w in WORKLOADS} for n in names}
    steady: Speeds = {n: {w: [] for w in WORKLOADS if WORKLOADS[w][2] > 1} for n in names}
    steps: dict[str, dict[str, list[list[int]]]] = {n: {w: [] for w in WORKLOADS} for n in names}
    for name in names:
        for workload in WORKLOADS:
            for warm_up in (-1, -2):
                speed, *_ = engines[name].generate(workload, warm_up)
            print(f"{engines[name].name}: {workload} {speed:.0f} tokens/s, warm", flush=True)
    for number in range(rounds):
        turn = number // 2 % len(names)
        order = (*names[turn:], *names[:turn])
        for workload in WORKLOADS:
            for name in reversed(order) if number % 2 else order:
                speed, decoding, took = engines[name].generate(workload, number)
                speeds[name][workload].append(speed)
                steps[name][workload].append([round(1e6 * seconds) for seconds in took])
                if decoding is not None:
                    steady[name][workload].append(decoding)
        yield {
            "mode": mode,
            "rounds": number + 1,
            "engines": {
                name: {
                    "ready": engines[name].ready,
                    "memory_mib": memory_of(engines[name].process.pid),  # after all workloads
                    "peak_mib": engines[name].peak_mib(),
                    "tokens_per_second": speeds[name],
                    "steady": steady[name],
                    "steps_us": steps[name],
                    **{
                        f"{prefix}of_{other}": {
                            w: ratios(found, name, other, w) for w in found[name]
                        }
                        for other in OTHERS
                        if other in names
                        for prefix, found in (("", speeds), ("steady_", steady))
                    },
                }
                for name in names
            },
        }


def profiled(engines: Mapping[str, Engine], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the kernel times of the GPU after each round.

    A profile may have no kernels (seen on an H100) and is then repeated once. A round without
    kernels of an engine in a step is skipped for this step.

    Returns:
        Engine -> step -> `us`, the sum of all kernel times by round; `of_stock`, the quartiles of
        its ratio to stock within a round, None without a round; `kernels`, name -> [µs, calls] of
        the last round.
    """
    sums: dict[str, dict[str, list[float]]] = {name: {s: [] for s in STEPS} for name in engines}
    last: dict[str, dict[str, Any]] = {name: {s: {} for s in STEPS} for name in engines}
    for number in range(rounds):
        for step in STEPS:
            seen: dict[str, dict[str, list[float]]] = {}
            for name in reversed(engines) if number % 2 else engines:
                engine = engines[name]
                seen[name] = engine.kernels(step, number) or engine.kernels(step, ~number)
                if not seen[name]:
                    print(f"{engine.name}: {engine.unprofiled(step)}", flush=True)
            if not all(seen.values()):
                continue
            for name, found in seen.items():
                last[name][step] = found
                sums[name][step].append(sum(us for us, _ in found.values()))
        yield {
            name: {
                step: {
                    "us": found,
                    "of_stock": quartiles([m / s for m, s in zip(found, stock, strict=True)]),
                    "kernels": last[name][step],
                }
                for step, found in sums[name].items()
                for stock in [sums["stock"][step]]
            }
            for name in engines
        }


def quartiles(values: list[float]) -> dict[str, float] | None:
    """Lower quartile, median and upper quartile; None without values."""
    if not values:
        return None
    few = len(values) < 2
    low, median, high = values * 3 if few else statistics.quantiles(values, method="inclusive")
    return {"median": median, "low": low, "high": high}


def kernel_table(found: dict[str, Any]) -> str:
    """GPU time of each step, and its longest kernels for each engine."""
    lines = []
    for step in STEPS:
        for name, of_engine in found.items():
            us, share = of_engine[step]["us"], of_engine[step]["of_stock"]
            if share is None:
                lines.append(f"{step:18}{name:18} no round showed the kernels of every engine")
                continue
            figures = f"{statistics.median(us):>12.1f} µs of kernels  {spread(share)} of stock's"
            lines.append(f"{step:18}{name:18}{figures}")
        for name, of_engine in found.items():
            lines.append(f"  {name}, the last round's longest, µs and calls a step:")
            for kernel, (us, calls) in list(of_engine[step]["kernels"].items())[:SHOWN]:
                lines.append(f"  {us:12.1f} {calls:7.1f}  {kernel[:100]}")
    return "\n".join(lines)


def ratios(speeds: Speeds, name: str, other: str, workload: str) -> dict[str, float]:
    """Median, smallest and largest ratio to another engine over the rounds."""
    pairs = zip(speeds[name][workload], speeds[other][workload], strict=True)
    found = [mine / its for mine, its in pairs]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def spread(ratio: dict[str, float]) -> str:
    """Format like `0.914 (0.912 – 0.916)`."""
    return f"{ratio['median']:.3f} ({ratio['low']:.3f} – {ratio['high']:.3f})"


def table(result: dict[str, Any]) -> str:
    """Format the result of a mode, one line per engine and workload."""
    lines = []
    for name, engine in result["engines"].items():
        bars = BARS.get((result["mode"], name), {}) if result["model"] == "qwen3-8b" else {}
        for workload, found in engine["tokens_per_second"].items():
            share = spread(engine["of_stock"][workload])
            bar = f"≥ {bars[workload]}" if workload in bars else ""
            speed = statistics.median(found)
            lines.append(f"{result['mode']:9}{name:18}{workload:10}{speed:>10.1f}  {share:26}{bar}")
            if workload in engine["steady_of_stock"]:
                share = spread(engine["steady_of_stock"][workload])
                lines.append(f"{'  steady':27}{workload:10}{'':10}  {share:26}")
            if name == "flagos" and "of_direct" in engine:
                share = spread(engine["of_direct"][workload])
                lines.append(f"{'  of direct':27}{workload:10}{'':10}  {share:26}≥ 1.0")
            if name.startswith("flagos-shadow") and "of_flagos" in engine:
                share = spread(engine["of_flagos"][workload])
                lines.append(f"{'  of flagos':27}{workload:10}{'':10}  {share:26}")
        blocks, peak = engine["ready"]["kv_blocks"], engine["peak_mib"]
        lines.append(f"  {blocks} KV blocks, {engine['memory_mib']} MiB, tensors {peak:.0f} MiB")
    return "\n".join(lines)


def keep(out: Path, results: dict[str, Any]) -> None:
    """Write the results so far."""
    text = json.dumps({"host": facts(), "results": results}, indent=1)
    (out / "engine.json").write_text(text)


def main() -> None:
    """Measure the modes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    modes, variants = ["compiled", "eager"], ["stock", "shipped", "flagos"]
    parser.add_argument("--model", default="qwen3-8b", choices=MODELS)
    parser.add_argument("--modes", nargs="+", default=modes, choices=modes)
    parser.add_argument("--variants", nargs="+", default=variants, choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--kernels", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--ranks", type=int, default=1, metavar="GPUS")
    options = parser.parse_args()
    if "direct" in options.variants and "compiled" in options.modes:
        parser.error("the variant direct is for --modes eager")
    if "table" in options.variants and not os.environ.get("TABLE"):
        parser.error("the variant table takes its file from the variable TABLE")
    if "stock" not in options.variants or len(options.variants) < 2:
        parser.error("--variants takes stock, with which the others are compared, and one more")
    if options.rounds < 1:
        parser.error("--rounds takes 1 or more")
    if shutil.which("nvidia-smi") is None:
        print("skipped: no NVIDIA GPU here (there is no nvidia-smi)")
        return
    out = Path(os.environ.get("OUT", "."))
    share = min(MEMORY_GIB / memory_gib(), 0.88 / len(options.variants))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / "model"
        model.mkdir()
        config, further = MODELS[options.model]
        further = {**further, "tensor_parallel_size": options.ranks}
        (model / "config.json").write_text(json.dumps(config))
        for mode in options.modes:
            with contextlib.ExitStack() as stack:
                engines: dict[str, Engine] = {}
                for name in options.variants:
                    try:
                        starting = running(name, mode, model, folder, share, **further)
                        engine = stack.enter_context(starting)
                    except RuntimeError as error:
                        print(f"does not start: {error}", flush=True)
                        results[f"{mode} {name}"] = {"failed": str(error)}
                        continue
                    engines[name] = engine
                if "stock" not in engines or len(engines) < 2:
                    continue  # nothing to compare: save device time
                for result in compare(mode, engines, options.rounds):
                    results[mode] = {"model": options.model, **result}
                    keep(out, results)
                print(table(results[mode]), flush=True)
                for kernels in profiled(engines, options.kernels):
                    results[mode]["kernels"] = kernels
                    keep(out, results)
            if "kernels" in results.get(mode, {}):
                print(kernel_table(results[mode]["kernels"]), flush=True)
        for log in folder.glob("*.log"):
            shutil.copy(log, out / f"engine-{log.name}")


if __name__ == "__main__":
    main()
