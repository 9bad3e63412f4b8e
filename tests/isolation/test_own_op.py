"""A distribution made of the code blocks of docs/new-op.md: its op is a full op, used in vLLM. A
second distribution provides an incorrect implementation of that op."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_run import Job, largest_difference

import envs
from installed import Install, Installed

pytestmark = pytest.mark.slow

OP = "softcap_and_mul"

WRONG = """
from vllm_fl import BackendImplKind, OpImpl, hookimpl

def forgets_the_cap(x, cap):
    gate, up = x.chunk(2, dim=-1)
    return gate * up

@hookimpl
def register_ops():
    kind = BackendImplKind.VENDOR
    return [OpImpl("softcap_and_mul", "vendor.wrong", kind, forgets_the_cap, "wrong")]
"""

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_FL_DISPATCH_DEBUG": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution that the page builds, and a module with an incorrect implementation."""
    root = tmp_path_factory.mktemp("acme-softcap")
    page = (envs.ROOT / "docs" / "new-op.md").read_text()
    files = re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", page, re.M | re.S)
    assert len(files) == 10
    for name, content in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    (root / "wrong").mkdir()
    (root / "wrong" / "wrong_softcap.py").write_text(WRONG)
    return root


@pytest.fixture(scope="module")
def installed(install: Install, folder: Path) -> Installed:
    return install(str(folder), "vllm-fl-reference", engine=True)


@pytest.fixture(scope="module")
def wrong(folder: Path) -> dict[str, str]:
    """The variables that also load the incorrect implementation."""
    return {"VLLM_FL_PLUGIN_MODULES": "wrong_softcap", "PYTHONPATH": str(folder / "wrong")}


@pytest.fixture(scope="module")
def serve(
    installed: Installed, wrong: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], dict[str, Any]]:
    """`serve(order, eager)`: an engine with a model that has the op, under this order for it."""
    model = installed.model(tmp_path_factory.mktemp("model"))
    file = Path(model, "config.json")
    config = {**json.loads(file.read_text()), "architectures": ["SoftcapForCausalLM"]}
    file.write_text(json.dumps(config))

    @cache
    def served(order: str, eager: bool) -> dict[str, Any]:
        job = Job(model, [[[7, 11, 13, 17, 19]]], eager=eager)
        return installed.serve(job, **ONE_PROCESS, **wrong, VLLM_FL_PER_OP=f"{OP}={order}")

    return served


def test_its_op_is_listed_explained_and_verified_like_others(
    installed: Installed, wrong: dict[str, str]
) -> None:
    plugin = installed.plugins()["acme-softcap"]
    assert plugin["hooks"] == ["contracts", "register_ops"] and plugin["status"] == "ok"
    assert len(installed.ops()[OP]["candidates"]) == 2
    explained = installed.command("explain", OP)
    assert "cap: float" in explained.stdout and "x[..., d:]" in explained.stdout
    assert "other models, which do not have this layer" in explained.stdout
    assert "no contract" not in explained.stdout
    asked = ("--op", OP, "--device", "cpu", "--json")
    results = json.loads(installed.command("verify", *asked, **wrong).stdout)["results"]
    found = {(r["impl_id"], r["dtype"]): r for r in results}
    assert len(found) == 9
    for (impl_id, _), result in found.items():
        assert bool(result["samples"]["wrong"]) is (impl_id == "vendor.wrong")
        assert not result["samples"]["raised"]


def test_the_kit_judges_it(installed: Installed, folder: Path, wrong: dict[str, str]) -> None:
    done = installed.kit(folder / "tests")
    assert done.returncode == 0, done.stdout
    bad = folder / "wrong" / "test_wrong.py"
    bad.write_text((folder / "tests" / "test_conformance.py").read_text().replace("acme", "wrong"))
    done = installed.kit("-x", bad, **wrong)
    assert done.returncode == 1 and OP in done.stdout


@pytest.mark.parametrize(
    ("impl", "eager"), [("vendor.acme", False), ("vendor.acme", True), ("acme.torch", False)]
)
def test_a_model_that_has_it_runs_with_it(serve: Any, impl: str, eager: bool) -> None:
    found = serve(f"impl:{impl}|vendor:wrong", eager)
    (report,) = found["report"]
    assert report["mode"] == ("eager" if eager else "compiled")
    assert report["ops"][OP] == {"impl": impl, "reason": f"your order lists impl:{impl}"}
    assert report["calls"][OP][impl] > 0
    # The incorrect implementation is last in the order; it is detected before the model is built.
    assert "it is incorrect" in report["demotions"][OP]["vendor.wrong"]
    (line,) = [line for line in found["log"].splitlines() if " planned: " in line]
    assert report["digest"] in line
    stock = serve("stock", True)  # for both modes: compiling does not change stock's results
    (said,) = stock["report"]
    assert said["ops"][OP]["impl"] == "stock" and said["digest"] != report["digest"]
    worst, magnitude = largest_difference(stock, found)
    assert worst <= 0.05 * magnitude


def test_the_pages_own_script_serves_it_and_counts_its_calls(
    installed: Installed, folder: Path
) -> None:
    variables = {"VLLM_FL_PER_OP": f"{OP}=vendor|reference", "VLLM_FL_DISPATCH_DEBUG": "1"}
    done = installed.env.run("serve.py", check=False, cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    assert "{'impl': 'vendor.acme', 'reason': 'your order lists vendor'}" in done.stdout
    assert re.search(rf"{{'{OP}': {{'vendor.acme': [1-9]", done.stdout)
