"""Workers of a Ray cluster receive every setting, the policy file and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nodes import LAYERS, NEW_TOKENS, job, node, serve

import envs
from vllm_fl.settings.loading import STARTUP
from vllm_fl.settings.schema import ITEMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OP = "silu_and_mul"
RMS_NORM = ["vendor", "reference"]
TABLE = f"""
holds: {{}}
devices:
- name: "*"
  op_backends:
    {OP}:
      eager: {{"<=16": impl:vendor.cpu, rest: impl:reference.torch}}
      measured: {{date: 2026-11-29, device: CPU, ratio: 1.1, what: this test}}
"""


def every_setting(folder: Path) -> dict[str, tuple[str, str, Any]]:
    """Setting of core or `node_watch` -> (its variable, its text, the parsed value)."""
    (folder / "table.yaml").write_text(TABLE)
    path = str(folder)
    modules, plugins = ["oot_cpu", "node_watch"], ["vllm-fl-reference", "vllm-fl-cpu"]
    return {
        "enabled": ("VLLM_FL_PREFER_ENABLED", "1", True),
        "platform": ("VLLM_FL_PLATFORM", "oot_cpu", "oot_cpu"),
        "prefer": ("VLLM_FL_PREFER", "reference", "reference"),
        "strict": ("VLLM_FL_STRICT", "1", True),
        "allow_vendors": ("VLLM_FL_ALLOW_VENDORS", "cpu", ["cpu"]),
        "deny_vendors": ("VLLM_FL_DENY_VENDORS", "absent", ["absent"]),
        "require": ("VLLM_FL_REQUIRE", "none", "none"),
        "table": ("VLLM_FL_TABLE", f"{path}/table.yaml", f"{path}/table.yaml"),
        "oot_enabled": ("VLLM_FL_OOT_ENABLED", "1", True),
        "oot_blacklist": ("VLLM_FL_OOT_BLACKLIST", "GeluAndMul", ["GeluAndMul"]),
        "preflight": ("VLLM_FL_PREFLIGHT", "run", "run"),
        "log_level": ("VLLM_FL_LOG_LEVEL", "WARNING", "WARNING"),
        "debug": ("VLLM_FL_DISPATCH_DEBUG", "1", True),
        "metrics": ("VLLM_FL_METRICS", f"{path}/metrics.prom", f"{path}/metrics.prom"),
        "shadow": ("VLLM_FL_SHADOW", "0.5", "0.5"),
        "keep_faults": ("VLLM_FL_KEEP_FAULTS", f"{path}/faults", f"{path}/faults"),
        "keep_faults_mb": ("VLLM_FL_KEEP_FAULTS_MB", "32", "32"),
        "plugins": ("VLLM_FL_PLUGINS", ",".join(plugins), plugins),
        "plugin_modules": ("VLLM_FL_PLUGIN_MODULES", ",".join(modules), modules),
        "flagcx_path": ("FLAGCX_PATH", path, path),
        "vendor_watch_folder": ("VLLM_FL_VENDOR_WATCH_FOLDER", path, path),
        "op_backends.rms_norm": ("VLLM_FL_PER_OP", "rms_norm=vendor|reference", RMS_NORM),
    }


@pytest.mark.parametrize("by", ["variables", "a policy file"])
def test_two_nodes_have_one_plan_and_all_settings_of_the_engine(
    by: str, tmp_path: Path, model: str, whole: envs.Env, stock: dict[str, Any]
) -> None:
    each = every_setting(tmp_path)
    variables = {variable: text for variable, text, _ in each.values()}
    meant = {key: value for key, (_, _, value) in each.items()}
    origins = {key: f"environment {variable}" for key, (variable, _, _) in each.items()}
    meant |= {"config": None, "oot_whitelist": None, "platform_files": []}
    meant |= {"count_calls": False, "lock": None}
    if by == "a policy file":
        file = tmp_path / "fl.yaml"
        lines = {key: value for key, value in meant.items() if key in ITEMS and ITEMS[key].in_file}
        del lines["oot_whitelist"]  # with a blacklist it is an error
        content = {
            **lines,
            "table": "table.yaml",
            "op_backends": {"rms_norm": ["vendor", "reference"]},
        }
        file.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in content.items()))
        for number, key in enumerate(lines, 1):
            del variables[each[key][0]]
            origins[key] = f"{file}:{number}"
        del variables["VLLM_FL_PER_OP"]
        origins["op_backends.rms_norm"] = f"{file}:{len(content)}"
        variables["VLLM_FL_CONFIG"] = meant["config"] = str(file)
        origins["config"] = "environment VLLM_FL_CONFIG"
    # vLLM sets the engine's variables in Ray's workers, except the ones in this file.
    (tmp_path / "ray_non_carry_over_env_vars.json").write_text(json.dumps(list(variables)))
    nodes = (node(whole, number) for number in (0, 1))
    ours = serve(job(model), *nodes, VLLM_CONFIG_ROOT=str(tmp_path), **variables)
    assert ours["tokens"] == stock["tokens"]

    startup = {spec.variable for spec in STARTUP.values()} | {each["enabled"][0]}
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert {worker["node"] for worker in seen} == {"0", "1"}
    for worker in seen:
        assert set(worker["variables"]) == startup & variables.keys()
        settings = worker["settings"]
        assert settings.keys() >= ITEMS.keys()
        assert {key: value for key, (value, _) in settings.items()} == meant
        assert {key: settings[key][1] for key in origins} == origins
        assert worker["table"] == meant["table"]

    first, second = ours["report"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["digest"] == second["digest"]
    assert first["ops"] == second["ops"]
    for rank in (first, second):
        assert rank["table"]["acts"], rank["table"]
        calls = rank["calls"]
        # A batch of one prompt, and then one of four prompts of 20 tokens together.
        assert calls[OP]["vendor.cpu"] == LAYERS * (1 + 2 * (NEW_TOKENS - 1))
        assert calls[OP].keys() == {"vendor.cpu", "reference.torch"}
        assert calls["rms_norm"].keys() == {"vendor.cpu"}
    assert "The ranks differ" not in ours["log"]
