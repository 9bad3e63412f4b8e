"""Engines on the platform plugins of vendors: distributions of tests/plugins that count calls."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from engine_run import BIND, STOCK, Job
from engines import Once, Result

import envs

ALONE = {
    "acme": {**STOCK, "VLLM_PLUGINS": "acme,acme_patches"},
    "forge": {**STOCK, "VLLM_PLUGINS": "forge,forge_out_of_tree"},
}
"""Plugin -> the variables under which vLLM loads nothing of vllm-fl."""

LAYERS = {
    "acme": {
        *("RMSNorm", "SiluAndMul", "RotaryEmbedding"),
        *("RowParallelLinear", "VocabParallelEmbedding"),
    },
    "forge": {
        *("RMSNorm", "SiluAndMul", "RotaryEmbedding"),
        *("QKVParallelLinear", "VocabParallelEmbedding"),
    },
}
"""Plugin -> what it registers."""

TELLING: dict[str, dict[str, Any]] = {
    "acme": {},  # its worker tells
    "forge": {"worker_extension_cls": "fl_platform_forge.counting.Telling"},
}


def installed(plugin: str, folder: Path) -> str:
    """`folder`, in which the plugin's distribution lies now, for PYTHONPATH."""
    with zipfile.ZipFile(envs.wheel(envs.PLUGINS / f"fl-platform-{plugin}")) as wheel:
        wheel.extractall(folder)
    return str(folder)


def start(
    once: Once,
    plugin: str,
    how: str,
    model: Path,
    *,
    eager: bool = True,
    ranks: int = 1,
    dtype: str = "float32",
    logits: bool = True,
    **variables: str,
) -> Result:
    """The run of an engine on a vendor's platform; its batches run twice.

    Returns:
        What `engine_run.run` does, with `served`: for each rank, how often who was called while
        the batches ran the second time.
    """
    prompts = [[(11 * i + 5 * j) % 500 + 3 for j in range(9 + 3 * i)] for i in range(5)]
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": 512, **TELLING[plugin]}
    if ranks > 1:
        options["tensor_parallel_size"] = ranks
        variables = {BIND: "0|1", **variables}
    updates = [["calls", {}, True], ["calls", {}, False]]
    job = Job(str(model), [prompts[:1], prompts[1:]], eager=eager, options=options, updates=updates)
    name = f"{plugin}-{model.name}-{how}-{'eager' if eager else 'compiled'}-{ranks}"
    told = once(name, job, timeout=400, VLLM_FL_DISPATCH_DEBUG="1", **variables)
    first, second = (update["answers"] for update in told["updates"])
    ranked = zip(first, second, strict=True)
    return {**told, "served": [_less(calls, before) for before, calls in ranked]}


def _less(calls: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: calls[name] - before.get(name, 0) for name in calls}


def assert_untouched(alone: Result, beside: Result) -> None:
    """The same tokens and logits, the same calls, and nothing planned but what the vendor has."""
    assert beside["tokens"] == alone["tokens"] and beside["logits"] == alone["logits"]
    assert beside["steps"] == alone["steps"]
    assert beside["served"] == alone["served"]
    for report in beside["report"]:
        impls = {told["impl"] for told in report["ops"].values()}
        assert all(impl.startswith(("foreign", "stock")) for impl in impls), report["ops"]
        assert report["demotions"] == report["fallbacks"] == {}
