"""Generate with stock vLLM and with vllm-fl, and compare the answers.

`nox -s quickstart` runs this with all dependencies and a real model, SmolLM2-135M-Instruct. It runs
three engines: stock; vllm-fl with the installed backends; vllm-fl with the reference plan (plain
PyTorch). It prints their answers and the log-probabilities that they assign to a text. It fails if
the planned implementation of an op that the model uses was never called or traced, or if two
engines differ by more than the rounding of correct kernels explains.

Without `--model` it creates a tiny Qwen3 model with random weights, which generates no language.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import prose  # noqa: E402 (found through the line above)
import tiny_model  # noqa: E402
from engine_run import STOCK, EngineFailed, Job, run  # noqa: E402

QUESTIONS = (
    "How many days are in a week?",
    "What is 2 + 2?",
    "What is the opposite of hot?",
    "Write one sentence about a dog.",
)

PROSE = ROOT / "LICENSE"
"""The scored text."""

SCORED = 1000
"""Number of scored tokens."""

DEBUG = {"VLLM_FL_DISPATCH_DEBUG": "1"}
"""Makes vllm-fl count calls."""

REFERENCE = {"VLLM_FL_PREFER": "reference"}

GAIN = """
With vllm-fl, each kernel is compared with an exact result before it serves, and plan, metrics and
explain show which kernel runs, and why. On two Xeon cores this model decoded at 1.06 (1.00 - 1.11)
times the speed of stock vLLM, in eager mode (docs/measurements/engines.md). Next, for your server:
"""


def main() -> int:
    """Run the engines. Exit status 0: no findings; 1: findings, which are printed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, help="the folder of a model with a chat template")
    parser.add_argument("--compiled", action="store_true", help="use torch.compile")
    parser.add_argument("--only-plan", action="store_true", help="skip the reference plan")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        job, text_of = _real(arguments.model) if arguments.model else _tiny(Path(scratch))
        try:
            job = replace(job, eager=not arguments.compiled)
            findings = _shown(job, text_of, only_plan=arguments.only_plan)
        except EngineFailed as error:
            print(error)
            return 1
    for finding in findings:
        print(f"FINDING: {finding}")
    print("quickstart: " + (f"{len(findings)} finding(s)" if findings else "no findings"))
    if arguments.model and not findings:
        command = Path(sys.executable).parent / "vllm-fl"
        model = f"--model {arguments.model.resolve()} --enforce-eager"
        print(
            f"{GAIN}"
            f"  {sys.executable} -m vllm.entrypoints.openai.api_server {model}\n"
            f"  {command} plan {model}\n"
            f"  {command} explain rms_norm\n\n"
            f"The next `nox -s quickstart` recreates the environment {sys.prefix}:\n"
            "packages that you install there are lost. The model is kept."
        )
    return 1 if findings else 0


def _real(model: Path) -> tuple[Job, Callable[[list[int]], str]]:
    """Job with the questions in the model's chat template, and a function that decodes answers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]
    prose = tokenizer.encode(PROSE.read_text())[:SCORED]

    def text_of(answer: list[int]) -> str:
        end = tokenizer.eos_token_id
        ids = answer[: answer.index(end)] if end in answer else answer
        return " ".join(tokenizer.decode(ids).split())

    return Job(str(model), [asked], new_tokens=40, logits=False, rounds=3, scored=[prose]), text_of


def _tiny(folder: Path) -> tuple[Job, Callable[[list[int]], str]]:
    """Job with a tiny random model, and a function that formats answers as token ids."""
    print("A tiny model with random weights: its answers are random tokens.")
    model = tiny_model.make(folder)
    asked = [[(7 * i + 3 * j) % 500 + 3 for j in range(12 + i)] for i in range(len(QUESTIONS))]
    prose = [[(31 * i + 7 * i * i) % 500 + 3 for i in range(500)]]
    job = Job(str(model), [asked], new_tokens=16, logits=False, rounds=3, scored=prose)
    return job, lambda answer: " ".join(map(str, answer))


def _shown(job: Job, text_of: Callable[[list[int]], str], *, only_plan: bool) -> list[str]:
    """Run the engines, print the comparison and return the findings."""
    print("Running stock vLLM …", flush=True)
    stock = run(job, **STOCK)
    print("Running vllm-fl with the installed backends …", flush=True)
    ours = run(job, **DEBUG)
    results = {"stock": stock, "vllm-fl": ours}
    if not only_plan:
        print("Running vllm-fl with the reference plan …", flush=True)
        results["reference"] = run(replace(job, rounds=0), **DEBUG, **REFERENCE)
    findings = _show_plan("The plan with the installed backends", ours)
    if not only_plan:
        findings += _show_plan("The reference plan", results["reference"])
    _show_answers(results, text_of)
    findings += _show_scores(results)
    _show_speed(job, {name: results[name] for name in ("stock", "vllm-fl")})
    return findings


def _show_plan(title: str, result: dict[str, Any]) -> list[str]:
    """Print a plan with reasons and call counts; return planned implementations never called."""
    report = result["report"][0]
    print(f"\n{title} ({report['mode']}):")
    findings, rows = [], [("op", "implementation", "reason", "calls")]
    for op, entry in report["ops"].items():
        counts, used = report["calls"].get(op, {}), op not in report["not_reached"]
        shown = ", ".join(f"{impl} {count}" for impl, count in counts.items())
        rows.append((op, entry["impl"], entry["reason"], shown if used else "unused by this model"))
        if used and entry["impl"] != "stock" and not counts.get(entry["impl"]):
            findings.append(f"{op}: {entry['impl']} was planned but neither called nor traced")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
    print("  Calls of vLLM's implementation (stock) are not counted.")
    return findings


def _show_answers(results: dict[str, dict[str, Any]], text_of: Callable[[list[int]], str]) -> None:
    """Print the answers of all engines to each question."""
    for i, question in enumerate(QUESTIONS):
        print(f"\n{question}")
        for name, result in results.items():
            print(f"  {name:<10} {text_of(result['tokens'][i])}")
    print("\nIf two words are about equally likely, rounding decides, and the rest differs.")


def _show_scores(results: dict[str, dict[str, Any]]) -> list[str]:
    """Print each engine's log-probabilities of the text; return differences above the limits."""
    findings = []
    stock = prose.logps(results["stock"])
    print(f"\nLog-probabilities of {len(stock)} tokens, and the differences from stock, in nats:")
    for name, result in results.items():
        scores = prose.logps(result)
        line = f"  {name:<10} perplexity {math.exp(-statistics.fmean(scores)):8.3f}"
        if name != "stock":
            found = prose.distance(scores, stock)
            line += f"   {found}"
            findings += [
                f"log-probabilities differ: {name}, {above}"
                for above in prose.RIGHT.exceeded(found)
            ]
        print(line)
    print(f"  limits for a correct plan: {prose.RIGHT}")
    return findings


def _show_speed(job: Job, results: dict[str, dict[str, Any]]) -> None:
    tokens = len(job.batches[-1]) * job.new_tokens
    print(
        f"\nTokens per second, best of {job.rounds} rounds in one thread, with calls counted "
        "(`nox -s bench` measures the speed):"
    )
    for name, result in results.items():
        speed = tokens / min(result["seconds"])
        print(f"  {name:<10} {speed:8.1f}   KV blocks {result['kv_blocks']}")


if __name__ == "__main__":
    sys.exit(main())
