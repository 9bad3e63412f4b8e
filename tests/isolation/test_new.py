"""A package written by `vllm-fl new`: it builds, is discovered, and passes the kit unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from installed import Install


def test_a_new_backend_builds_and_is_found(install: Install, tmp_path: Path) -> None:
    written = install().command("new", "foo", "--dir", str(tmp_path))
    assert written.returncode == 0, written.stderr
    (plugin,) = install(str(tmp_path / "vllm-fl-foo")).plugins().values()
    assert (plugin["name"], plugin["version"]) == ("foo", "0.1.0")
    # Its modules are installed; this environment has no torch.
    assert "No module named 'torch'" in plugin["error"] and "vllm_fl_foo/impl" in plugin["error"]


@pytest.mark.slow
def test_a_new_backend_passes_the_kit(install: Install, tmp_path: Path) -> None:
    written = install().command("new", "foo", "--dir", str(tmp_path))
    assert written.returncode == 0, written.stderr
    folder = tmp_path / "vllm-fl-foo"
    installed = install(str(folder), engine=True)
    plugin = installed.plugins()["vllm-fl-foo"]
    assert (plugin["status"], plugin["hooks"]) == ("ok", ["policy", "register_ops"])
    assert installed.ops()["rms_norm"]["selected"] == "vendor.foo"
    done = installed.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout


@pytest.mark.slow
def test_one_for_somebody_elses_device_passes_the_kit_and_is_a_candidate_there(
    install: Install, tmp_path: Path
) -> None:
    asked = ("--platform", "cpu", "--ops", "silu_and_mul", "--dir", str(tmp_path))
    written = install().command("new", "guest", *asked)
    assert written.returncode == 0, written.stderr
    folder = tmp_path / "vllm-fl-guest"
    installed = install(str(folder), "vllm-fl-reference", "vllm-fl-cpu", engine=True)
    done = installed.command("explain", "silu_and_mul", "--mode", "eager", "--json")
    (eager,) = json.loads(done.stdout)["modes"]
    candidates = [each["impl_id"] for each in eager["candidates"]]
    assert candidates[-2:] == ["vendor.guest", "stock.vllm"]  # after those of the first file
    assert eager["origin"].count(".yaml:") == 2
    done = installed.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout


@pytest.mark.slow
def test_one_over_a_platform_plugin_is_chosen_there_and_the_rest_stays(
    install: Install, tmp_path: Path
) -> None:
    theirs = "fl-platform-acme"
    asked = ("--over", "acme", "--ops", "silu_and_mul", "--dir", str(tmp_path))
    written = install(theirs, engine=True).command("new", "guest", *asked)
    assert written.returncode == 0, written.stderr
    folder = str(tmp_path / "vllm-fl-guest")
    installed = install(folder, theirs, "vllm-fl-reference", engine=True)
    for op, chosen in (("silu_and_mul", "vendor.guest"), ("rms_norm", "stock.vllm")):
        done = installed.command("explain", op, "--mode", "eager", "--json")
        (eager,) = json.loads(done.stdout)["modes"]
        assert eager["selected"] == chosen


@pytest.mark.slow
def test_one_for_a_device_that_is_not_here_skips_with_the_reason(
    install: Install, tmp_path: Path
) -> None:
    written = install().command("new", "away", "--platform", "ascend", "--dir", str(tmp_path))
    assert written.returncode == 0, written.stderr
    folder = tmp_path / "vllm-fl-away"
    installed = install(str(folder), engine=True)
    done = installed.run(
        "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(folder / "tests")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch finds no device 'npu'" in done.stdout
