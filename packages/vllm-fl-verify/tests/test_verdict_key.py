"""The key of a kept verdict: each part changes it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import silu

from vllm_fl.contracts import ModelSizes
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.integration.engines import Engine
from vllm_fl.settings.loading import load_settings
from vllm_fl_verify import verdict_key
from vllm_fl_verify.trials import Request, Role
from vllm_fl_verify.verdict_key import PARTS, verdict_parts

Patch = pytest.MonkeyPatch
Change = Callable[[Engine, Patch, Path], object]
SIZES = ModelSizes(256, 512, tokens=(1, 64))


def an_engine(**env: str) -> Engine:
    facts = EngineFacts(load_settings(env), "eager", torch.bfloat16, SIZES, captured=(1, 8))
    parallel = SimpleNamespace(tensor_parallel_size=1, data_parallel_index=0, enable_eplb=False)
    config = SimpleNamespace(parallel_config=parallel, compute_hash=lambda: "of vLLM")
    engine = Engine(facts, 0, SimpleNamespace(vllm_config=config))
    engine.device = torch.device("cpu")
    engine.contents = {"ops": {"silu_and_mul": "1"}, "contracts": {"x": "1"}, "mode": "eager"}
    return engine


def a_request(**changes: Any) -> Request:
    role = Role(silu("vendor.acme"), **changes)
    return Request([role], torch.bfloat16, torch.device("cpu"), SIZES)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder of installed packages, the only one whose state is in the key."""
    (tmp_path / "acme-1.0.dist-info").mkdir()
    (tmp_path / "acme-1.0.dist-info/RECORD").write_text("acme.py,sha256=1,9")
    (tmp_path / "kernels.so").write_bytes(b"1" * 9)
    monkeypatch.setattr(verdict_key, "sys", SimpleNamespace(path=[str(tmp_path)]))
    beneath = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(verdict_key, "find_spec", lambda name: beneath)
    return tmp_path


def contents(name: str) -> Change:
    return lambda engine, *_: engine.contents.update({name: {"silu_and_mul": "2"}})


def replaced_beneath(_: Engine, __: Patch, packages: Path) -> None:
    """A library with the same size and time of modification."""
    old = (packages / "kernels.so").stat()
    (packages / "new.so").write_bytes(b"2" * 9)
    os.replace(packages / "new.so", packages / "kernels.so")
    os.utime(packages / "kernels.so", ns=(old.st_atime_ns, old.st_mtime_ns))


def facts(**fields: Any) -> Change:
    return lambda engine, *_: vars(engine).update(facts=dataclasses.replace(engine.facts, **fields))


def another_plugin(_: Engine, patch: Patch, __: Path) -> None:
    registry = SimpleNamespace(plugins=[SimpleNamespace(owner="acme", status="ok", module="x")])
    patch.setattr(verdict_key, "get_default_manager", lambda: SimpleNamespace(registry=registry))
    patch.setattr(verdict_key, "code_facts", lambda owner, module: {"source": "1"})


CASES: dict[str, Change] = {
    "implementations": contents("ops"),
    "contracts": contents("contracts"),
    "plan": contents("versions"),
    "verification": lambda _, patch, __: patch.setattr(
        verdict_key, "code_hash", lambda name, module: f"changed {name}"
    ),
    "packages": lambda _, __, packages: (packages / "acme-1.0.dist-info/RECORD").write_text(
        "acme.py,sha256=2,9"
    ),
    "beneath": replaced_beneath,
    "drivers": lambda _, patch, __: patch.setattr(torch.version, "cuda", "99.9"),
    "device": lambda _, patch, __: patch.setattr(torch, "get_num_threads", lambda: 99),
    "ranks": lambda engine, *_: vars(engine).update(rank=1),
    "model": facts(captured=(1, 16)),
    "config": lambda engine, *_: vars(engine.config).update(compute_hash=lambda: "another"),
    "settings": facts(settings=load_settings({"VLLM_FL_STRICT": "1"})),
    "plugins": another_plugin,
    "operators": lambda _, patch, __: patch.setattr(torch.library, "_impls", {"aten/mm/CPU"}),
    "environment": lambda _, patch, __: patch.setenv("ACME_FAST_PATH", "1"),
}
"""Part of the key -> a change of it. What was tried is in the next test."""


@pytest.mark.parametrize("name", [name for name in PARTS if name != "tried"])
def test_each_part_changes_the_key(name: str, packages: Path, monkeypatch: Patch) -> None:
    engine, request = an_engine(), a_request()
    before = verdict_parts(engine, request)
    assert verdict_parts(an_engine(), a_request()) == before
    CASES[name](engine, monkeypatch, packages)
    after = verdict_parts(engine, request)
    assert {part for part in PARTS if after[part] != before[part]} == {name}


@pytest.mark.parametrize(
    "change", [{"least": 2}, {"most": 64}, {"captured": 8}, {"warm": (1, 2)}, {"compiled": len}]
)
def test_what_was_tried_changes_the_key(change: dict[str, Any], packages: Path) -> None:
    before = verdict_parts(an_engine(), a_request())
    after = verdict_parts(an_engine(), a_request(**change))
    assert {part for part in PARTS if after[part] != before[part]} == {"tried"}


def test_what_changes_in_each_startup_is_not_in_the_key(packages: Path, monkeypatch: Patch) -> None:
    before = verdict_parts(an_engine(), a_request(warm=(1, 2)))
    for name in ("MASTER_PORT", "LOCAL_RANK", "TRITON_CACHE_DIR", "SSH_TTY", "VLLM_DIST_IDENT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_FL_METRICS", "/tmp/file")
    request = dataclasses.replace(a_request(warm=(1, 3)), seed=9)
    engine = an_engine(VLLM_FL_METRICS="/tmp/file", VLLM_FL_PREFLIGHT="full")
    assert verdict_parts(engine, request) == before


def test_devices_are_told_apart_by_all_their_properties(monkeypatch: Patch) -> None:
    """On CUDA by the UUID, and by the number of SMs, which a MIG instance has fewer of."""
    engine, found = an_engine(), "_CudaDeviceProperties(uuid=1, multi_processor_count=132)"
    engine.device = torch.device("cuda", 1)
    module = SimpleNamespace(get_device_properties=lambda index: f"{found} {index}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert verdict_key.PARTS["device"](engine, a_request()) == ("cuda", f"{found} 1", "")
