"""Startup of a process: number of plugin calls, and failing plugins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from builders import silu

from vllm_fl.dispatch import startup
from vllm_fl.dispatch.startup import Startup, start
from vllm_fl.plugins.device import DeviceProfile
from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.setting import PolicyDefaults
from vllm_fl.plugins.types import OpImpl


class Acme:
    """A plugin that provides a device, and counts the calls of its hooks."""

    def __init__(self, policy: Path | None = None) -> None:
        self.asked = self.detected = 0
        self.file = policy

    @hookimpl
    def device(self) -> DeviceProfile:
        self.asked += 1
        return DeviceProfile("acme", "acme.Platform", "acme.Worker", detect=self.detect)

    def detect(self) -> bool:
        self.detected += 1
        return True

    @hookimpl
    def policy(self, platform: str) -> PolicyDefaults | None:
        return PolicyDefaults(self.file) if self.file and platform == "acme" else None


class Broken:
    """A plugin with a device hook that raises."""

    @hookimpl
    def device(self) -> DeviceProfile:
        raise OSError("no driver")


Begin = Callable[..., Startup]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """`begin(env, plugin, …)`: run startup with these plugins installed."""

    def begin(env: dict[str, str], *plugins: object, **arguments: object) -> Startup:
        found = [
            Plugin(
                Owner(type(each).__name__.lower(), "fl-test", "1.0"), "test", lambda each=each: each
            )
            for each in plugins
        ]
        registry = OpRegistry()  # discovers contracts
        monkeypatch.setattr(startup.discovery, "discover", lambda modules: found)
        monkeypatch.setattr(startup, "vllm_platform", lambda: None)
        return start(registry, env, **arguments)  # type: ignore[arg-type]

    return begin


WRONG = {"VLLM_FL_PREFER": "no such kind"}


@pytest.mark.parametrize(
    ("env", "platform", "asked", "detected", "expected"),
    [
        ({}, None, 1, 1, "acme"),
        (WRONG, None, 1, 1, "acme"),
        ({}, "cuda", 0, 0, "cuda"),  # passed by the caller
        ({"VLLM_FL_PLATFORM": "cpu"}, None, 0, 0, "cpu"),
        ({"VLLM_FL_PLATFORM": "npu"}, None, 0, 0, "ascend"),
        ({"VLLM_FL_PLATFORM": "cpu", **WRONG}, None, 0, 0, "cpu"),
        ({"VLLM_FL_PLATFORM": "acme"}, None, 1, 0, "acme"),  # ask whether it exists
    ],
)
def test_a_start_asks_for_devices_once_at_most_and_only_where_it_must(
    begin: Begin,
    env: dict[str, str],
    platform: str | None,
    asked: int,
    detected: int,
    expected: str,
) -> None:
    plugin = Acme()
    made = begin(env, plugin, platform=platform)
    assert (plugin.asked, plugin.detected) == (asked, detected)
    assert made.settings.platform == expected
    assert (made.problem is not None) == ("VLLM_FL_PREFER" in env)
    assert made.settings.warnings == () or made.problem is not None


class Over(Acme):
    """A plugin for a third-party platform: it provides a policy file, and no device."""

    device = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("env", "plugin", "acts"),
    [({}, Acme, False), ({"VLLM_FL_PLATFORM": "acme"}, Acme, True), ({}, Over, True)],
)
def test_over_another_plugins_platform_a_devices_own_file_acts_where_it_is_asked_for(
    begin: Begin,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    plugin: type[Acme],
    acts: bool,
) -> None:
    path = tmp_path / "acme.yaml"
    path.write_text("strict: true\n")
    monkeypatch.setattr(startup, "is_foreign", lambda platform: platform == "acme")
    settings = begin(env, plugin(path), platform="acme").settings
    assert (settings.strict, settings.policy.prefer) == (acts, "flagos" if acts else "stock")
    assert bool(settings["platform_files"].value) is acts


@pytest.mark.parametrize("env", [{}, {"VLLM_FL_PLATFORM": "acme"}, WRONG])
def test_a_device_hook_that_fails_is_reported_once_and_costs_itself_only(
    begin: Begin, env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    made = begin(env, Broken(), Acme())
    assert made.settings.platform == "acme"
    (record,) = [each for each in caplog.records if "device hook" in each.getMessage()]
    said = "Plugin 'broken' of fl-test 1.0: its device hook failed: OSError: no driver"
    assert record.levelname == "ERROR" and said in record.getMessage()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"VLLM_FL_PREFFER": "vendor"}, "Did you mean 'VLLM_FL_PREFER'? [FL110]"),
        ({"VLLM_FL_PER_OP": "silu_and_mul=vendor:acmee"}, "matches 'vendor:acmee'. [FL110]"),
        ({"VLLM_FL_PLUGINS": "fl-tset,fl-test"}, "Installed: fl-test. [FL110]"),
    ],
)
def test_what_a_start_warns_of_has_the_code_of_doctor(
    begin: Begin, env: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin(env, Acme(), platform="cpu")
    (record,) = [each for each in caplog.records if "[FL216]" not in each.getMessage()]
    assert (record.levelname, record.getMessage()[-len(said) :]) == ("WARNING", said)


class Absent:
    """A plugin with an implementation that needs a missing library."""

    @hookimpl
    def register_ops(self) -> list[OpImpl]:
        return [silu("vendor.ort", available=lambda: "needs libacme 3.1, found 3.0")]


NEEDS = "vendor.ort (not available: needs libacme 3.1, found 3.0)."
LOST = "No implementation in the order of silu_and_mul can run"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"VLLM_FL_PER_OP": "silu_and_mul=vendor"}, [NEEDS, LOST]),
        (
            {"VLLM_FL_PER_OP": "silu_and_mul=vendor:ort|stock"},
            [f"'vendor:ort' cannot run: {NEEDS}"],
        ),
        (
            {"VLLM_FL_PER_OP": "silu_and_mul=vendor:ort", "VLLM_FL_DENY_VENDORS": "ort"},
            ["vendor.ort (deny_vendors contains ort).", LOST],
        ),
        ({}, []),
    ],
)
def test_what_is_asked_for_by_name_and_cannot_run_is_warned_of_with_the_reason(
    begin: Begin, env: dict[str, str], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    begin(env, Absent(), platform="cpu")
    messages = [each.getMessage() for each in caplog.records if "silu_and_mul" in each.getMessage()]
    assert len(messages) == bool(said)
    assert all(part in messages[0] and messages[0].endswith("[FL110]") for part in said)


@pytest.mark.parametrize("asked", ["vendor:broken", "impl:vendor.broken"])
def test_a_selector_of_a_failed_plugin_is_not_reported_as_a_typo(begin: Begin, asked: str) -> None:
    class Sound:
        @hookimpl
        def register_ops(self) -> list[OpImpl]:
            return [silu("vendor.sound")]

    class Broken:
        @hookimpl
        def register_ops(self) -> list[OpImpl]:
            raise OSError("no driver")

    made = begin({"VLLM_FL_PER_OP": f"silu_and_mul={asked}"}, Sound(), Broken(), platform="cpu")
    assert [plugin.owner.plugin for plugin in made.plugins if plugin.error] == ["broken"]
    assert made.settings.warnings == (), "an engine ends with FL201: it runs no code in its place"
    named = {"VLLM_FL_PER_OP": f"silu_and_mul={asked}|vendor:soundd"}
    (warning,) = begin(named, Sound(), Broken(), platform="cpu").settings.warnings
    assert "matches 'vendor:soundd'. Did you mean 'vendor:sound'?" in warning
    assert "'vendor:broken'" not in warning and "lost every" not in warning
