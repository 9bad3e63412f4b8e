"""Out-of-tree hardware: whose device a machine has, and the settings of its platform."""

from __future__ import annotations

from typing import Any

import pytest

import vllm_fl.dispatch
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.startup import Startup
from vllm_fl.errors import PluginError
from vllm_fl.integration import device
from vllm_fl.plugins.registry import OpRegistry, Owner
from vllm_fl.plugins.types import DeviceProfile
from vllm_fl.settings.loading import load_settings

ACME = DeviceProfile("acme", "acme.Platform", "acme.Worker", detect=lambda: True)
OWNER = Owner("acme", "vllm-acme", "1.0")


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> OpManager:
    """A process that has detected the CPU, and in which a plugin brings one device."""
    manager = OpManager()
    manager.use_startup(Startup((), load_settings({}, platform="cpu")), OpRegistry())
    monkeypatch.setattr(device, "get_default_manager", lambda: manager)
    monkeypatch.setattr(vllm_fl.dispatch, "_default", manager)
    monkeypatch.setattr(device, "devices", lambda plugins: ([(OWNER, ACME)], []))
    monkeypatch.setattr(device, "find_device", lambda plugins, forced: ACME)
    return manager


def test_a_device_brings_the_settings_of_its_platform(manager: OpManager) -> None:
    assert device.detect_device(None) is ACME
    assert manager.settings is not None and manager.settings.platform == "acme"
    startup = manager.startup
    assert device.detect_device(None) is ACME
    assert manager.startup is startup, "they are read once"


def test_wrong_settings_do_not_hide_the_device(
    manager: OpManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "no such kind")
    assert device.detect_device(None) is ACME
    assert manager.startup is not None and manager.startup.problem is not None


def test_without_a_device_nothing_is_read_again(
    manager: OpManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup = manager.startup
    monkeypatch.setattr(device, "find_device", lambda plugins, forced: None)
    assert device.detect_device(None) is None and manager.startup is startup


def test_a_profile_by_its_name(manager: OpManager) -> None:
    assert device.profile_named("acme") is ACME
    with pytest.raises(PluginError, match="brings the device 'other' on this host"):
        device.profile_named("other")


def test_a_hook_that_failed_is_the_reason_why_there_is_no_device(
    manager: OpManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = PluginError("the hook failed", plugin="acme")
    found: Any = ([], [failed])
    monkeypatch.setattr(device, "devices", lambda plugins: found)
    with pytest.raises(PluginError) as caught:
        device.profile_named("acme")
    assert caught.value is failed
