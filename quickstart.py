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


def main() -> int:
    """Run the engines. Exit status 0: no findings; 1: findings, which are printed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, help="the folder of a model with a chat template")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile, not eager")
    parser.add_argument("--only-plan", action="store_true", help="leave the reference plan out")
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
    print("quickstart: " + (f"{len(findings)} finding(s)" if findings else "all is well"))
    if arguments.model and not findings:
        command = Path(sys.executable).parent / "vllm-fl"
        print(
            f"\nThe model stays in {arguments.model}. What you may want next:\n"
            f"  {command} tune --profile --model {arguments.model} --enforce-eager\n"
            f"  {command} tune --model {arguments.model}\n"
            f"  {command} bisect --model {arguments.model}"
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
    print("A tiny model with random weights: its answers are no language.")
    model = tiny_model.make(folder)
    asked = [[(7 * i + 3 * j) % 500 + 3 for j in range(12 + i)] for i in range(len(QUESTIONS))]
    prose = [[(31 * i + 7 * i * i) % 500 + 3 for i in range(500)]]
    job = Job(str(model), [asked], new_tokens=16, logits=False, rounds=3, scored=prose)
    return job, lambda answer: " ".join(map(str, answer))


def _shown(job: Job, text_of: Callable[[list[int]], str], *, only_plan: bool) -> list[str]:
    """Run the engines, print the comparison and return the findings."""
    print("Stock vLLM …", flush=True)
    stock = run(job, **STOCK)
    print("vllm-fl, the plan of what is installed …", flush=True)
    ours = run(job, **DEBUG)
    results = {"stock": stock, "vllm-fl": ours}
    if not only_plan:
        print("vllm-fl, the reference plan …", flush=True)
        results["reference"] = run(replace(job, rounds=0), **DEBUG, **REFERENCE)
    findings = _show_plan("The plan of what is installed", ours)
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
    findings = []
    for op, entry in report["ops"].items():
        counts = report["calls"].get(op, {})
        none = "-" if op not in report["not_reached"] else "- (this model does not reach it)"
        shown = ", ".join(f"{impl} {count}" for impl, count in counts.items()) or none
        print(f"  {op:<17} {entry['impl']:<16} {entry['reason']:<28} calls: {shown}")
        reached = op not in report["not_reached"]
        if reached and entry["impl"] != "stock" and not counts.get(entry["impl"]):
            findings.append(f"{op}: {entry['impl']} was planned but neither called nor traced")
    return findings


def _show_answers(results: dict[str, dict[str, Any]], text_of: Callable[[list[int]], str]) -> None:
    """Print the answers of all engines to each question."""
    for i, question in enumerate(QUESTIONS):
        print(f"\n{question}")
        for name, result in results.items():
            print(f"  {name:<10} {text_of(result['tokens'][i])}")
    print("\nWhere two words are about equally likely, rounding decides, and what follows differs.")


def _show_scores(results: dict[str, dict[str, Any]]) -> list[str]:
    """Print each engine's log-probabilities of the text; return differences above the limits."""
    findings = []
    stock = prose.logps(results["stock"])
    print(f"\nLog-probabilities of {len(stock)} tokens, and how they differ from stock's:")
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
    print(f"  of right plans at most: {prose.RIGHT}")
    return findings


def _show_speed(job: Job, results: dict[str, dict[str, Any]]) -> None:
    tokens = len(job.batches[-1]) * job.new_tokens
    print(
        f"\nTokens per second, best of {job.rounds} rounds in one thread (it shows that it runs; "
        "`nox -s bench` measures how fast):"
    )
    for name, result in results.items():
        speed = tokens / min(result["seconds"])
        print(f"  {name:<10} {speed:8.1f}   KV blocks {result['kv_blocks']}")


if __name__ == "__main__":
    sys.exit(main())
