"""Faults around an engine: vanished files, other plugins, half-uninstalled plugins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from engine_run import EngineFailed, Job, run
from engines import PLUGINS, Model, Runner, assert_same_bits, batches, difference

pytestmark = pytest.mark.slow

OWNER = "foreign_layer.ForeignSilu of foreign-layer 2.1"
LEFT = (
    f"layer SiluAndMul is replaced by {OWNER}; to use vllm-fl instead, set an order for "
    "silu_and_mul itself (VLLM_FL_PER_OP)"
)
GONE = "vanishing: the settings files are gone"


def foreign(folder: Path) -> str:
    """PYTHONPATH with another plugin that vLLM loads after vllm-fl."""
    site = folder / "site"
    info = site / "foreign_layer-2.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-layer\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nforeign = foreign_layer:register\n"
    )
    (info / "top_level.txt").write_text("foreign_layer\n")
    # vLLM loads in path order, starting with PYTHONPATH.
    first = folder / "start"
    first.mkdir()
    (first / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(site)!r})\n")
    return os.pathsep.join(map(str, (first, PLUGINS)))


def test_a_vanished_config_a_foreign_layer_and_half_a_plugin(
    engine: Runner, model: Model, tmp_path: Path
) -> None:
    """Three independent faults in one engine with forked processes."""
    config = tmp_path / "policy.yaml"
    config.write_text('op_backends: {rms_norm: reference, "group:activations": vendor:cpu}\n')
    path = foreign(tmp_path)
    half = tmp_path / "site" / "vllm_fl_half-3.0.dist-info"
    half.mkdir()
    (half / "entry_points.txt").write_text("[vllm_fl.plugin]\nhalf = vllm_fl_half\n")
    result = run(
        Job(str(model("qwen3")), batches()),
        PYTHONPATH=path,
        VLLM_FL_PLUGIN_MODULES="vanishing",
        VLLM_FL_CONFIG=str(config),
        VANISHING=str(config),
    )
    log, (report,) = result["log"], result["report"]
    # The settings are those read at startup.
    assert GONE in log and not config.exists()
    assert report["ops"]["rms_norm"]["impl"] == "reference.torch"
    # The other plugin's layer wins although it was registered last, and its owner is reported.
    assert "foreign: in the order ['fl', 'foreign']" in log
    assert report["ops"]["silu_and_mul"] == {"impl": "foreign", "reason": LEFT}
    # Two layers, twice: vLLM first builds the model without memory.
    assert log.count("foreign: ForeignSilu serves") == 2 * 2
    assert "silu_and_mul=foreign" in log
    # Each process that loads plugins rejects the half plugin with the same words.
    lines = [line for line in log.splitlines() if "vllm_fl_half-3.0.dist-info has no" in line]
    (refused,) = {line.partition("[vllm_fl.plugins] ")[2] for line in lines}
    assert refused.startswith("Plugin 'half' of vllm-fl-half 3.0")
    assert difference(engine("qwen3", "stock-native"), result) <= 0.05  # as for any correct plan


def test_vanished_files_of_a_plugin_and_of_the_user_where_processes_are_spawned(
    engine: Runner, model: Model, tmp_path: Path
) -> None:
    """A spawned process reads the settings again; with the files gone, the engine's apply."""
    shipped, orders = tmp_path / "shipped.yaml", tmp_path / "orders.json"
    shipped.write_text("oot_blacklist: [SiluAndMul]\n")
    orders.write_text(json.dumps({"rms_norm": "reference", "rotary_embedding": "reference"}))
    result = run(
        Job(str(model("qwen3")), batches()),
        PYTHONPATH=str(PLUGINS),
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_FL_PLUGIN_MODULES="vanishing",
        VLLM_FL_OP_CONFIG=str(orders),
        VANISHING_SHIPPED=str(shipped),
        VANISHING=f"{shipped},{orders}",
    )
    assert GONE in result["log"] and not shipped.exists() and not orders.exists()
    ops = result["report"][0]["ops"]
    assert ops["rms_norm"]["impl"] == ops["rotary_embedding"]["impl"] == "reference.torch"
    assert ops["silu_and_mul"] == {"impl": "stock", "reason": "oot_blacklist lists SiluAndMul"}
    assert_same_bits(engine("qwen3", "stock-native"), result)


def test_a_file_that_was_never_there_ends_the_start(model: Model, tmp_path: Path) -> None:
    with pytest.raises(EngineFailed) as failure:
        run(Job(str(model("qwen3")), batches()), VLLM_FL_CONFIG=str(tmp_path / "absent.yaml"))
    said = [line for line in failure.value.log.splitlines() if "MissingFileError: " in line]
    assert len(said) == 1 and "absent.yaml' does not exist" in said[0]
