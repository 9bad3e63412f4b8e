"""`vllm-fl plugins`."""

from __future__ import annotations

from conftest import Command, Distribution, Plugin


def test_a_sound_plugin(fl: Command, plugin: Plugin) -> None:
    name = plugin()
    done = fl("plugins", "--json")
    assert done.status == 0
    (row,) = [row for row in done.json()["plugins"] if row["status"] != "disabled"]
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
