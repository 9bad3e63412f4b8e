"""One environment with broken plugins and a sound one: each fault affects only its own plugin.
packages/vllm-fl-core/tests/plugins/test_loading.py has more failures, as modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from installed import Install, Installed

BROKEN = {
    "fl-broken-import": "libacme.so.3: cannot open shared object file",
    "fl-half-registers": "the device table of acme is missing",
    "fl-twin-a": "fl-twin-b 1.0",
    "fl-twin-b": "fl-twin-a 1.0",
}
"""Distribution -> text that the error must contain."""

EXITS = "fl-exits"
LIVE = {"VLLM_FL_PLUGINS": ",".join(["fl-sound", *BROKEN])}
"""All but the plugin that ends the process on import."""

LOAD = "from vllm_fl.dispatch import get_default_manager; get_default_manager().startup"


@pytest.fixture(scope="module")
def installed(install: Install) -> Installed:
    return install("fl-sound", EXITS, *BROKEN)


def test_each_is_named_with_its_cause_and_code_and_the_sound_one_works(
    installed: Installed,
) -> None:
    done = installed.command("doctor", "--json")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    plugins = {p["distribution"]: p for p in report["plugins"]}
    for name in ("vllm-fl-ops", "vllm-fl-tools", "vllm-fl-verify", "fl-sound"):
        assert plugins.pop(name)["status"] == "ok"
    assert set(plugins) == {EXITS, *BROKEN}
    for name, plugin in plugins.items():
        cause = BROKEN.get(name, "ended the process with status 0")
        assert plugin["status"] == "failed"
        assert (plugin["name"], plugin["version"]) == (name.removeprefix("fl-"), "1.0")
        assert cause in plugin["error"] and str(installed.env.path) in plugin["error"]
    for twin in ("fl-twin-a", "fl-twin-b"):
        for fact in ("silu_and_mul", "vendor.twin", "fl-twin-a", "fl-twin-b"):
            assert fact in plugins[twin]["error"]
    assert any("'exits'" in f["what"] and "fl-exits 1.0" in f["why"] for f in report["findings"])


def test_nothing_of_them_is_left_and_asking_for_one_gives_its_cause(installed: Installed) -> None:
    ops = installed.ops(**LIVE)
    assert ops["silu_and_mul"]["selected"] == "vendor.sound"
    found = {c["impl_id"] for listed in ops.values() for c in listed["candidates"]}
    assert found == {"vendor.sound"}
    done = installed.run(
        *("-c", "from vllm_fl.dispatch import call_op; call_op('silu_and_mul', 1)"),
        **{**LIVE, "VLLM_FL_PER_OP": "silu_and_mul=impl:vendor.half"},
    )
    assert done.returncode and "the device table of acme is missing" in done.stderr


def test_one_that_ends_the_process_is_named_by_the_next_one_and_imported_by_no_verb(
    installed: Installed, tmp_path: Path
) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    only = {"VLLM_FL_PLUGINS": "fl-sound", **cache}
    for verb in ("plan", "settings", "doctor"):
        done = installed.command(verb, "--json", **only)
        assert done.stdout and "ended the process" not in done.stdout
    done = installed.run("-c", "import vllm_fl.plugins.breadcrumb as b; print(b.lost())", **cache)
    assert done.stdout == "()\n"
    done = installed.run("-c", f"{LOAD}; print('not reached')", **cache)
    assert (done.returncode, done.stdout) == (0, "")
    (finding,) = [
        f
        for f in installed.answer("doctor", status=1, **cache)["findings"]
        if f["check"] == "ended"
    ]
    assert "the import of plugin 'exits' of fl-exits" in finding["what"]
    assert "the import of plugin 'exits' of fl-exits" in installed.run("-c", LOAD, **only).stderr


@pytest.mark.parametrize(
    ("only", "sound", "broken"),
    [
        ("", "disabled", "disabled"),
        ("fl-sound", "ok", "disabled"),
        ("FL_Broken.Import", "disabled", "failed"),
        ("fl-sound,fl-broken-import", "ok", "failed"),
    ],
)
def test_narrowing(installed: Installed, only: str, sound: str, broken: str) -> None:
    """A plugin that VLLM_FL_PLUGINS excludes cannot fail."""
    listed = installed.plugins(VLLM_FL_PLUGINS=only)
    statuses: dict[str, Any] = {name: plugin["status"] for name, plugin in listed.items()}
    expected = dict.fromkeys([EXITS, *BROKEN], "disabled")
    assert statuses == {**expected, "fl-sound": sound, "fl-broken-import": broken}


def test_the_older_forms_are_found_by_their_entry_points(install: Install) -> None:
    installed = install("fl-old-form", "fl-form-musa", "fl-form-iluvatar")
    assert {p["status"] for p in installed.plugins().values()} == {"ok"}
    ops = installed.ops()
    brought = {c["impl_id"] for c in ops["attention_backend"]["candidates"]}
    assert {"vendor.iluvatar", "vendor.musa"} <= brought
    candidates = {c["impl_id"]: c for c in ops["silu_and_mul"]["candidates"]}
    older = candidates["vendor.older"]
    assert (older["vendor"], older["priority"]) == ("older", 100)
    assert older["distribution"] == "fl-old-form"


def test_an_older_vllm_plugin_fl_is_one_error_with_the_line_that_ends_it(install: Install) -> None:
    done = install("fl-sound", "vllm-plugin-fl").command("doctor", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["schema"] == 1
    assert (done.stdout + done.stderr).count("pip uninstall -y vllm-plugin-fl") == 1
