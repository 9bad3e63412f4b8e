"""The main job, shown: generate with stock vLLM and with vllm-fl, and compare.

`nox -s quickstart` runs this with everything installed. It makes a tiny Qwen3 model with random
weights and starts four engines: stock; vllm-fl as installed; stock in plain PyTorch
(`custom_ops=["none"]`) and vllm-fl's reference plan, which must give the same logits bit for bit,
since both engines run the same batches in one thread.
It fails when an op that the model has a layer for was neither called, nor traced, nor left to vLLM
by the plan, or when the logits are not what they should be.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

import tiny_model
from engine_run import BIND, STOCK, EngineFailed, Job, cores, largest_difference, run

IN_QWEN3 = ("rms_norm", "rotary_embedding", "silu_and_mul")
"""The ops that the model has layers for."""

TOLERANCE = 0.05
"""Largest difference of logits between the plan and stock, as a share of the largest logit.
bfloat16 has 8 bits, and two right kernels differ by their rounding (~1 % here, after 2 layers);
a wrong one differs by far more."""

DEBUG = {"VLLM_FL_DISPATCH_DEBUG": "1"}
"""Calls are counted under this."""

REFERENCE = {"VLLM_FL_PREFER": "reference"}


def main() -> int:
    """Run it. Exit status 0: all is well; 1: a finding, printed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--compiled", action="store_true", help="with torch.compile, not eager")
    parser.add_argument(
        "--only-plan", action="store_true", help="leave the reference plan and its stock out"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            model=str(tiny_model.make(Path(folder))),
            batches=[[[(7 * i + 3 * j) % 500 + 3 for j in range(12 + i)] for i in range(8)]],
            new_tokens=16,
            eager=not arguments.compiled,
            rounds=3,
        )
        try:
            findings = _installed_plan(job)
            if not arguments.only_plan:
                findings += _reference_plan(job)
        except EngineFailed as error:
            print(error)
            return 1
    for finding in findings:
        print(f"FINDING: {finding}")
    print("quickstart: " + (f"{len(findings)} finding(s)" if findings else "all is well"))
    return 1 if findings else 0


def _installed_plan(job: Job) -> list[str]:
    """Stock vLLM and vllm-fl as installed."""
    print("Stock vLLM …", flush=True)
    stock = run(job, **STOCK)
    print("vllm-fl, the plan of what is installed …", flush=True)
    ours = run(job, **DEBUG)
    findings = [
        *_show_plan("The plan of what is installed", ours),
        *_compare("vllm-fl against stock", stock, ours, TOLERANCE),
    ]
    tokens = len(job.batches[-1]) * job.new_tokens
    print(
        "Tokens per second, best of 3 rounds (a model this small shows that it runs, not how "
        "fast; `nox -s bench` measures that):"
    )
    for name, result in (("stock", stock), ("vllm-fl", ours)):
        speed = tokens / min(result["seconds"])
        print(f"  {name:<8} {speed:8.1f}   KV blocks {result['kv_blocks']}")
    return findings


def _reference_plan(job: Job) -> list[str]:
    """Stock vLLM in plain PyTorch and vllm-fl's reference plan, side by side: the same bits."""
    print('\nStock vLLM in plain PyTorch (custom_ops=["none"]), and vllm-fl, the reference plan …')
    sys.stdout.flush()
    untimed = dataclasses.replace(job, rounds=0)
    native = {"compilation_config": {"custom_ops": ["none"]}}
    beside = {BIND: str(max(cores()))}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run, dataclasses.replace(untimed, options=native), **STOCK, **beside)
        ours = run(untimed, **DEBUG, **REFERENCE)
        stock = waiting.result()
    return [
        *_show_plan("The reference plan", ours),
        *_compare('the reference plan against stock with custom_ops=["none"]', stock, ours, 0.0),
    ]


def _show_plan(title: str, result: dict[str, Any]) -> list[str]:
    """Print a plan with reasons and counts; say which op of the model was passed over."""
    report = result["report"][0]
    print(f"\n{title} ({report['mode']}):")
    findings = []
    for op, entry in report["ops"].items():
        counts = report["calls"].get(op, {})
        shown = ", ".join(f"{impl} {count}" for impl, count in counts.items()) or "-"
        print(f"  {op:<17} {entry['impl']:<16} {entry['reason']:<28} calls: {shown}")
        if op in IN_QWEN3 and entry["impl"] != "stock" and not counts.get(entry["impl"]):
            findings.append(f"{op}: {entry['impl']} was planned but neither called nor traced")
    return findings


def _compare(what: str, a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[str]:
    """Print the largest difference of logits; a finding when it is over the tolerance."""
    worst, magnitude = largest_difference(a, b)
    share = worst / magnitude
    print(
        f"\nLargest difference of logits, {what}: {worst:.4g} "
        f"({share:.2%} of the largest, {magnitude:.4g}; allowed {tolerance:.0%})"
    )
    return [f"logits differ by {share:.2%}: {what}"] if not share <= tolerance else []


if __name__ == "__main__":
    sys.exit(main())
