"""Core with a plugin that is broken, beside one that is sound: the broken one costs itself only."""

from __future__ import annotations

import json

import pytest

from installed import Install

# distribution, what the user must be able to read, the op at fault when there is one
BROKEN = [
    ("fl-broken-import", "libacme.so.3: cannot open shared object file", None),
    ("fl-half-registers", "the device table of acme is missing", None),
    ("fl-wrong-type", "dict", None),
    ("fl-wrong-parameters", "eps", "rms_norm"),
    ("fl-other-hook-api", "99", None),
]
ERRORS = """
import json
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.errors import PluginError
from vllm_fl.plugins.loading import discover, load
errors = [plugin.error for plugin in load(OpRegistry(), discover()) if plugin.error]
assert all(isinstance(error, PluginError) for error in errors)
print(json.dumps([
    {"plugin": e.plugin, "distribution": e.distribution, "op": e.op, "cause": repr(e.cause),
     "message": str(e)} for e in errors
]))
"""


@pytest.mark.parametrize(
    ("distribution", "cause", "op"), BROKEN, ids=[name for name, _, _ in BROKEN]
)
def test_it_is_shown_with_its_cause_and_the_sound_one_works(
    install: Install, distribution: str, cause: str, op: str | None
) -> None:
    installed = install("fl-sound", distribution)
    plugins = installed.plugins(status=1)
    assert set(plugins) == {"fl-sound", distribution}
    assert plugins["fl-sound"]["status"] == "ok"
    failed = plugins[distribution]
    assert failed["status"] == "failed"
    assert failed["name"] == distribution.removeprefix("fl-")
    assert failed["version"] == "1.0"
    assert cause in json.dumps(failed["error"])

    ops = installed.ops()
    assert ops["silu_and_mul"]["selected"] == "vendor.sound"
    for listed in ops.values():  # nothing of it is left
        assert distribution not in {c["distribution"] for c in listed["candidates"]}

    (error,) = installed.script(ERRORS)
    assert error["plugin"] == distribution.removeprefix("fl-")
    assert error["distribution"] == f"{distribution} 1.0"
    assert error["op"] == op
    assert cause in error["cause"] + error["message"]


def test_asking_by_name_for_what_a_failed_plugin_brings_quotes_the_cause(install: Install) -> None:
    done = install("fl-sound", "fl-half-registers").run(
        "-c",
        "from vllm_fl.dispatch import call_op; call_op('silu_and_mul', 1)",
        VLLM_FL_PER_OP="silu_and_mul=impl:vendor.half",
    )
    assert done.returncode != 0
    assert "the device table of acme is missing" in done.stderr


def test_a_broken_plugin_that_is_left_out_is_no_finding(install: Install) -> None:
    installed = install("fl-sound", "fl-broken-import")
    plugins = installed.plugins(status=0, VLLM_FL_PLUGINS="fl-sound")
    assert plugins["fl-broken-import"]["status"] == "disabled"
    assert plugins["fl-sound"]["status"] == "ok"


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize(
    ("only", "sound", "broken"),
    [
        (None, "ok", "failed"),
        ("", "disabled", "disabled"),
        ("fl-sound", "ok", "disabled"),
        ("FL_Broken.Import", "disabled", "failed"),
        ("fl-sound,fl-broken-import", "ok", "failed"),
    ],
)
def test_narrowing_and_strictness(
    install: Install, only: str | None, sound: str, broken: str, strict: str
) -> None:
    """What VLLM_FL_PLUGINS leaves out cannot fail; what it loads fails the start when strict."""
    installed = install("fl-sound", "fl-broken-import")
    variables = {"VLLM_FL_STRICT_PLUGINS": strict}
    if only is not None:
        variables["VLLM_FL_PLUGINS"] = only
    if broken == "failed" and strict == "1":
        done = installed.command("ops", **variables)
        assert done.returncode == 1
        assert done.stderr.count("libacme.so.3: cannot open shared object file") == 1
        assert "VLLM_FL_STRICT_PLUGINS=1 makes this an error" in done.stderr
        return
    plugins = installed.plugins(status=int(broken == "failed"), **variables)
    assert {name: plugin["status"] for name, plugin in plugins.items()} == {
        "fl-sound": sound,
        "fl-broken-import": broken,
    }


def test_two_distributions_with_one_implementation_id(install: Install) -> None:
    installed = install("fl-twin-a", "fl-twin-b", "fl-sound")
    plugins = installed.plugins(status=1)
    assert plugins["fl-sound"]["status"] == "ok"
    failed = [plugin for plugin in plugins.values() if plugin["status"] == "failed"]
    assert failed
    for plugin in failed:
        text = json.dumps(plugin["error"])
        for fact in ("silu_and_mul", "vendor.twin", "fl-twin-a", "fl-twin-b", "1.0"):
            assert fact in text
        assert text.count(str(installed.env.path)) >= 2  # the path of each
    for error in installed.script(ERRORS):
        assert error["op"] == "silu_and_mul"


def test_the_older_form_works(install: Install) -> None:
    installed = install("fl-old-form")
    assert installed.plugins(status=0)["fl-old-form"]["status"] == "ok"
    op = installed.ops()["silu_and_mul"]
    (candidate,) = op["candidates"]
    assert (candidate["impl_id"], candidate["vendor"]) == ("vendor.older", "older")
    assert candidate["priority"] == 100
    assert candidate["distribution"] == "fl-old-form"
    assert op["selected"] == "vendor.older"


def test_vendors_in_the_older_form_are_found_by_their_entry_points(install: Install) -> None:
    installed = install("fl-form-musa", "fl-form-iluvatar")
    plugins = installed.plugins(status=0)
    assert {name: plugin["status"] for name, plugin in plugins.items()} == {
        "fl-form-iluvatar": "ok",
        "fl-form-musa": "ok",
    }
    ops = installed.ops("eager")
    brought = {c["impl_id"] for c in ops["attention_backend"]["candidates"]}
    assert {"vendor.iluvatar", "vendor.musa"} <= brought


def test_an_older_vllm_plugin_fl_is_one_error_with_the_line_that_ends_it(install: Install) -> None:
    done = install("fl-sound", "vllm-plugin-fl").command("plugins", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["schema"] == 1
    assert (done.stdout + done.stderr).count("pip uninstall -y vllm-plugin-fl") == 1
