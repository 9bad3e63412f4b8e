"""Engines with quantised tiny models: chosen classes serve, and faulty ones are replaced."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from engine_run import BIND, Job
from engines import (
    IN_ONE_PROCESS,
    PLUGINS,
    Model,
    assert_same_bits,
    batches,
    difference,
    path_of,
    run,
)
from quantised_layers import FAULTS

pytestmark = pytest.mark.slow

FAULTY = {
    "VLLM_FL_PLUGIN_MODULES": "faulty_linear",
    **path_of(PLUGINS, Path(__file__).parents[2] / "tools"),
}


@pytest.fixture
def serve(model: Model, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`serve(form, order, VARIABLE=…)`: an engine with this order for the layers, which are experts
    for the family `qwen3_moe`."""

    def start(
        form: str, order: str, options: Any = None, family: str = "qwen3", **variables: str
    ) -> dict[str, Any]:
        folder = tmp_path / f"{family}-{form}"
        if not folder.exists():
            checkpoints.quantised(model(family), folder, form)
        op = "int8_linear" if form == checkpoints.INT8 else "wna16_linear"
        op = "int8_experts" if family == "qwen3_moe" else op
        more = {"VLLM_FL_PER_OP": f"default=stock;{op}={order}", "VLLM_CPU_INT4_W4A8": "0"}
        more |= {} if options else IN_ONE_PROCESS
        result = run(Job(str(folder), batches(), options=options or {}), **{**more, **variables})
        result["rows"] = [
            next(row for row in report["kernels"] if row["op"] == op) for report in result["report"]
        ]
        result["demotions"] = [report["demotions"].get(op) for report in result["report"]]
        return result

    return start


@pytest.mark.parametrize(
    ("form", "cls"),
    [
        (checkpoints.INT8, "Int8Linear"),
        (checkpoints.INT4, "WNA16Linear"),
        (checkpoints.INT4_ZEROS, "WNA16Linear"),
    ],
)
def test_the_examples_classes_serve_nearly_like_vllms(
    serve: Callable[..., dict[str, Any]], form: str, cls: str
) -> None:
    ours, stock = serve(form, "vendor:cpu|stock"), serve(form, "stock")
    (row,) = ours["rows"]
    assert (row["class"], row["impl"], row["layers"]) == (cls, "vendor.cpu", 8)
    assert stock["rows"][0]["impl"] == "stock.vllm" and stock["rows"][0]["layers"] == 8
    assert 0 < difference(ours, stock) < 0.1


@pytest.mark.parametrize(("form", "ranks"), [(checkpoints.INT8, 1), (checkpoints.INT4, 2)])
def test_a_fault_that_only_loaded_layers_show_falls_back_to_vllms_class(
    serve: Callable[..., dict[str, Any]], form: str, ranks: int
) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw = random.Random(seed)
    planted = [form, draw.randrange(len(FAULTS[form])), seed, draw.randrange(ranks)]
    options = {"tensor_parallel_size": ranks} if ranks > 1 else None
    bind = {BIND: "0|1"} if ranks > 1 else {}
    variables = {**FAULTY, **bind, "PLANTED": json.dumps(planted)}
    ours = serve(form, "vendor:faulty|stock", options, **variables)
    stock = serve(form, "stock", options, **bind)
    assert_same_bits(stock, ours)
    assert ours["rows"] == stock["rows"]
    for found in ours["demotions"]:
        why = found["vendor.faulty"]
        assert f"failed at startup on rank {planted[-1]}: in 4 of 8 layers, such as model." in why
    assert "[FL410]" in ours["log"]


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's int8 experts for CPUs require AMX"
)
def test_faulty_experts_fall_back_to_vllms_class(serve: Callable[..., dict[str, Any]]) -> None:
    variables = {**FAULTY, "PLANTED": json.dumps([checkpoints.INT8, 0, 0, 0])}
    ours = serve(checkpoints.INT8, "vendor:faulty|stock", family="qwen3_moe", **variables)
    stock = serve(checkpoints.INT8, "stock", family="qwen3_moe")
    assert_same_bits(stock, ours)
    assert ours["rows"] == stock["rows"] and ours["rows"][0]["class"] == "CPUExpertsInt8"
    (found,) = ours["demotions"]
    assert ": in 2 of 2 layers, such as model." in found["vendor.faulty"]
