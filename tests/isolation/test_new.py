"""A package that `vllm-fl new` wrote: it builds, is discovered, and passes the kit as written."""

from __future__ import annotations

from pathlib import Path

from installed import Install


def test_a_new_backend_builds_is_found_and_passes_the_kit(install: Install, tmp_path: Path) -> None:
    written = install().command("new", "foo", "--dir", str(tmp_path))
    assert written.returncode == 0, written.stderr
    folder = tmp_path / "vllm-fl-foo"
    installed = install(str(folder), engine=True)
    plugin = installed.plugins(status=0)["vllm-fl-foo"]
    assert (plugin["status"], plugin["hooks"]) == ("ok", ["policy", "register_ops"])
    assert installed.ops(status=0)["rms_norm"]["selected"] == "vendor.foo"
    done = installed.run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout
