"""Orders for certain devices: file syntax, scope and precedence."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_fl.errors import SettingsError
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.names import check_names
from vllm_fl.settings.policy import Mode
from vllm_fl.settings.schema import Settings

H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"
CPU = "cpu"
KEY = "op_backends.linear"
MEASURED = {"date": "2026-11-25", "device": "NVIDIA H100", "ratio": 1.09, "what": "products"}
ORDER = {"compiled": {"<=64": "impl:default.flagos", "rest": "stock"}, "measured": MEASURED}

Read = Callable[..., Settings]


def section(order: Any = ORDER, **devices: Any) -> dict[str, Any]:
    return {**(devices or {"name": "NVIDIA *H[12]00*"}), "op_backends": {"linear": order}}


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """`read(sections, others', lists=…, users=…, **variables)`: load settings for CUDA."""

    def read(*each: Any, lists: Any = None, users: Any = None, **variables: str) -> Settings:
        files = []
        for name, sections in zip(("a", "b"), each, strict=False):
            path = tmp_path / f"{name}.yaml"
            said = {"devices": sections, "op_backends": lists or {}}
            path.write_text(yaml.safe_dump(said, sort_keys=False))
            files.append((f"fl-{name}", str(path)))
        if users is not None:
            path = tmp_path / "users.yaml"
            path.write_text(yaml.safe_dump(users, sort_keys=False))
            variables["VLLM_FL_CONFIG"] = str(path)
        groups = {"products": ["linear"]}
        return load_settings(variables, platform="cuda", platform_files=files, groups=groups)

    return read


def order(settings: Settings, device: str = H100) -> str:
    """The compiled order of `linear` on `device`."""
    policy = settings.with_devices(device, "compiled").policy
    listed = policy.listed("linear", "compiled")
    return "" if listed is None else str(listed).partition("compiled ")[2] or str(listed)


@pytest.mark.parametrize(
    ("device", "mode", "ops"),
    [
        (H100, "compiled", ["linear", "rms_norm"]),
        (A100, "compiled", []),
        ("", "compiled", []),
        (H100, "eager", []),
    ],
)
def test_orders_in_effect_are_reported_with_their_measurements(
    read: Read, device: str, mode: Mode, ops: list[str]
) -> None:
    orders = {"linear": ORDER, "rms_norm": {**ORDER, "compiled": "stock"}, "silu_and_mul": ORDER}
    sections = [{"name": "NVIDIA H*", "op_backends": orders}]
    settings = read(sections, VLLM_FL_PER_OP="silu_and_mul=stock").with_devices(device, mode)
    assert [*settings.held_by_device] == ops
    assert all("1.09 times as fast" in why for why in settings.held_by_device.values())


def test_it_holds_on_its_devices_in_its_mode_before_the_lists_for_all(
    read: Read, tmp_path: Path
) -> None:
    settings = read([section()], lists={"linear": ["stock", "flagos"]})
    assert order(settings) == "<=64 impl:default.flagos|stock|flagos, rest stock|flagos"
    found = settings.with_devices(H100, "compiled")[KEY]
    assert found.origin == (
        f"{tmp_path}/a.yaml:2 (fl-a), measured 2026-11-25 on NVIDIA H100: 1.09 times as fast in "
        "products"
    ).replace(":2 ", f"{found.origin.split('a.yaml')[1].split(' ')[0]} ")
    assert [str(value) for value, _ in found.overrides] == ["stock|flagos"]
    for device in (A100, CPU, ""):
        assert settings.with_devices(device, "compiled") is settings
    assert settings.with_devices(H100, "eager") is settings
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_the_first_order_for_a_device_applies(read: Read) -> None:
    first = section({"compiled": "vendor", "measured": MEASURED}, name="NVIDIA H100*")
    settings = read([first, section()])
    assert order(settings).startswith("vendor|")
    assert order(settings, "NVIDIA H200").startswith("<=64 ")
    assert not order(read([section(name="NVIDIA H2*")]))
    assert order(read([section()], [first])).startswith("<=64 ")


def test_what_the_user_says_lies_above_it(read: Read) -> None:
    lists = {"linear": "stock"}
    for variables in (
        {"VLLM_FL_PER_OP": "linear=reference"},
        {"VLLM_FL_PREFER": "stock"},
        {"VLLM_FL_PER_OP": "group:products=reference"},
    ):
        settings = read([section()], lists=lists, **variables)
        assert not order(settings).startswith("<=64") or "group" in str(variables)
    assert not order(read([section()], users={"strict": False}))
    extending = read([section()], users={"extends": "platform"})
    assert order(extending).startswith("<=64")


def test_a_users_own_section_is_all_that_is_tried(read: Read) -> None:
    own = {"devices": [section({"compiled": "vendor:acme"})], "extends": "platform"}
    settings = read([section()], users=own, VLLM_FL_PER_OP="linear=reference")
    assert order(settings) == "vendor:acme"
    assert order(settings, A100) == "reference"
    grouped = read([section()], users=own, VLLM_FL_PER_OP="group:products=reference")
    assert not grouped.policy.names("linear", itself=True)
    assert grouped.with_devices(H100, "compiled").policy.names("linear", itself=True)


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"name": "H*"}, "devices", "expected a list of sections, got a mapping"),
        ([{"op_backends": {}}], "devices", "name is missing"),
        ([section(nme="H*")], "devices", "Did you mean 'name'?"),
        ([{"name": "H*"}], "devices", "op_backends is missing"),
        ([{"name": "H*", "op_backends": {"default": ORDER}}], "devices", "'default'"),
        ([section({"compiled": "stock"})], "devices.linear", "measured is missing"),
        ([section({"measured": MEASURED})], "devices.linear", "got none"),
        ([section({**ORDER, "rest": "stock"})], "devices.linear", "unknown key 'rest'"),
        ([section({**ORDER, "compiled": {"<=64": "stock"}})], "devices.linear", "needs 'rest'"),
        ([section({**ORDER, "measured": {**MEASURED, "ratio": "x"}})], "devices.linear", "'x'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_with_its_line(
    read: Read, sections: Any, key: str, words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        read(sections)
    assert caught.value.key == key and words in str(caught.value)
    assert ".yaml:" in caught.value.origin and caught.value.origin.endswith("(fl-a)")


def test_an_op_that_nobody_brings_is_warned_of(read: Read) -> None:
    settings = read([{"name": "H*", "op_backends": {"linaer": ORDER}}])
    checked = check_names(settings, op=["linear"])
    assert "devices.linaer" in checked.unchecked
    assert any("'linear'" in warning for warning in checked.warnings)
