"""vLLM's two plugin entry points: results, log lines and errors."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_fl.dispatch import startup
from vllm_fl.errors import PluginError, SettingsError
from vllm_fl.integration import compat, entry, platform


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supported vLLM on a machine that it knows."""
    monkeypatch.setattr(compat, "obstacle", lambda: None)
    monkeypatch.setattr(compat, "hide_our_variables", lambda: None)
    monkeypatch.setattr(entry, "rivals", tuple)
    monkeypatch.setattr(entry, "speaks_for_all", lambda: True)
    monkeypatch.setattr(platform, "overlay_path", lambda forced=None: f"overlay for {forced}")
    monkeypatch.setattr(platform, "lay_in_place", lambda forced=None: None)
    monkeypatch.setattr(startup, "begin_process", lambda: None)
    for name in ("VLLM_FL_PREFER_ENABLED", "VLLM_FL_PLATFORM"):
        monkeypatch.delenv(name, raising=False)


def raising(error: BaseException) -> Any:
    def fails(*_: Any) -> Any:
        raise error

    return fails


def test_the_platform_is_the_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entry.platform_plugin() == "overlay for None"
    monkeypatch.setenv("VLLM_FL_PLATFORM", "acme")
    assert entry.platform_plugin() == "overlay for acme"


def test_switched_off_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER_ENABLED", "0")
    monkeypatch.setattr(startup, "begin_process", raising(AssertionError()))
    monkeypatch.setattr(platform, "overlay_path", raising(AssertionError()))
    monkeypatch.setattr(entry, "rivals", raising(AssertionError()))
    assert entry.platform_plugin() is None
    entry.general_plugin()
    monkeypatch.setattr(entry, "speaks_for_all", lambda: False)  # in another process of the engine
    entry.general_plugin()
    (record,) = caplog.records
    said = "vllm-fl is disabled, vLLM runs unmodified: VLLM_FL_PREFER_ENABLED=false (environment)"
    assert (record.levelname, record.getMessage()) == ("INFO", said)


def test_an_obstacle_is_one_line_and_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "obstacle", lambda: "vLLM 1.0 is too new")
    assert entry.platform_plugin() is None
    entry.general_plugin()
    (record,) = caplog.records
    said = "vllm-fl is disabled, vLLM runs unmodified: vLLM 1.0 is too new [FL510]"
    assert (record.levelname, record.getMessage()) == ("WARNING", said)


@pytest.mark.parametrize("error", [PluginError("two devices"), ValueError("a bug")], ids=repr)
def test_the_platform_plugin_says_what_vllm_would_hide(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "overlay_path", raising(error))
    assert entry.platform_plugin() is None
    (record,) = caplog.records
    assert record.levelname == "ERROR" and str(error) in record.getMessage()


def test_a_wrong_variable_ends_the_start_where_vllm_cannot_swallow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER_ENABLED", "perhaps")
    assert entry.platform_plugin() is None
    with pytest.raises(SettingsError, match="VLLM_FL_PREFER_ENABLED"):
        entry.general_plugin()


def test_a_rival_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "rivals", lambda: ("vllm-acme owns vllm_fl",))
    with pytest.raises(PluginError, match="vllm-acme owns") as caught:
        entry.general_plugin()
    assert caught.value.distribution == "vllm-acme"


def test_the_general_plugin_lays_the_overlay_in_place_and_calls_extensions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(platform, "lay_in_place", asked.append)
    monkeypatch.setattr(startup, "begin_process", lambda: asked.append("extensions"))
    monkeypatch.setenv("VLLM_FL_PLATFORM", "acme")
    entry.general_plugin()
    assert asked == ["acme", "extensions"]
    monkeypatch.setattr(platform, "lay_in_place", raising(PluginError("two devices")))
    with pytest.raises(PluginError, match="two devices"):
        entry.general_plugin()
