"""A plugin's classes for whole vLLM layers: selected, run, unused and rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layer_table
import pytest
from engine_run import Job
from engines import IN_ONE_PROCESS, Model, Plugin, answer_of, assert_same_bits, batches, run

Runner = Callable[..., dict[str, Any]]

IN_QWEN3 = {"RowParallelLinear": 4, "QKVParallelLinear": 2, "VocabParallelEmbedding": 1}
"""Number of these layers in the tiny model, which has two blocks."""

ALL_STOCK = {
    "VLLM_FL_PER_OP": ";".join(f"{layer}=stock" for layer in IN_QWEN3),
    "OWN_SCALE": "2",  # doubles the classes' results, which shows that they run
}


@pytest.fixture
def serve(model: Model, plugin: Plugin) -> Runner:
    """`serve(eager, VARIABLE=…)`: an engine with the plugin `own_layers`."""

    def start(
        eager: bool = True, options: Any = None, logits: bool = True, **variables: str
    ) -> dict[str, Any]:
        options = options or {}
        job = Job(str(model("qwen3")), batches(), eager=eager, options=options, logits=logits)
        more = {"VLLM_FL_DISPATCH_DEBUG": "1", **IN_ONE_PROCESS, **plugin("own_layers")}
        result = run(job, **{**more, **variables})
        (result["report"],) = result["report"]
        return result

    return start


def impls(result: dict[str, Any]) -> dict[str, str]:
    return {layer: result["report"]["ops"][layer]["impl"] for layer in IN_QWEN3}


def assert_they_serve(ours: dict[str, Any]) -> None:
    report = ours["report"]
    assert impls(ours) == dict.fromkeys(IN_QWEN3, "vendor.own")
    assert report["layers"] == IN_QWEN3
    for layer, number in IN_QWEN3.items():
        assert report["calls"][layer]["vendor.own"] > 0, layer
        assert f"Layer {layer}: {number} in this model, by 'vendor.own'" in ours["log"]
    assert "RowParallelLinear=vendor.own" in ours["log"]
    assert "whole layers, not verified: QKVParallelLinear RowParallelLinear" in ours["log"]
    assert report["fallbacks"] == report["demotions"] == {}


@pytest.mark.slow
def test_they_serve_and_the_lists_leave_layers_alone(serve: Runner) -> None:
    ours = serve()
    assert_they_serve(ours)

    left = serve(VLLM_FL_OOT_BLACKLIST="RowParallelLinear,column_parallel_linear", OWN_SCALE="2")
    assert impls(left) == {
        "RowParallelLinear": "stock",
        "QKVParallelLinear": "stock",  # it has the registered name of its base
        "VocabParallelEmbedding": "vendor.own",
    }
    assert left["report"]["ops"]["RowParallelLinear"]["reason"] == (
        "oot_blacklist lists RowParallelLinear"
    )
    assert left["tokens"] != ours["tokens"], "what OWN_SCALE doubles does not serve"

    none = serve(VLLM_FL_OOT_ENABLED="0", VLLM_FL_OOT_BLACKLIST="", OWN_SCALE="2")
    assert impls(none) == dict.fromkeys(IN_QWEN3, "stock")
    assert none["report"]["layers"] == {}

    stock = serve(**ALL_STOCK)
    assert impls(stock) == dict.fromkeys(IN_QWEN3, "stock")
    assert len({r["report"]["digest"] for r in (ours, left, stock)}) == 3
    assert_same_bits(stock, ours)


@pytest.mark.slow
def test_they_serve_in_a_compiled_engine(serve: Runner) -> None:
    ours, stock = serve(False), serve(False, **ALL_STOCK)
    assert_they_serve(ours)
    assert impls(stock) == dict.fromkeys(IN_QWEN3, "stock")
    assert_same_bits(stock, ours)


@pytest.mark.slow
def test_loras_checks_of_classes_find_them(serve: Runner) -> None:
    # vLLM's CPU kernels for LoRA fail if a prompt's logits are requested.
    result = serve(options={"enable_lora": True, "max_lora_rank": 8}, logits=False)
    assert result["report"]["layers"] == IN_QWEN3
    for layer, number in IN_QWEN3.items():
        assert f"Layer {layer}: LoRA wraps {number} of them" in result["log"]


LAYERS = """
import importlib, json, sys
from importlib.util import find_spec
from pathlib import Path
from vllm.model_executor import custom_op
from vllm_fl.integration.patchers.layers import layer_table

elsewhere = []
for layer in json.loads(Path(sys.argv[1]).read_text())["layers"]:
    try:
        importlib.import_module("vllm." + layer["module"])
    except Exception:  # kernels for other hardware
        elsewhere.append(layer["module"])
print(json.dumps({
    "elsewhere": elsewhere,
    "registry": {name: cls.__name__ for name, cls in custom_op.op_registry.items()},
    "root": list(find_spec("vllm").submodule_search_locations)[0],
    "reached": {layer.cls: layer.op for layer in layer_table()},
    "paths": [f"{layer.base.__module__}.{layer.cls}" for layer in layer_table()],
}))
"""


@pytest.mark.oldest
@pytest.mark.slow
def test_the_page_of_all_layers_is_what_this_vllm_registers() -> None:
    from vllm_fl.integration.compat import vllm_version

    data = layer_table.DATA / f"{vllm_version()}.json"
    if not data.exists():
        pytest.skip(f"docs/layers has no {data.name}")
    documented = json.loads(data.read_text())["layers"]
    found, _ = answer_of(LAYERS, data)
    assert layer_table.layers_of(Path(found["root"])) == documented
    known = {(layer["registered"], layer["cls"]) for layer in documented}
    assert set(found["registry"].items()) <= known, "the source does not tell all of them"
    assert len(found["registry"]) > 50
    absent = {layer["cls"] for layer in documented if layer["module"] in found["elsewhere"]}
    here = [layer for layer in documented if layer["cls"] not in absent]
    # Bindings also list layers of other releases, which this table lacks.
    names = {name for layer in here for name in (layer["cls"], *layer["subclasses"])}
    wanted = {cls: op for cls, op in layer_table.reached().items() if cls in names}
    assert wanted and wanted.items() <= found["reached"].items()
    for layer in here:
        reached = {found["reached"].get(cls) for cls in (layer["cls"], *layer["subclasses"])}
        is_reached = reached != {None}
        if layer["module"].startswith(layer_table.SECOND_TABLE):
            is_reached = f"vllm.{layer['module']}.{layer['cls']}" in found["paths"]
        assert ("op `" in layer_table.reach(layer)) == is_reached, layer
