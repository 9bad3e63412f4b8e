"""What a process starts with: how often plugins are asked, and what happens if they fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.dispatch import startup
from vllm_fl.dispatch.startup import Startup, detect_platform, known_platforms, start
from vllm_fl.errors import PluginError, SettingsError
from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.loading import Found
from vllm_fl.plugins.registry import OpRegistry, Owner
from vllm_fl.plugins.types import (
    BackendImplKind,
    DeviceProfile,
    OpImpl,
    PolicyDefaults,
    SettingSpec,
)


class Acme:
    """A plugin that brings a device; it counts how often it is asked for it."""

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
    """A plugin whose device hook raises."""

    @hookimpl
    def device(self) -> DeviceProfile:
        raise OSError("no driver")


Begin = Callable[..., Startup]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Begin:
    """`begin(env, plugin, …)`: a start at which these plugins are installed."""

    def begin(env: dict[str, str], *plugins: object, **arguments: object) -> Startup:
        found = [
            Found(
                Owner(type(each).__name__.lower(), "fl-test", "1.0"), "test", lambda each=each: each
            )
            for each in plugins
        ]
        registry = OpRegistry()  # it finds contracts
        monkeypatch.setattr(startup.plugin_loader, "discover", lambda modules: found)
        monkeypatch.setattr(startup, "vllms_own", lambda: None)
        return start(registry, env, **arguments)  # type: ignore[arg-type]

    return begin


def test_a_worker_asks_nothing_of_what_lists_name_before_its_device_is_open(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine's settings were checked where the plan was made."""
    asked = []

    class Lacking:
        @hookimpl
        def register_ops(self) -> list[OpImpl]:
            def available() -> str:
                asked.append(True)
                return "no card"

            fn = lambda x: x  # noqa: E731
            kind = BackendImplKind.VENDOR
            return [
                OpImpl("silu_and_mul", "vendor.acme", kind, fn, vendor="acme", available=available)
            ]

    env = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:acme|stock", "VLLM_FL_PLATFORM": "cpu"}
    told = begin(env, Lacking()).settings
    assert asked and any("no card" in warning for warning in told.warnings)
    asked.clear()
    with monkeypatch.context() as child:  # which says no warning
        child.setattr(startup, "speaks_for_all", lambda: False)
        begin(env, Lacking())
    assert asked == []
    begin(env, Lacking(), engine=told)
    assert not asked


WRONG = {"VLLM_FL_PREFER": "no such kind"}


@pytest.mark.parametrize(
    ("env", "platform", "asked", "detected", "expected"),
    [
        ({}, None, 1, 1, "acme"),
        (WRONG, None, 1, 1, "acme"),
        ({}, "cuda", 0, 0, "cuda"),  # the caller knows
        (WRONG, "cuda", 0, 0, "cuda"),
        ({"VLLM_FL_PLATFORM": "cpu"}, None, 0, 0, "cpu"),
        ({"VLLM_FL_PLATFORM": "npu"}, None, 0, 0, "ascend"),
        ({"VLLM_FL_PLATFORM": "cpu"}, "cuda", 0, 0, "cpu"),
        ({"VLLM_FL_PLATFORM": "cpu", **WRONG}, None, 0, 0, "cpu"),
        ({"VLLM_FL_PLATFORM": "acme"}, None, 1, 0, "acme"),  # is there such a platform?
        ({"VLLM_FL_PLATFORM": "acme", **WRONG}, None, 1, 0, "acme"),
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
    made = begin(env, plugin, platform=platform, defer_errors=True)
    assert (plugin.asked, plugin.detected) == (asked, detected)
    assert made.settings.platform == expected
    assert (made.problem is not None) == ("VLLM_FL_PREFER" in env)
    assert made.settings.warnings == () or made.problem is not None


def test_a_forced_platform_that_has_a_file_is_known_without_its_device(
    begin: Begin, tmp_path: Path
) -> None:
    path = tmp_path / "acme.yaml"
    path.write_text("strict: true\n")
    plugin = Acme(path)
    made = begin({"VLLM_FL_PLATFORM": "acme"}, plugin)
    assert made.settings.strict and made.settings.warnings == ()
    assert plugin.asked == 0


class Over(Acme):
    """A plugin for somebody else's platform: it brings a policy file, and no device."""

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


def test_a_forced_platform_that_nobody_brings_is_warned_of(begin: Begin) -> None:
    made = begin({"VLLM_FL_PLATFORM": "acmee"}, Acme())
    (warning,) = made.settings.warnings
    assert "VLLM_FL_PLATFORM=acmee" in warning and "'acme'" in warning


@pytest.mark.parametrize("env", [{}, {"VLLM_FL_PLATFORM": "acme"}, WRONG])
def test_a_device_hook_that_fails_is_reported_once_and_costs_itself_only(
    begin: Begin, env: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    made = begin(env, Broken(), Acme(), defer_errors=True)
    assert made.settings.platform == "acme"
    (record,) = [each for each in caplog.records if "device hook" in each.getMessage()]
    assert record.levelname == "ERROR"
    assert "Plugin 'broken' of fl-test 1.0: its device hook failed: OSError: no driver" in (
        record.getMessage()
    )


@pytest.mark.parametrize("env", [{}, {"VLLM_FL_PLATFORM": "acme"}])
def test_a_device_hook_that_fails_ends_a_strict_start(begin: Begin, env: dict[str, str]) -> None:
    with pytest.raises(PluginError, match="VLLM_FL_STRICT_PLUGINS=1 makes this an error") as caught:
        begin({**env, "VLLM_FL_STRICT_PLUGINS": "1"}, Broken(), Acme())
    assert (caught.value.plugin, caught.value.distribution) == ("broken", "fl-test 1.0")
    # Where nobody asks it, it has not failed.
    begin({"VLLM_FL_STRICT_PLUGINS": "1"}, Broken(), platform="cpu")


def test_asking_alone_reports_too(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    plugins = begin({}, Broken(), Acme(), platform="cpu").plugins
    for ask, expected in ((detect_platform, "acme"), (known_platforms, "acme")):
        caplog.clear()
        assert expected in ask(plugins)
        assert "its device hook failed: OSError: no driver" in caplog.text


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"VLLM_FL_PREFFER": "vendor"}, "Did you mean 'VLLM_FL_PREFER'? [FL110]"),
        ({"VLLM_FL_PER_OP": "silu_and_mul=vendor:acmee"}, "matches 'vendor:acmee'. [FL110]"),
        ({"VLLM_FL_PLUGINS": "fl-tset,fl-test"}, "Installed are fl-test. [FL110]"),
    ],
)
def test_what_a_start_warns_of_has_the_code_of_doctor(
    begin: Begin, env: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin(env, Acme(), platform="cpu")
    (record,) = [each for each in caplog.records if "[FL216]" not in each.getMessage()]
    assert (record.levelname, record.getMessage()[-len(said) :]) == ("WARNING", said)


class Absent:
    """What it brings needs a library that is not here."""

    @hookimpl
    def register_ops(self) -> list[OpImpl]:
        fn = lambda x: x  # noqa: E731
        vendor = BackendImplKind.VENDOR
        why = "needs libacme 3.1, found 3.0"
        return [OpImpl("silu_and_mul", "vendor.ort", vendor, fn, "ort", available=lambda: why)]


NEEDS = "vendor.ort (not available: needs libacme 3.1, found 3.0)."
LOST = "Nothing that is listed can run, so that silu_and_mul has lost every implementation"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"VLLM_FL_PER_OP": "silu_and_mul=impl:vendor.ort"}, [NEEDS, LOST]),
        ({"VLLM_FL_PER_OP": "silu_and_mul=vendor"}, [NEEDS, LOST]),
        (
            {"VLLM_FL_PER_OP": "silu_and_mul=vendor:ort|stock"},
            [f"'vendor:ort' cannot run: {NEEDS}"],
        ),
        (
            {"VLLM_FL_PER_OP": "silu_and_mul=vendor:ort", "VLLM_FL_DENY_VENDORS": "ort"},
            ["vendor.ort (deny_vendors names ort).", LOST],
        ),
        ({"VLLM_FL_PER_OP": "silu_and_mul=vendor|stock"}, []),
        ({}, []),
    ],
)
def test_what_is_asked_for_by_name_and_cannot_run_is_warned_of_with_the_reason(
    begin: Begin, env: dict[str, str], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    begin(env, Absent(), platform="cpu")
    told = [each.getMessage() for each in caplog.records if "silu_and_mul" in each.getMessage()]
    assert len(told) == bool(said)
    assert all(part in told[0] and told[0].endswith("[FL110]") for part in said)


def test_a_wrong_platform_is_an_error_in_any_start(begin: Begin) -> None:
    with pytest.raises(SettingsError, match="VLLM_FL_PLATFORM"):
        begin({"VLLM_FL_PLATFORM": "a b"}, Acme(), defer_errors=True)


@pytest.mark.parametrize("asked", ["vendor:broken", "impl:vendor.broken", "vendor:broken|stock"])
def test_a_token_whose_plugin_has_failed_is_no_slip(begin: Begin, asked: str) -> None:
    class Sound:
        @hookimpl
        def register_ops(self) -> list[OpImpl]:
            fn = lambda x: x  # noqa: E731
            return [OpImpl("silu_and_mul", "vendor.sound", BackendImplKind.VENDOR, fn, "sound")]

    class Broken:
        @hookimpl
        def register_ops(self) -> list[OpImpl]:
            raise OSError("no driver")

    made = begin({"VLLM_FL_PER_OP": f"silu_and_mul={asked}"}, Sound(), Broken(), platform="cpu")
    assert [plugin.owner.plugin for plugin in made.failed] == ["broken"]
    assert made.settings.warnings == (), "an engine ends with FL201: it runs no code in its place"
    named = {"VLLM_FL_PER_OP": f"silu_and_mul={asked}|vendor:soundd"}
    (warning,) = begin(named, Sound(), Broken(), platform="cpu").settings.warnings
    assert "matches 'vendor:soundd'. Did you mean 'vendor:sound'?" in warning
    assert "'vendor:broken'" not in warning and "lost every" not in warning


class Shipping:
    """Two ops and the order of a platform for one of them."""

    def __init__(self, policy: Path) -> None:
        self.file = policy

    @hookimpl
    def register_ops(self) -> list[OpImpl]:
        vendor = BackendImplKind.VENDOR
        return [
            OpImpl(op, "vendor.acme", vendor, print, "acme") for op in ("rms_norm", "silu_and_mul")
        ]

    @hookimpl
    def policy(self, platform: str) -> PolicyDefaults:
        return PolicyDefaults(self.file)


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("", ["silu_and_mul (from stock.vllm to vendor.acme in eager engines)"]),
        ("extends: platform\n", []),
        ("op_backends: {silu_and_mul: [vendor, stock]}\n", []),  # it is meant to move
        (  # an engine has it there already
            "op_backends: {default: [stock]}\n",
            ["silu_and_mul (from vendor.acme to nothing in scripts)"],
        ),
        ("op_backends: {default: [vendor]}\n", ["silu_and_mul (from stock.vllm to vendor.acme"]),
    ],
)
def test_a_complete_override_says_which_ops_it_moves_without_naming_them(
    begin: Begin, tmp_path: Path, text: str, moved: list[str]
) -> None:
    (tmp_path / "p.yaml").write_text("op_backends: {silu_and_mul: [stock, vendor]}\n")
    (tmp_path / "own.yaml").write_text(text)
    env = {"VLLM_FL_CONFIG": str(tmp_path / "own.yaml")}
    made = begin(env, Shipping(tmp_path / "p.yaml"), platform="cpu")
    said = " ".join(made.settings.warnings)
    assert ("complete override" in said) == (not text.startswith("extends"))
    assert ("extends: platform" in said) == bool(moved)
    assert all(each in said for each in moved)


def test_a_complete_override_names_what_a_lost_blacklist_moves(
    begin: Begin, tmp_path: Path
) -> None:
    white, black = "vendor_acme_whitelist", "vendor_acme_blacklist"

    class Listing(Shipping):
        """Kernels that its own blacklist keeps out."""

        @hookimpl
        def settings(self) -> list[SettingSpec[tuple[str, ...] | None]]:
            lists = {"in_file": True, "names": "op"}
            return [
                SettingSpec(white, "VLLM_FL_VENDOR_ACME_WHITE", None, **lists, excludes=black),
                SettingSpec(black, "VLLM_FL_VENDOR_ACME_BLACK", (), **lists),
            ]

        @hookimpl
        def rejections(self, settings: Any, op: str, impls: Any) -> dict[str, str]:
            return {"vendor.acme": black} if op in settings[black].value else {}

    (tmp_path / "p.yaml").write_text(f"{black}: [silu_and_mul, mm, zeros, add, sub]\n")
    (tmp_path / "own.yaml").write_text("strict: false\n")
    env = {"VLLM_FL_CONFIG": str(tmp_path / "own.yaml")}
    made = begin(env, Listing(tmp_path / "p.yaml"), platform="cpu")
    said = " ".join(made.settings.warnings)
    assert f"lost: add, mm, silu_and_mul and 2 more ({black})" in said
    assert "silu_and_mul (from stock.vllm to vendor.acme in eager engines)" in said
    assert "rms_norm" not in said
