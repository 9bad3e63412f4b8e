"""Mixtures of experts: the kernel inside vLLM's experts, and experts that a plan replaces whole.

The kernel inside: Qwen3-30B-A3B's shapes with dummy weights, fewer layers. vLLM's experts call
`_C::silu_and_mul` directly, no layer is there. PyTorch's profiler says which kernels ran in the
steps that replay a graph.

Whole experts: a tiny model whose tokens take all of them, so that no last bit chooses another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import OPTIONS, batches, close, side_by_side
from engine_run import STOCK, EngineFailed, Job, run

__all__ = ["cases"]

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}

VARIANTS = {
    "stock": {"VLLM_PLUGINS": ""},
    "flagos": {
        "VLLM_FL_PER_OP": "silu_and_mul=flagos;rms_norm=stock;rotary_embedding=stock;"
        "gelu_and_mul=stock;attention_backend=stock",
    },
}

STOCKS, FLAGGEMS = "act_and_mul_kernel", "silu_and_mul"
"""What the names of the two kernels contain; vLLM's is a template, FlagGems's a Triton function."""

NEW_TOKENS = 8

WHOLE = ("default.flagos", "reference.torch")
"""Implementations of `fused_experts` that a CUDA engine can run in the place of vLLM's."""


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(mode, what is wrong or empty)."""
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
    yield from _whole_experts(folder)


def _whole_experts(folder: Path) -> Iterator[tuple[str, str]]:
    model = str(tiny_model.make(folder, "qwen3_moe", num_experts_per_tok=8))
    with side_by_side() as pool:
        started = {}
        for eager in (True, False):
            job = Job(model, batches(5, 33, 100), eager=eager, options=OPTIONS)
            stock = pool.submit(run, job, **STOCK)
            for impl in WHOLE:
                only = {"VLLM_FL_PER_OP": f"fused_experts={impl}", "VLLM_FL_DISPATCH_DEBUG": "1"}
                mode = "eager" if eager else "compiled"
                started[impl, mode] = stock, pool.submit(run, job, **only)
        for (impl, mode), (stock, mine) in started.items():
            try:
                problem = _replaces(impl, stock.result(), mine.result())
            except EngineFailed as error:
                problem = f"the engine failed: {error.log[-3000:]}"
            yield f"fused_experts={impl}, {mode}", problem


def _replaces(impl: str, stock: dict[str, Any], mine: dict[str, Any]) -> str:
    """Empty when that implementation was called, none stood in for it, and logits are stock's."""
    report = mine["report"][0]
    if report["ops"]["fused_experts"]["impl"] != impl or report["demotions"]:
        return f"planned {report['ops']['fused_experts']}, demotions {report['demotions']}"
    calls = report["calls"].get("fused_experts", {})
    if not calls.get(impl) or report["fallbacks"].get("fused_experts"):
        return f"calls {calls}, fallbacks {report['fallbacks']}"
    return close(stock, mine)


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
    # bf16 has 8 bits, and a token near a tie goes to another expert; four layers.
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
