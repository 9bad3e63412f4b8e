"""`vllm-fl verify --stock` on tiny models: findings of stock vLLM, and faults planted in it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from engines import Model, command, path_of

pytestmark = pytest.mark.slow

PLANTING = """
import json, os
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel as Kernel

def plant():
    row, group, number = json.loads(os.environ["PLANTED"])
    own, seen = Kernel.process_weights_after_loading, []

    def convert(self, layer):
        if len(seen) == number:
            layer.weight_scale.data[row, group] *= 1.05
        seen.append(layer)
        own(self, layer)

    Kernel.process_weights_after_loading = convert
"""


def verified(model: Path, *arguments: str, **variables: str) -> tuple[int, list[dict[str, Any]]]:
    """(exit status, rows)"""
    words = ("verify", "--stock", "--json", "--model", model, "--max-model-len", "256")
    done = command(*words, *arguments, HF_HUB_OFFLINE="1", **variables)
    assert done.stdout.startswith("{"), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)["stock"]["rows"]


def test_a_mixture_of_experts_has_no_finding(model: Model) -> None:
    status, rows = verified(model("qwen3_moe"), "--enforce-eager")
    assert status == 0, [row for row in rows if row["incorrect"]]
    kinds = {row["kind"] for row in rows if row["calls"]}
    assert kinds >= {"QKVParallelLinear", "RoutedExperts", "RMSNorm", "LogitsProcessor"}


def test_a_planted_fault_is_named_by_layer_and_class(model: Model, tmp_path: Path) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw = random.Random(seed)
    folder = checkpoints.quantised(model("qwen3"), tmp_path / "int4", checkpoints.INT4)
    info = tmp_path / "site" / "planting-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nplanting = planting:plant\n")
    (info.parent / "planting.py").write_text(PLANTING)
    number = draw.randrange(8)  # of two layers with four projections each
    planted = [draw.randrange(256), draw.randrange(4), number]
    status, rows = verified(folder, PLANTED=json.dumps(planted), **path_of(info.parent))
    assert status == 1
    (found,) = [row for row in rows if row["incorrect"]]
    assert (found["class"], found["incorrect"]) == ("CPUWNA16LinearKernel", 1)
    assert f"layers.{number // 4}." in found["problems"][0]
    assert {row["class"] for row in rows if row["kind"] == "steps"} == {"compiled"}


def test_int8_after_weights_are_loaded_again_is_a_finding(model: Model, tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU: oneDNN keeps pointers to scales that the update frees.

    Activations are asymmetric, because processors with AMX have another kernel for symmetric ones.
    With these, rows of equal numbers are another finding.
    """
    folder = checkpoints.quantised(
        model("qwen3"), tmp_path / "int8", checkpoints.INT8, symmetric=False
    )
    status, rows = verified(folder, "--enforce-eager", "--thorough")
    assert status == 1
    wrong = [row for row in rows if row["incorrect"]]
    assert {row["class"] for row in wrong} == {"CPUInt8ScaledMMLinearKernel"}
    reloaded = [row for row in rows if row["against"] == "weights loaded again"]
    assert [row["incorrect"] for row in reloaded] == [2, 4, 2, 0]
    equal = [each for row in wrong if row not in reloaded for each in row["problems"]]
    assert all("rows of equal numbers" in each for each in equal)
