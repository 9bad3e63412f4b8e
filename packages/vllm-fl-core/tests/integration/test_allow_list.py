"""VLLM_FL_PLUGINS applies in a worker without the variable, by the engine's configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

SOURCE = """
import os
from vllm_fl import hookimpl
with open(os.environ["TRACE"], "a") as trace:
    trace.write("{name}\\n")

@hookimpl
def register_ops():
    return []
"""
WORKER = """
import json, os
from types import SimpleNamespace
from vllm_fl.settings.loading import load_settings
from vllm_fl.integration.entry import general_plugin
from vllm_fl.integration.carried import KEY, Carried
from vllm_fl.integration.planning import load_plugins
from vllm_fl.errors import VllmFLError

env = json.loads(os.environ["ENGINE"])
carried = Carried(load_settings(env, platform="cpu"))
engine = SimpleNamespace(additional_config={KEY: carried if env is not None else {}})
trace = lambda: open(os.environ["TRACE"]).read().split()
output = {"error": None}
general_plugin()
output["before"] = trace()
if os.environ.get("EARLY"):
    from vllm_fl.dispatch import get_default_manager
    get_default_manager().ensure_initialized()
try:
    load_plugins(engine)
except VllmFLError as error:
    output["error"] = str(error)
output["after"] = trace()
print(json.dumps(output))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with two plugins that record their names on import."""
    for name in ("aaa", "bbb"):
        (tmp_path / f"trace_{name}.py").write_text(SOURCE.replace("{name}", name))
        info = tmp_path / f"fl_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fl-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[vllm_fl.plugin]\n{name} = trace_{name}\n")
    (tmp_path / "trace").touch()
    return tmp_path


def worker(site: Path, engine: dict[str, str], **variables: str) -> dict[str, object]:
    """The imports of a process with these variables, for an engine started with `engine`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    path = os.pathsep.join(filter(None, (str(site), kept.get("PYTHONPATH"))))
    ours = {"PYTHONPATH": path, "TRACE": str(site / "trace"), "ENGINE": json.dumps(engine)}
    done = forked.run(WORKER, env={**kept, **ours, **variables})
    assert done.returncode == 0, done.stderr
    output: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return output


def test_a_worker_imports_what_its_engine_allows_and_nothing_before_it_knows(site: Path) -> None:
    output = worker(site, {"VLLM_FL_PLUGINS": "fl-bbb"})
    assert output == {"error": None, "before": [], "after": ["bbb"]}


def test_what_was_loaded_by_another_list_ends_the_start_by_name(site: Path) -> None:
    output = worker(site, {"VLLM_FL_PLUGINS": "fl-bbb"}, VLLM_FL_PLUGINS="fl-aaa", EARLY="1")
    assert output["after"] == ["aaa"]
    for word in ("VLLM_FL_PLUGINS", "fl-aaa", "fl-bbb"):
        assert word in str(output["error"])
