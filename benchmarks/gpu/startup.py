"""Measure the startup of vLLM on a GPU, with the shapes of a model: stock and shipped.

    python benchmarks/gpu/startup.py [--model qwen3-8b] [--modes compiled eager] [--variants …]
        [--cold 2] [--warm 1] [--seconds 480] [--ranks 1 2 4]

Engines start one by one, each alone on the devices. With `--ranks` each number of devices is
measured, tensor parallel. For a cold start all caches are empty: vLLM's, Inductor's, Triton's,
FlagGems's and the kept verdicts. Warm starts follow the last cold start of all variants, and use
its caches. JSON goes to $OUT/startup.json after every start:

    ranks               number of ranks of the engine
    phases              phase -> seconds, from vLLM's log; for vllm-fl also from its report
                        (`vllm_fl_report`, `start`)
    ranges              range of token counts -> seconds of compiling its graphs, from vLLM's log
    preflight_seconds   from the start line; null for stock
    live_calls          calls compared on the loaded model's tensors, from the same line
    live_seconds        seconds of that, forwards included
    live_remarks        reason if that did not run, and calls that were not compared
    captured            implementation -> [graphs, seconds of capturing and replaying them]
    engine_seconds      from vllm.LLM(…) to an engine that takes requests
    total_seconds       the same from the start of the process, imports included
    served_seconds      of the first request, and of an equal second one
    kv_blocks           vLLM's num_gpu_blocks
    peak_mib            peak device memory of its tensors, after serving a batch
    memory_mib          memory of its processes from the driver; null if it reports none
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from engine import VARIANTS, memory_of, running
from host import facts
from shapes import MODELS

PREFLIGHT = re.compile(r"vllm-fl: .*\((?:eager|compiled);.*?(?:verified|run|check) in ([\d.]+) s")
LIVE = re.compile(r"vllm-fl: .* (\d+) calls on live tensors in ([\d.]+) s")
LIVE_REMARKS = re.compile(r"(?:not verified on live tensors|not compared): .*?(?=; digest)")
CAPTURED = re.compile(r"(\w+=\S+) captured and replayed twice in ([\d.]+) s")

SAID = {
    "the weights": r"Model loading took .* and ([\d.]+) seconds",
    "Dynamo": r"Dynamo bytecode transform time: ([\d.]+) s",
    "torch.compile": r"torch\.compile (?:took|takes) ([\d.]+) s in total",
    "the first run": r"Initial profiling/warmup run took ([\d.]+) s",
    "graphs": r"Graph capturing finished in (\d+) secs",
    "profile, cache and warm-up": r"init engine \(.*\) took ([\d.]+) s",
}
"""Phase -> pattern in vLLM's log. If a release has another text, the phase is skipped."""

RANGE = re.compile(r"Compiling a graph for compile range (\(.*?\)|\S+) takes ([\d.]+) s")

SHARE = 0.9
"""Share of the device's memory, vLLM's default."""

SLACK_MIB = 16


def used_mib() -> int:
    """Memory in use on the visible devices, by all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query += [f"--id={visible}"] if visible else []
    asked = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return sum(map(int, asked.split()))


def wait_for_memory(before: int, limit: float = 60.0) -> None:
    """Wait until the memory of the last engine is free; the KV cache of the next depends on it."""
    deadline = time.monotonic() + limit
    while used_mib() > before + SLACK_MIB and time.monotonic() < deadline:
        time.sleep(0.5)


def phases(log: str, ready: dict[str, Any]) -> dict[str, float]:
    """Phase -> seconds, from vLLM's log and from the worker report if there is one."""
    found = {what: re.findall(pattern, log) for what, pattern in SAID.items()}
    logged = {f"log: {what}": sum(map(float, each)) for what, each in found.items() if each}
    return logged | {k: round(v, 2) for k, v in (ready["report"] or {}).get("start", {}).items()}


def start(name: str, mode: str, model: Path, folder: Path, **further: Any) -> dict[str, Any]:
    """Start an engine, serve one batch and end it; raise RuntimeError with its log on failure."""
    for variable in ("TRITON_CACHE_DIR", "FLAGGEMS_CACHE_DIR", "XDG_CACHE_HOME"):
        os.environ[variable] = str(folder / f"{variable}-{name}")
    begun = time.perf_counter()
    with running(name, mode, model, folder, SHARE, **further) as engine:
        total = time.perf_counter() - begun
        served = [sum(engine.generate("batch 1", seed=seed)[2]) for seed in range(2)]
        log = engine.log.read_text(errors="replace")
        said, live = PREFLIGHT.search(log), LIVE.search(log)
        captured: dict[str, list[float]] = {}
        for impl, seconds in CAPTURED.findall(log):
            graphs, total_of_impl = captured.get(impl, (0, 0.0))
            captured[impl] = [graphs + 1, round(total_of_impl + float(seconds), 2)]
        return {
            "mode": mode,
            "variant": name,
            "phases": phases(log, engine.ready),
            "ranges": {where: float(took) for where, took in RANGE.findall(log)},
            "preflight_seconds": float(said.group(1)) if said else None,
            "live_calls": int(live.group(1)) if live else None,
            "live_seconds": float(live.group(2)) if live else None,
            "live_remarks": LIVE_REMARKS.findall(log),
            "captured": captured,
            "engine_seconds": engine.ready["seconds"],
            "total_seconds": total,
            "served_seconds": served,
            "kv_blocks": engine.ready["kv_blocks"],
            "peak_mib": engine.peak_mib(),
            "memory_mib": memory_of(engine.process.pid),
        }


def table(results: list[dict[str, Any]]) -> str:
    """Format the median seconds of each phase of cold and warm starts, a column per engine."""
    lines = []
    for which in dict.fromkeys((each["ranks"], each["mode"], each["kind"]) for each in results):
        of_kind = [
            r for r in results if (r["ranks"], r["mode"], r["kind"]) == which if "failed" not in r
        ]
        ranks, mode, kind = which
        names = list(dict.fromkeys(each["variant"] for each in of_kind))
        rows = {name: [flat(r) for r in of_kind if r["variant"] == name] for name in names}
        counts = ", ".join(f"{len(rows[name])} of {name}" for name in names)
        lines.append(f"ranks: {ranks}, {mode}, {kind} starts: {counts}; medians, seconds")
        lines.append(f"  {'':44}" + "".join(f"{name:>14}" for name in names))
        for what in dict.fromkeys(key for each in rows.values() for row in each for key in row):
            cells = [[row[what] for row in rows[name] if what in row] for name in names]
            columns = (
                f"{statistics.median(cell):>14.1f}" if cell else f"{'-':>14}" for cell in cells
            )
            lines.append(f"  {what:44}" + "".join(columns))
    return "\n".join(lines)


def flat(result: dict[str, Any]) -> dict[str, float]:
    """Fields of a start in seconds."""
    ranges = {f"log: range {where}": took for where, took in result["ranges"].items()}
    whole = {"from LLM(…)": result["engine_seconds"], "the whole": result["total_seconds"]}
    return whole | result["phases"] | ranges


def main() -> None:
    """Start the engines of the command line, and print a line of JSON for each start."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    modes, variants = ["compiled", "eager"], ["stock", "shipped"]
    parser.add_argument("--model", default="qwen3-8b", choices=MODELS)
    parser.add_argument("--modes", nargs="+", default=modes, choices=modes)
    parser.add_argument("--variants", nargs="+", default=variants, choices=VARIANTS)
    parser.add_argument("--cold", type=int, default=2, help="starts of each with empty caches")
    parser.add_argument("--warm", type=int, default=1, help="starts of each with filled ones")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], metavar="GPUS")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after")
    options = parser.parse_args()
    if options.cold < 1:
        parser.error("--cold takes 1 or more: warm starts find what a cold one has left")
    if shutil.which("nvidia-smi") is None:
        print("skipped: no NVIDIA GPU here (there is no nvidia-smi)")
        return
    deadline = time.monotonic() + options.seconds
    out = Path(os.environ.get("OUT", "."))
    os.environ["VLLM_FL_LOG_LEVEL"] = "DEBUG"  # logs what is captured
    config, further = MODELS[options.model]
    results: list[dict[str, Any]] = []
    before = used_mib()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        starts = [("cold", n) for n in range(options.cold)] + [
            ("warm", n) for n in range(options.warm)
        ]
        for ranks, mode in itertools.product(options.ranks, options.modes):
            for kind, number in starts:
                filled = number if kind == "cold" else options.cold - 1
                folder = Path(scratch, f"caches-{ranks}-{filled}")
                folder.mkdir(exist_ok=True)
                order = options.variants if number % 2 == 0 else options.variants[::-1]
                for name in order:
                    label = f"ranks: {ranks}, {mode}, {kind} start of {name}"
                    if time.monotonic() > deadline:
                        print(f"{label}: left out, the time is up")
                        continue
                    size = {**further, "tensor_parallel_size": ranks}
                    try:
                        result = start(name, mode, model, folder, **size)
                    except RuntimeError as error:
                        result = {"mode": mode, "variant": name, "failed": str(error)}
                    wait_for_memory(before)
                    results.append({"ranks": ranks, **result, "kind": kind, "start": number})
                    print(json.dumps(results[-1]), flush=True)
                    text = json.dumps({"host": facts(), "results": results}, indent=1)
                    (out / "startup.json").write_text(text)
                    log = folder / f"{mode}-{name}.log"
                    shutil.copy(log, out / f"startup-{ranks}-{mode}-{kind}-{name}.log")
    print(table(results))


if __name__ == "__main__":
    main()
