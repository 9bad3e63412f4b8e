"""Operators: the plan's kernel runs inside a mixture of experts, with graphs; no layer is replaced.
Qwen3-30B-A3B's shapes with dummy weights, fewer layers. vLLM's experts call `_C::silu_and_mul`
directly. PyTorch's profiler shows which kernels ran in the steps that replay a graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))

from shapes import MODELS

__all__ = ["cases"]

MODEL = {**MODELS["qwen3-30b-a3b"][0], "num_hidden_layers": 4, "vocab_size": 32_000}

VARIANTS = {
    "stock": {"VLLM_PLUGINS": ""},
    "flagos": {
        "VLLM_FL_PER_OP": "silu_and_mul=flagos;rms_norm=stock;rotary_embedding=stock;"
        "gelu_and_mul=stock;attention_backend=stock",
    },
}

STOCKS, FLAGGEMS = "act_and_mul_kernel", "silu_and_mul"
"""Substrings of the two kernels' names: vLLM's template, FlagGems's Triton function."""

NEW_TOKENS = 8


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(mode, the problem or "")."""
    (folder / "experts").mkdir()
    (folder / "experts" / "config.json").write_text(json.dumps(MODEL))
    for eager in (False, True):
        mode = "eager" if eager else "compiled, with graphs"
        found = {variant: _run(folder, variant, eager) for variant in VARIANTS}
        yield mode, _problem(found["stock"], found["flagos"])
        out = Path(os.environ.get("OUT", ".")) / f"experts-{'eager' if eager else 'compiled'}.json"
        for each in found.values():
            del each["logits"]
        out.write_text(json.dumps(found, indent=1))


def _problem(stock: dict[str, Any], ours: dict[str, Any]) -> str:
    kernels = {name: stock[name] for name in ("decode", "prefill")}
    for step, names in kernels.items():
        if not any(STOCKS in name for name in names):
            return f"stock's {step} has no {STOCKS}: {sorted(names)[:5]}"
        mine = ours[step]
        if left := [name for name in mine if STOCKS in name]:
            return f"{step} still has {left}"
        if not any(FLAGGEMS in name for name in mine):
            return f"{step} has no kernel of FlagGems's: {sorted(mine)}"
    worst = max(
        abs(a - b)
        for row, twin in zip(stock["logits"], ours["logits"], strict=True)
        for a, b in zip(row, twin, strict=True)
    )
    magnitude = max(abs(a) for row in stock["logits"] for a in row)
    ours["difference"] = [worst, magnitude]
    # bf16 has 8 bits, and a token near a tie uses another expert; four layers.
    return "" if worst <= 0.05 * magnitude else f"logits differ by {worst:.3g} of {magnitude:.3g}"


def _run(folder: Path, variant: str, eager: bool) -> dict[str, Any]:
    out = folder / f"experts-{variant}-{eager}.json"
    request = {"model": str(folder / "experts"), "eager": eager, "out": str(out)}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(request)],
        env={
            **os.environ,
            **VARIANTS[variant],
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=500,
    )
    if done.returncode:
        raise RuntimeError(f"{variant}: {done.stdout[-3000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    found["lines"] = [line for line in done.stdout.splitlines() if "vllm-fl" in line][-20:]
    return found


def _main(request: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        request["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=request["eager"],
        max_model_len=1024,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        logprobs_mode="raw_logits",
        max_logprobs=-1,
    )
    found: dict[str, Any] = {
        "decode": _kernels(llm, 8, 4, NEW_TOKENS),
        "prefill": _kernels(llm, 8, 100, 1),
    }
    sampling = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=-1
    )
    outputs = llm.generate(_prompts(4, 12), sampling, use_tqdm=False)
    rows = [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]
    found["logits"] = [[row[token].logprob for token in sorted(row)] for row in rows]
    if os.environ.get("VLLM_PLUGINS") is None:
        found["report"] = llm.collective_rpc("vllm_fl_report")
    Path(request["out"]).write_text(json.dumps(found))


def _prompts(count: int, length: int) -> Any:
    return [
        {"prompt_token_ids": [(37 * i + 11 * j) % 30_000 + 3 for j in range(length)]}
        for i in range(count)
    ]


def _kernels(llm: Any, batch: int, length: int, new: int) -> dict[str, float]:
    """Kernel -> its µs in all steps."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    llm.generate(_prompts(batch, length), sampling, use_tqdm=False)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        llm.generate(_prompts(batch, length), sampling, use_tqdm=False)
    kernels: dict[str, float] = {}
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            kernels[event.name] = kernels.get(event.name, 0.0) + event.device_time
    return kernels


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
