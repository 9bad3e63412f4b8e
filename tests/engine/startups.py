"""The engines of the default run: five startups that all its engine tests share.

| name | engine | what it shows |
|---|---|---|
| stock | vLLM without vllm-fl, eager | the baseline of the others |
| eager | a plugin's code in each kind of target of eager mode | near stock, really called |
| compiled | a plugin's device, graphs compiled by range of tokens | passes, near transformers |
| ranks | two ranks, kernel and communicator wrong on rank 1 | disabled on both; a fallback |
| faulty | wrong kernels, detected at different moments | disabled by name, then stock bit for bit |

Every other test that starts an engine is marked `slow`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import STOCK, Job
from engines import IN_ONE_PROCESS, PLUGINS, REFERENCE, Model, Once, Result, batches, change

__all__ = ["CAUSES", "FUSED", "OWN", "VENDOR_SHARE", "Startup", "shared", "startup"]

VENDOR_SHARE = 0.1
"""Largest relative difference of logits between two correct plans: see test_models."""

SIZES: dict[str, Any] = {"num_experts_per_tok": 8, "mlp_only_layers": [0]}
"""One dense block and one of experts that every token uses. If tokens used only some experts, a
score that differs in its last bit would select another expert and change the logits."""

DEBUG = {"VLLM_FL_DISPATCH_DEBUG": "1"}
DEVICE = PLUGINS.parents[1] / "plugins" / "fl-bare-cpu" / "src"

OWN = {"RowParallelLinear": 3, "QKVParallelLinear": 2, "VocabParallelEmbedding": 1}
"""Layers of the model that the plugin `own_layers` replaces -> their number."""

FUSED = {"linear": 6, "linear_silu_and_mul": 2}
"""Op that passes insert into graphs -> its count in the dense model."""

NOT_STOCK_BIT_FOR_BIT = ("fused_experts", "moe_topk")
"""Ops with a correct reference that rounds differently from vLLM: see test_models.LEFT."""

CAUSES = {
    "silu_and_mul": "bfloat16",
    "gelu_and_mul": "no kernel image is available",
    "rms_norm": "exceed the tolerance",
    "rotary_embedding": "elements exceed the tolerance",
}
"""Op of plugins/faulty.py -> text in the reported cause."""

Startup = Callable[[str], Result]
Jobs = dict[str, tuple[Job, dict[str, str]]]


def modules(*names: str) -> dict[str, str]:
    """The variables that load these plugins."""
    path = f"{PLUGINS}:{DEVICE}"
    return {"VLLM_FL_PLUGIN_MODULES": ",".join(names), "PYTHONPATH": path}


def per_op(**orders: str) -> dict[str, str]:
    return {"VLLM_FL_PER_OP": ";".join(f"{op}={order}" for op, order in orders.items())}


def startups(model: Path, other: Path, dense: Path, folder: Path) -> Jobs:
    """Name -> (the engine's job, its variables). `model` and `other` differ in weights; `dense`
    has no experts, which vLLM supports only on devices that it knows; engines write files to
    `folder`."""
    vendor = "vendor:cpu|reference"
    native = {"compilation_config": {"custom_ops": ["none"]}}
    updates: list[list[Any]] = [
        ["reload_weights", {}, True],
        ["reload_weights", {"weights_path": str(other)}, True],
    ]
    return {
        "stock": (Job(str(model), batches(), options=native), {**IN_ONE_PROCESS, **STOCK}),
        "eager": (
            Job(str(model), batches()),
            {
                **IN_ONE_PROCESS,
                **DEBUG,
                **modules("own_layers", "counting_attention", "broken_import"),
                **per_op(
                    **dict.fromkeys(("rms_norm", "rotary_embedding", "silu_and_mul"), vendor),
                    **dict.fromkeys(NOT_STOCK_BIT_FOR_BIT, "reference"),
                ),
                "COUNTING_FILE": str(folder / "uses"),
            },
        ),
        "compiled": (
            Job(str(dense), batches(), eager=False, options={"dtype": "float32"}),
            {
                **IN_ONE_PROCESS,
                **DEBUG,
                **REFERENCE,
                **modules("fl_bare_cpu", "one_kernel", "read_operators"),
                **per_op(
                    **dict.fromkeys(("linear", "linear_silu_and_mul"), "vendor:one"),
                    silu_and_mul="stock",
                ),
                "VLLM_FL_PLATFORM": "bare_cpu",
            },
        ),
        "ranks": (
            Job(str(model), batches(), options={"tensor_parallel_size": 2}),
            {
                **DEBUG,
                **modules("rank_one", "communicators", "late_refusal"),
                **per_op(
                    silu_and_mul="vendor:rankone|reference",
                    rms_norm="vendor:late|reference",
                    communicator="vendor:wrong|vendor:counting|stock",
                ),
                "RANK_ONE": "wrong",
                "VLLM_FL_KEEP_FAULTS": str(folder / "ranks"),
                "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            },
        ),
        "faulty": (
            Job(str(model), batches(), updates=updates),
            {
                **DEBUG,
                **REFERENCE,
                **modules("faulty", "live_only", "after_start"),
                **per_op(
                    **dict.fromkeys(NOT_STOCK_BIT_FOR_BIT, "stock"),
                    **{
                        **dict.fromkeys(CAUSES, "vendor:faulty|reference"),
                        "silu_and_mul": "vendor:faulty|vendor:liveonly|vendor:afterstart|reference",
                        "rms_norm": "vendor:faulty|vendor:afterstart|reference",
                    },
                ),
                "VLLM_FL_METRICS": str(folder / "chat.prom"),
                "VLLM_FL_KEEP_FAULTS": str(folder / "faults"),
            },
        ),
    }


@pytest.fixture(scope="session")
def shared(shared_folder: Path) -> Path:
    """Folder for the files that the shared engines write."""
    folder = shared_folder / "startups"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def startup(
    once: Once, shared: Path, model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Startup:
    """`startup(name)`: the result of one of `startups`, which runs once per test run."""

    @cache
    def jobs() -> Jobs:
        mixed = tiny_model.make(tmp_path_factory.mktemp("mixed"), "qwen3_moe", **SIZES)
        other = mixed.with_name("other")
        shutil.copytree(mixed, other)
        change(other)
        return startups(mixed, other, model("qwen3"), shared)

    def run(name: str) -> Result:
        job, variables = jobs()[name]
        return once(f"startup-{name}", job, timeout=400, **variables)

    return cache(run)
