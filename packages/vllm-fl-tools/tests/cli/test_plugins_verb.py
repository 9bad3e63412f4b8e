"""`vllm-fl plugins`."""

from __future__ import annotations

import pytest
from commands import Command, Distribution, Plugin

from vllm_fl_tools.cli import _child, _progress, doctor


def test_a_sound_plugin(fl: Command, plugin: Plugin) -> None:
    name = plugin()
    done = fl("plugins", "--json")
    assert done.status == 0
    loaded = [row for row in done.json()["plugins"] if row["status"] != "disabled"]
    assert ("ops", "vllm-fl-ops") in [(row["name"], row["distribution"]) for row in loaded]
    (row,) = [row for row in loaded if row["name"] not in ("ops", "operate", "verify")]
    assert (row["name"], row["status"], row["hooks"]) == (name, "ok", ["register_ops"])
    assert row["error"] is None
    assert name in fl("plugins").out.replace("\n", "")


def test_a_plugin_that_fails_is_a_finding_and_is_quoted(fl: Command, plugin: Plugin) -> None:
    name = plugin("raise OSError('libacme.so.3 is missing')")
    done = fl("plugins", "--json")
    assert done.status == 1
    (row,) = [row for row in done.json()["plugins"] if row["status"] == "failed"]
    assert row["name"] == name
    assert "libacme.so.3 is missing" in row["error"]
    plain = fl("plugins")
    assert plain.status == 1
    assert "libacme.so.3 is missing" in plain.err


def test_another_owner_of_our_name_is_a_finding(fl: Command, distribution: Distribution) -> None:
    distribution("vllm-plugin-FL", entry_points="[vllm.general_plugins]\nfl = vllm_fl:register\n")
    done = fl("plugins", "--json", VLLM_FL_PLUGINS="")
    assert done.status == 1
    (line,) = done.json()["rivals"]
    assert "pip uninstall -y vllm-plugin-FL" in line


ENDS = {
    "at import": "os._exit(0)",
    "at import, by a signal": "os.kill(os.getpid(), 9)",
    "in a hook": "@hookimpl\ndef register_ops():\n    os._exit(0)",
    "in another process": "if os.fork() == 0: time.sleep(5); os._exit(0)\nos._exit(3)",
}


@pytest.mark.parametrize("how", ENDS)
def test_one_that_ends_the_process_is_a_named_finding(
    fl: Command, plugin: Plugin, how: str
) -> None:
    sound = plugin()
    lethal = plugin("import os, time\n" + ENDS[how])
    done = fl("plugins", "--json")
    assert done.status == 1
    rows = {row["name"]: row for row in done.json()["plugins"] if row["status"] != "disabled"}
    assert rows[sound]["status"] == "ok"
    assert rows[lethal]["status"] == "failed"
    assert "ended the process" in rows[lethal]["error"] and lethal in rows[lethal]["error"]
    plain = fl("plugins")
    assert plain.status == 1 and "ended the process" in plain.err


def test_one_that_never_comes_back_is_a_named_finding(
    fl: Command, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_child, "PATIENCE", 0.5)
    monkeypatch.setattr(_progress, "QUIET", 0.1)
    name = plugin("import time\ntime.sleep(600)")
    done = fl("plugins", "--json")
    (row,) = [row for row in done.json()["plugins"] if row["status"] == "failed"]
    assert row["name"] == name and "did not come back within" in row["error"]
    assert "vllm-fl plugins: the import of plugin" in done.err


def test_a_name_that_matches_nothing(fl: Command, distribution: Distribution) -> None:
    distribution("vllm-fl-numba", entry_points="[vllm_fl.plugin]\nnumba = no_such_module\n")
    done = fl("plugins", "--json", VLLM_FL_PLUGINS="numba")
    assert done.status == 1
    (warning,) = done.json()["warnings"]
    assert "'numba'" in warning and "Did you mean 'vllm-fl-numba'?" in warning
    assert "Did you mean" in fl("plugins", VLLM_FL_PLUGINS="numba").err


def test_no_secret_and_no_escape_sequence_is_printed(
    fl: Command, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {})  # of what is installed, which are slow
    plugin("raise OSError('cannot log in with s3cr3tpg \\x1b[31m\\nERROR forged')")
    for verb in ("plugins", "ops", "settings", "doctor"):
        done = fl(verb, PGPASSWORD="s3cr3tpg")
        said = done.out + done.err
        assert "s3cr3tpg" not in said and "\x1b" not in said, verb
        assert not any(line.startswith("ERROR forged") for line in said.splitlines()), verb
        assert "s3cr3tpg" not in fl(verb, "--json", PGPASSWORD="s3cr3tpg").out, verb
