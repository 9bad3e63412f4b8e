"""Values that FlagGems's settings reject, and the doctor's findings about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_fl import BackendImplKind, CommunicatorImpl, OpImpl, SettingsError
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.schema import Settings
from vllm_fl_flaggems import plugin, settings

OP = "silu_and_mul"
IMPLS = (
    OpImpl(OP, "default.flagos", BackendImplKind.DEFAULT, print),
    OpImpl(OP, "vendor.acme", BackendImplKind.VENDOR, print, "acme"),
)


def read(**env: str) -> Settings:
    return load_settings(env, plugins=settings.SETTINGS)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({}, None),
        ({"USE_FLAGGEMS": "0"}, "USE_FLAGGEMS=false"),
        ({"VLLM_FL_FLAGOS_WHITELIST": "mm"}, "flagos_whitelist"),
        ({"VLLM_FL_FLAGOS_WHITELIST": OP}, None),
        ({"VLLM_FL_FLAGOS_BLACKLIST": OP}, "flagos_blacklist"),
        ({"VLLM_FL_FLAGOS_BLACKLIST_APPEND": OP}, "flagos_blacklist"),
    ],
)
def test_what_is_rejected(env: dict[str, str], reason: str | None) -> None:
    expected = None if reason is None else {"default.flagos": reason}
    assert settings.rejected(read(**env), OP, IMPLS) == expected


@pytest.mark.parametrize("variable", ["VLLM_FL_FLAGOS_WHITELIST", "VLLM_FL_FLAGOS_BLACKLIST"])
def test_a_list_of_flaggems_ops_leaves_communicators_of_its_kind_alone(variable: str) -> None:
    flagcx = CommunicatorImpl("default.flagcx", "acme.Communicator", BackendImplKind.DEFAULT)
    assert not settings.rejected(read(**{variable: OP}), "communicator", [flagcx])
    assert not settings.rejected(read(USE_FLAGGEMS="0"), "communicator", [flagcx])


@pytest.mark.parametrize("shipped", ["flagos_blacklist: [a, b]", "flagos_whitelist: [d]"])
def test_names_are_added_to_a_blacklist_and_never_to_a_whitelist(
    tmp_path: Path, shipped: str
) -> None:
    (tmp_path / "p.yaml").write_text(shipped)
    found = load_settings(
        {"VLLM_FL_FLAGOS_BLACKLIST_APPEND": "c"},
        plugins=settings.SETTINGS,
        platform_files=[("acme", tmp_path / "p.yaml")],
    )
    if "black" in shipped:
        assert settings.blacklist(found) == ("a", "b", "c")
    else:
        with pytest.raises(SettingsError, match="has no effect with flagos_whitelist=d") as caught:
            settings.rejected(found, OP, IMPLS)
        assert caught.value.key == "flagos_blacklist_append"


def test_the_plugin_declares_them() -> None:
    registry = OpRegistry()
    (loaded,) = load(registry, [Plugin(Owner("flaggems"), "flaggems", lambda: plugin)])
    assert loaded.error is None
    assert [spec.key for spec in loaded.settings] == [spec.key for spec in settings.SETTINGS]
    assert {"settings", "rejections", "doctor"} <= set(loaded.hooks)


@pytest.mark.parametrize("key", ["flagos_whitelist", "flagos_blacklist", "flagos_blacklist_append"])
def test_a_name_that_flaggems_lacks_is_an_error(key: str) -> None:
    found = read(**{f"VLLM_FL_{key.upper()}": "mm,add_"})
    with pytest.raises(
        SettingsError, match=r"unknown FlagGems op 'add_'\. Did you mean 'add'"
    ) as caught:
        settings.check_list_names(found, {"add", "mm"})
    assert caught.value.key == key
    assert caught.value.origin == f"environment VLLM_FL_{key.upper()}"


def test_settings_of_an_engine_without_them_are_the_defaults() -> None:
    bare = load_settings({})
    assert settings.value(bare, settings.USE) is True
    assert settings.rejected(bare, OP, IMPLS) is None
    settings.check_list_names(bare, ())


@pytest.mark.parametrize(
    ("env", "idle"),
    [
        ({"VLLM_FL_FLAGOS_BLACKLIST": "mm"}, "VLLM_FL_FLAGOS_BLACKLIST=mm"),
        ({"VLLM_FL_FLAGOS_WHITELIST": "mm,add"}, "VLLM_FL_FLAGOS_WHITELIST=mm,add"),
        ({"VLLM_FL_FLAGOS_BLACKLIST_APPEND": "mm"}, "VLLM_FL_FLAGOS_BLACKLIST_APPEND=mm"),
        ({"FLAGGEMS_ENABLE_OPLIST_PATH": "/x"}, "FLAGGEMS_ENABLE_OPLIST_PATH=/x"),
    ],
)
def test_what_has_no_effect_is_found(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], idle: str
) -> None:
    versions: dict[str, str] = {"flag-gems": "5.0.2", "triton": "3.7.1"}
    monkeypatch.setattr(settings, "version_of", versions.get)
    assert not list(settings.findings(read(**env)))
    (finding,) = settings.findings(read(USE_FLAGGEMS="0", **env))
    assert finding.what == f"{idle} has no effect."
    assert finding.why == "USE_FLAGGEMS=false disables FlagGems."
    versions.clear()
    missing, finding = settings.findings(read(**env))
    assert missing.check == "flag-gems"
    assert (finding.what, finding.why) == (f"{idle} has no effect.", "flag-gems is not installed.")


def test_a_flaggems_that_is_missing_or_lacks_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, Any] = {"vllm-fl-flaggems": "0.1.0"}
    monkeypatch.setattr(settings, "version_of", versions.get)
    (finding,) = settings.findings(read())
    assert "pip install --no-deps flag-gems==5.0.2" in finding.todo
    versions["flag-gems"] = "5.0.2"
    (finding,) = settings.findings(read())
    assert "Triton" in finding.what
    versions["triton"] = "3.7.1"
    assert not list(settings.findings(read()))
