"""Plugins that end their process, or claim what belongs to others, installed beside a sound one."""

from __future__ import annotations

from pathlib import Path

import pytest

from installed import Install

LOAD = "from vllm_fl.dispatch import get_default_manager; get_default_manager().startup"


def test_one_whose_import_ends_the_process_is_a_finding(install: Install) -> None:
    installed = install("fl-sound", "fl-exits")
    plugins = installed.plugins(status=1)
    assert plugins["fl-sound"]["status"] == "ok"
    assert plugins["fl-exits"]["status"] == "failed"
    assert "ended the process with status 0" in plugins["fl-exits"]["error"]
    findings = installed.answer("doctor", status=1)["findings"]
    (finding,) = [f for f in findings if f["check"] == "plugins"]
    assert "'exits'" in finding["what"] and "fl-exits 1.0" in finding["why"]


def test_doctor_says_who_ended_an_earlier_process(install: Install, tmp_path: Path) -> None:
    installed = install("fl-sound", "fl-exits")
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    done = installed.run("-c", f"{LOAD}; print('not reached')", **cache)
    assert (done.returncode, done.stdout) == (0, "")
    findings = installed.answer("doctor", status=1, **cache)["findings"]
    (finding,) = [f for f in findings if f["check"] == "ended"]
    assert "the import of plugin 'exits' of fl-exits" in finding["what"]
    told = installed.run("-c", LOAD, VLLM_FL_PLUGINS="fl-sound", **cache)
    assert "the import of plugin 'exits' of fl-exits" in told.stderr


@pytest.mark.parametrize("verb", ["plugins", "ops", "policy", "doctor"])
def test_what_is_left_out_is_imported_by_no_verb(
    install: Install, tmp_path: Path, verb: str
) -> None:
    installed = install("fl-sound", "fl-exits")
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    done = installed.command(verb, "--json", VLLM_FL_PLUGINS="fl-sound", **cache)
    assert "ended the process" not in done.stdout and done.stdout
    done = installed.run("-c", "import vllm_fl.plugins.breadcrumb as b; print(b.lost())", **cache)
    assert done.stdout == "()\n"


def test_a_registry_of_ones_own_is_held_to_the_list_too(install: Install) -> None:
    code = (
        "import json\nfrom vllm_fl.dispatch import OpRegistry, discover_plugins\n"
        "print(json.dumps({p.owner.plugin: p.status for p in discover_plugins(OpRegistry())}))"
    )
    found = install("fl-sound", "fl-exits").script(code, VLLM_FL_PLUGINS="fl-sound")
    assert found == {"exits": "disabled", "ops": "ok", "sound": "ok"}


def test_an_id_that_is_reserved_is_its_holders(install: Install) -> None:
    installed = install("fl-squatter", "vllm-fl-reference", engine=True)
    plugins = installed.plugins(status=1)
    assert plugins["vllm-fl-reference"]["status"] == "ok"
    assert plugins["fl-squatter"]["status"] == "partial"
    for fact in ("reference.torch", "vllm-fl-reference", "fl-squatter 1.0"):
        assert fact in plugins["fl-squatter"]["error"]
    candidates = installed.ops(status=0)["silu_and_mul"]["candidates"]
    assert {c["impl_id"]: c["distribution"] for c in candidates} == {
        "reference.torch": "vllm-fl-reference",
        "vendor.squat": "fl-squatter",
    }
