"""What a start of vLLM costs with vllm-fl on a GPU, Qwen3-8B's shapes: stock and shipped.

    python benchmarks/gpu/startup.py [--modes compiled eager] [--variants …] [--starts 2]

Engines start one after the other, each alone on the device, in turns. The first start of each in a
mode finds its compile cache empty, the later ones find it filled. JSON goes to $OUT/startup.json
after every start:

    preflight_seconds   what the start line says; null for stock
    live_calls          calls compared on the loaded model's tensors, by the same line
    live_seconds        how long that took, its forwards included
    live_remarks        why there was no such run, and what was not compared in it
    captured            implementation -> [graphs, seconds of capturing and replaying them]
    engine_seconds      from vllm.LLM(…) to an engine that takes requests
    total_seconds       the same from the start of the process, imports included
    kv_blocks           vLLM's num_gpu_blocks
    peak_mib            the most device memory of its tensors, after serving a batch
    memory_mib          what the driver counts for its processes; null where it does not tell
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from engine import MODEL, VARIANTS, memory_of, running
from host import facts

PREFLIGHT = re.compile(r"vllm-fl: .*\((?:eager|compiled);.*?(?:verified|run) in ([\d.]+) s")
LIVE = re.compile(r"vllm-fl: .* (\d+) calls on live tensors in ([\d.]+) s")
LIVE_REMARKS = re.compile(
    r"not on live tensors: .*?(?=; digest)|not compared there: .*?(?=; digest)"
)
CAPTURED = re.compile(r"(\w+=\S+) captured and replayed twice in ([\d.]+) s")

SHARE = 0.9
"""Of the device's memory, as vLLM takes by default."""

SLACK_MIB = 16


def used_mib() -> int:
    """The device memory that is in use, by whomever."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    asked = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return int(asked.split()[0])


def wait_for_memory(before: int, limit: float = 60.0) -> None:
    """Wait until an ended engine's memory is free: the next one sizes its KV cache by that."""
    deadline = time.monotonic() + limit
    while used_mib() > before + SLACK_MIB and time.monotonic() < deadline:
        time.sleep(0.5)


def start(name: str, mode: str, model: Path, folder: Path) -> dict[str, Any]:
    """Start an engine, serve one batch and end it; RuntimeError with its log when it fails."""
    begun = time.perf_counter()
    with running(name, mode, model, folder, SHARE) as engine:
        total = time.perf_counter() - begun
        engine.generate("batch 1", seed=0)
        log = engine.log.read_text(errors="replace")
        said, live = PREFLIGHT.search(log), LIVE.search(log)
        captured: dict[str, list[float]] = {}
        for impl, seconds in CAPTURED.findall(log):
            graphs, total_of_impl = captured.get(impl, (0, 0.0))
            captured[impl] = [graphs + 1, round(total_of_impl + float(seconds), 2)]
        return {
            "mode": mode,
            "variant": name,
            "preflight_seconds": float(said.group(1)) if said else None,
            "live_calls": int(live.group(1)) if live else None,
            "live_seconds": float(live.group(2)) if live else None,
            "live_remarks": LIVE_REMARKS.findall(log),
            "captured": captured,
            "engine_seconds": engine.ready["seconds"],
            "total_seconds": total,
            "kv_blocks": engine.ready["kv_blocks"],
            "peak_mib": engine.peak_mib(),
            "memory_mib": memory_of(engine.process.pid),
        }


def main() -> None:
    """Start what was asked for, and print a line of JSON for each start."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    modes, variants = ["compiled", "eager"], ["stock", "shipped"]
    parser.add_argument("--modes", nargs="+", default=modes, choices=modes)
    parser.add_argument("--variants", nargs="+", default=variants, choices=VARIANTS)
    parser.add_argument("--starts", type=int, default=2, help="starts of each engine")
    options = parser.parse_args()
    if shutil.which("nvidia-smi") is None:
        print("skipped: no NVIDIA GPU here (there is no nvidia-smi)")
        return
    out = Path(os.environ.get("OUT", "."))
    os.environ["VLLM_FL_LOG_LEVEL"] = "DEBUG"  # which names what is captured
    results: list[dict[str, Any]] = []
    before = used_mib()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        for mode in options.modes:
            for number in range(options.starts):
                order = options.variants if number % 2 == 0 else options.variants[::-1]
                for name in order:
                    try:
                        result = start(name, mode, model, folder)
                    except RuntimeError as error:
                        result = {"mode": mode, "variant": name, "failed": str(error)}
                    wait_for_memory(before)
                    results.append({**result, "start": number})
                    print(json.dumps(results[-1]), flush=True)
                    text = json.dumps({"host": facts(), "results": results}, indent=1)
                    (out / "startup.json").write_text(text)
                    shutil.copy(folder / f"{mode}-{name}.log", out / f"startup-{mode}-{name}.log")


if __name__ == "__main__":
    main()
