"""A package written by `vllm-fl new`: it builds, is discovered, and passes the kit unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from installed import Install, Installed


def new(installed: Installed, name: str, folder: Path, *options: str) -> str:
    """The folder of a package that `vllm-fl new` wrote."""
    written = installed.command("new", name, *options, "--dir", str(folder))
    assert written.returncode == 0, written.stderr
    return str(folder / f"vllm-fl-{name}")


def test_a_new_backend_builds_and_is_found(install: Install, tmp_path: Path) -> None:
    (plugin,) = install(new(install(), "foo", tmp_path)).plugins().values()
    assert (plugin["name"], plugin["version"]) == ("foo", "0.1.0")
    # Its modules are installed; this environment has no torch.
    assert "No module named 'torch'" in plugin["error"] and "vllm_fl_foo/impl" in plugin["error"]


@pytest.mark.slow
def test_a_new_backend_passes_the_kit(install: Install, tmp_path: Path) -> None:
    folder = new(install(), "foo", tmp_path)
    installed = install(folder, engine=True)
    plugin = installed.plugins()["vllm-fl-foo"]
    assert (plugin["status"], plugin["hooks"]) == ("ok", ["policy", "register_ops"])
    assert installed.ops()["rms_norm"]["selected"] == "vendor.foo"
    done = installed.kit(f"{folder}/tests")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_one_for_somebody_elses_device_passes_the_kit_and_is_a_candidate_there(
    install: Install, tmp_path: Path
) -> None:
    folder = new(install(), "guest", tmp_path, "--platform", "cpu", "--ops", "silu_and_mul")
    installed = install(folder, "vllm-fl-reference", "vllm-fl-cpu", engine=True)
    eager = installed.explained("silu_and_mul")
    candidates = [each["impl_id"] for each in eager["candidates"]]
    assert candidates[-2:] == ["vendor.guest", "stock.vllm"]  # after those of the first file
    assert eager["origin"].count(".yaml:") == 2
    done = installed.kit(f"{folder}/tests")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_one_over_a_platform_plugin_is_chosen_there_and_the_rest_stays(
    install: Install, tmp_path: Path
) -> None:
    theirs = "fl-platform-acme"
    asked = ("--over", "acme", "--ops", "silu_and_mul")
    folder = new(install(theirs, engine=True), "guest", tmp_path, *asked)
    installed = install(folder, theirs, "vllm-fl-reference", engine=True)
    for op, chosen in (("silu_and_mul", "vendor.guest"), ("rms_norm", "stock.vllm")):
        assert installed.explained(op)["selected"] == chosen


@pytest.mark.slow
def test_one_for_a_device_that_is_not_here_skips_with_the_reason(
    install: Install, tmp_path: Path
) -> None:
    folder = new(install(), "away", tmp_path, "--platform", "ascend")
    done = install(folder, engine=True).kit("-rs", f"{folder}/tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch finds no device 'npu'" in done.stdout
