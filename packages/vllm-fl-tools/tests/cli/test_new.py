"""`vllm-fl new`: the files it writes, and that it writes none when it fails."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.settings.loading import load_settings
from vllm_fl_tools.cli import main
from vllm_fl_tools.cli.new import template_ops

OPS = tuple(template_ops())


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_writes_the_common_skeleton(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = new(tmp_path, "--json")
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "name": "foo",
        "platform": "foo",
        "ops": list(OPS),
        "folder": str(folder),
    }
    package = "src/vllm_fl_foo"
    assert files(folder) == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "CHANGELOG.md",
        "README.md",
        "pyproject.toml",
        "tests/test_conformance.py",
        "tests/xfails.toml",
        *(f"{package}/{n}" for n in ("__init__.py", "foo.yaml", "plugin.py", "py.typed")),
        *(f"{package}/impl/{name}.py" for name in ("__init__", *OPS)),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"vllm-fl-foo"}
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "vllm-fl-foo"
    assert project["entry-points"] == {"vllm_fl.plugin": {"foo": "vllm_fl_foo.plugin"}}
    exec((folder / "tests" / "test_conformance.py").read_text(), {"__name__": "kit"})
    orders = yaml.safe_load((folder / package / "foo.yaml").read_text())["op_backends"]
    assert set(orders) == set(OPS)
    for path in folder.rglob("*"):
        assert "acme" not in path.name
        assert path.is_dir() or "acme" not in path.read_text().lower(), path


@pytest.mark.parametrize(
    "name", ["Acme", "my-chip", "my_chip", "3d", "", "é", "a b", "../up", "stock", "ops", "a" * 300]
)
def test_a_bad_name_is_one_error_and_nothing_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", name, "--dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("vllm-fl: ")
    assert repr(name) in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm-fl-foo").mkdir()
    assert main(["new", "foo", "--dir", str(tmp_path)]) == 2
    assert "exists: remove it" in capsys.readouterr().err
    assert list(tmp_path.rglob("*")) == [tmp_path / "vllm-fl-foo"]


def new(tmp_path: Path, *args: str) -> Path:
    assert main(["new", "foo", "--dir", str(tmp_path), *args]) == 0
    return tmp_path / "vllm-fl-foo"


def test_for_somebody_elses_device(tmp_path: Path) -> None:
    folder = new(tmp_path, "--platform", "nvidia", "--ops", "silu_and_mul,rms_norm")
    package = folder / "src" / "vllm_fl_foo"
    orders = yaml.safe_load((package / "foo.yaml").read_text())["op_backends"]
    own_first = ["vendor:foo", "stock", "vendor", "flagos", "reference"]
    assert orders == {"silu_and_mul": own_first, "rms_norm": own_first}
    assert "the platform `cuda`" in (package / "foo.yaml").read_text()
    assert 'if platform == "cuda"' in (package / "plugin.py").read_text()
    assert 'DEVICE = "cuda"' in (package / "impl" / "__init__.py").read_text()
    for path in folder.rglob("*"):
        text = "" if path.is_dir() else path.read_text()
        for gone in ("rotary", "gelu_and_mul", "platform `foo`", "each_op"):
            assert gone not in text, path
    for path in package.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Install a vLLM platform plugin, `acme` of vllm-acme, which returns `param`."""
    site = tmp_path.with_name(f"{tmp_path.name}-site")
    info = site / "vllm_acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-acme\nVersion: 1.0\n")
    module = site.name.replace("-", "_")
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\nacme = {module}:register\n")
    (site / f"{module}.py").write_text(f"def register():\n    return {request.param!r}\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


HERE, ELSEWHERE = "acme.platform.AcmePlatform", None
"""A platform plugin's result on a machine with its device, and on another."""


@pytest.mark.parametrize("plugin", [HERE, ELSEWHERE], indirect=True)
@pytest.mark.parametrize("name", ["foo", "acme"])
def test_over_a_platform_plugin_what_is_not_listed_stays(
    plugin: None, name: str, tmp_path: Path
) -> None:
    ops = "silu_and_mul,rms_norm"
    assert main(["new", name, "--over", "acme", "--ops", ops, "--dir", str(tmp_path)]) == 0
    folder = tmp_path / f"vllm-fl-{name}"
    package = folder / "src" / f"vllm_fl_{name}"
    file = package / "acme.yaml"
    assert [*package.glob("*.yaml")] == [file]
    settings = load_settings({}, platform_files=[("another 1", file)])
    own = [f"vendor:{name}", "foreign", "stock"]
    for op in ops.split(","):
        assert [str(token) for token in settings.policy.order(op)] == own
    others = settings.policy.order("gelu_and_mul", engine=True)
    assert [str(token) for token in others] == ["foreign", "stock"]
    assert set(settings.policy.per_op_order) == set(ops.split(","))
    code = (package / "plugin.py").read_text()
    assert 'with_name("acme.yaml")' in code and 'if platform == "acme"' in code
    assert "It extends `acme`" in (folder / "README.md").read_text()
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["description"].endswith(", over acme")


@pytest.mark.parametrize("plugin", [HERE, ELSEWHERE], indirect=True)
def test_over_a_plugin_that_does_not_answer_the_device_is_to_be_filled_in(
    plugin: None, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = request.node.callspec.params["plugin"] is HERE
    shared = new(tmp_path, "--over", "acme") / "src" / "vllm_fl_foo" / "impl" / "__init__.py"
    text = shared.read_text()
    assert ("TODO" in text) is not answers
    assert ('DEVICE = "acme"' in text) is not answers
    assert ("fill in DEVICE" in capsys.readouterr().out) is not answers


def test_over_a_platform_that_we_know_needs_no_plugin(tmp_path: Path) -> None:
    """`npu` is a name of `ascend`; its plugin declines on a laptop."""
    package = new(tmp_path, "--over", "npu") / "src" / "vllm_fl_foo"
    assert (package / "ascend.yaml").exists()
    assert '\n\nDEVICE = "npu"\n' in (package / "impl" / "__init__.py").read_text()


@pytest.mark.parametrize("ops", [OPS[:1], OPS[1:], OPS[::-1]])
@pytest.mark.parametrize(
    ("option", "platform"),
    [(None, None), ("--platform", "cpu"), ("--platform", "ascend"), ("--over", "ascend")],
)
def test_any_choice_of_ops_is_whole(
    tmp_path: Path,
    ops: tuple[str, ...],
    option: str | None,
    platform: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = [option, platform] if option and platform else []
    folder = new(tmp_path, "--ops", ",".join(ops), *chosen)
    monkeypatch.syspath_prepend(str(folder / "src"))
    for name in [name for name in sys.modules if name.startswith("vllm_fl_foo")]:
        monkeypatch.delitem(sys.modules, name)
    plugin = importlib.import_module("vllm_fl_foo.plugin")
    registry = OpRegistry()
    registry.register_many(plugin.register_ops())  # parameters match the contract
    assert set(registry.snapshot().impls_by_op) == set(ops)
    assert plugin.policy(platform or "foo") and plugin.policy("vulkan") is None
    settings = load_settings({}, platform_files=[("foo 1", plugin.POLICY)])
    assert set(settings.policy.per_op_order) == set(ops)
    for impls in registry.snapshot().impls_by_op.values():
        verdict = impls[0].availability()
        assert verdict is True if platform != "ascend" else "'npu'" in str(verdict)
    for name in [name for name in sys.modules if name.startswith("vllm_fl_foo")]:
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--ops", "silu_and_mlu"), "'silu_and_mlu'. Did you mean 'silu_and_mul'?"),
        (("--ops", ""), "no example of ''"),
        (("--ops", "silu_and_mul,,rms_norm"), "no example of ''"),
        (("--platform", "cdua"), "or of an installed plugin. Did you mean 'cuda'?"),
        (("--platform", ""), "'' is not a platform"),
        (("--over", "amce"), "Did you mean 'acme'? Installed: acme (vllm-acme 1.0). Install it"),
        (("--over", ""), "--over ''"),
        (("--over", "fl"), "--over 'fl'"),
        (("--over", "nvidia"), "--over 'cuda': it is part of vLLM"),
        (("--platform", "cuda", "--ops", "wiggle"), "'wiggle'"),
        (("--dir", "d" * 300), "File name too long"),
    ],
)
@pytest.mark.parametrize("plugin", [ELSEWHERE], indirect=True)
def test_an_unknown_op_or_platform_is_one_error_and_nothing_is_written(
    plugin: None,
    args: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["new", "foo", "--dir", str(tmp_path), *args]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("vllm-fl: ") and output.err.count("\n") == 1
    assert said in output.err
    assert list(tmp_path.iterdir()) == []
