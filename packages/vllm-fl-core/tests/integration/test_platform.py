"""The overlay over a platform class: changed and unchanged methods."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from configs import engine_config

from vllm_fl.dispatch import platforms
from vllm_fl.errors import DeviceError, PluginError
from vllm_fl.integration import platform
from vllm_fl.plugins.device import DeviceProfile

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


class CpuPlatform:
    """The part of a platform class that the overlay calls."""

    configured: ClassVar[list[Any]] = []
    dist_backend = "gloo"
    manager = "acme.PassManager"

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return cls.manager

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        cls.configured.append(parser)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cls.configured.append(vllm_config.parallel_config.worker_cls)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "stock.Communicator"

    @classmethod
    def get_attn_backend_cls(cls, *request: Any) -> str:
        return f"stock.Attention for {request[2]}"


PATH = "acme_platform.CpuPlatform"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`vllm.platforms` of a machine unknown to vLLM, with the class in a module."""
    vllm = SimpleNamespace(builtin_platform_plugins={"cpu": lambda: None}, current_platform=None)
    module: Any = SimpleNamespace(CpuPlatform=CpuPlatform)
    monkeypatch.setitem(sys.modules, "acme_platform", module)
    monkeypatch.setattr(platform, "foreign_platforms", tuple)
    monkeypatch.setattr(platform, "foreign_platform", lambda: None)
    return vllm


@pytest.fixture
def bare(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`machine`, replacing vLLM's module."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=machine))
    monkeypatch.setitem(sys.modules, "vllm.platforms", machine)
    return machine


def made_of(path: str | None) -> Any:
    assert path == f"{platform.__name__}.Overlay"
    return platform.Overlay  # type: ignore[attr-defined]


def find(monkeypatch: pytest.MonkeyPatch, path: str = PATH, **fields: Any) -> None:
    """Let a plugin find its device."""
    profile = DeviceProfile("acme", path, "acme.Worker", detect=lambda: True, **fields)
    monkeypatch.setattr(platform, "find_device", lambda plugins, forced: profile)


@pytest.fixture
def device(machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`device(**fields)`: the overlay over a plugin's device platform."""

    def make(path: str = PATH, **fields: Any) -> Any:
        find(monkeypatch, path, **fields)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=machine))
            patch.setitem(sys.modules, "vllm.platforms", machine)
            return made_of(platform.overlay_path())

    return make


@pytest.mark.parametrize("name", ["cpu", "rocm", "xpu", "another"])
def test_any_platform_of_vllms_own_is_laid_over(bare: SimpleNamespace, name: str) -> None:
    assert platform.overlay_path() is None, "no platform: vLLM runs unmodified"
    bare.builtin_platform_plugins = {
        "fails": lambda: 1 / 0,
        "declines": lambda: None,
        name: lambda: PATH,
    }
    made = made_of(platform.overlay_path())
    assert issubclass(made, platform.PlatformOverlay) and issubclass(made, CpuPlatform)
    assert made.__name__ == "CpuPlatformFL" and made.vllm_fl_platform == name
    assert platform.is_overlay(made()) and not platform.is_overlay(CpuPlatform())
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = platform.Nothing  # type: ignore[attr-defined]


@needs_vllm
def test_a_device_brings_its_name_communicator_and_collectives(device: Callable[..., Any]) -> None:
    made = device(communicator_class="acme.Communicator", dist_backend="acmecl")
    assert made.vllm_fl_platform == "acme" and made.dist_backend == "acmecl"
    assert made.get_device_communicator_cls() == "acme.Communicator"


def test_a_platform_class_that_cannot_be_imported_names_the_device(
    device: Callable[..., Any],
) -> None:
    with pytest.raises(PluginError, match=r"Device 'acme': its platform class acme_platform\.Gone"):
        device("acme_platform.Gone")


@needs_vllm
@pytest.mark.parametrize(("chosen", "worker"), [("auto", "acme.Worker"), ("my.Own", "my.Own")])
def test_a_devices_worker_is_taken_unless_the_user_has_one(
    device: Callable[..., Any], chosen: str, worker: str
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=chosen), model_config=None, additional_config={}
    )
    device().check_and_update_config(config)
    assert config.parallel_config.worker_cls == worker == CpuPlatform.configured[-1]


@needs_vllm
def test_a_worker_that_the_platform_puts_in_again_is_wrapped_again(
    device: Callable[..., Any],
) -> None:
    """vLLM calls this again after the workers have loaded, also in a process without workers."""
    from vllm_fl.integration import carried, worker

    config = engine_config()
    carried.carried_entry(config)["enabled"] = []
    device().check_and_update_config(config)
    assert CpuPlatform.configured[-1] == "acme.Worker"
    assert config.parallel_config.worker_cls.startswith(f"{worker.__name__}.")
    assert carried.carried_entry(config).settings is None  # nothing is planned again


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_platform_that_is_put_in_behind_ours_is_said(
    bare: SimpleNamespace,
    device: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    is_replaced: bool,
) -> None:
    """A general plugin replaces it: vLLM modules imported before still use ours."""
    made = device()
    bare.current_platform = CpuPlatform() if is_replaced else made()
    made.pre_register_and_update(parser="vLLM's")
    assert CpuPlatform.configured[-1] == "vLLM's"
    messages = [each.getMessage() for each in caplog.records]
    assert [line[-7:] for line in messages] == ["[FL213]"] * is_replaced


@needs_vllm
def test_what_the_plan_or_a_stock_engine_leaves_to_vllm_is_the_platforms_attention(
    device: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.integration.patchers import attention

    monkeypatch.setattr(platform, "active_plan", lambda: "the plan")
    answers = iter(("acme.Attention", None))
    monkeypatch.setattr(attention, "choose", lambda plan, *request: next(answers))
    made = device()
    assert made.get_attn_backend_cls(None, "request", 8) == "acme.Attention"
    assert made.get_attn_backend_cls(None, "request", 8) == "stock.Attention for 8"
    # Ray's workers get the engine's variables only after they have chosen their platform.
    monkeypatch.setenv("VLLM_FL_PREFER_ENABLED", "false")
    monkeypatch.setattr(platform, "active_plan", lambda: pytest.fail("asked for a plan"))
    assert made.get_attn_backend_cls(None, "request", 8) == "stock.Attention for 8"


@pytest.mark.parametrize(
    ("in_tree", "forced", "expected"),
    [
        (True, None, "cpu"),
        (True, "cpu", "cpu"),
        (True, "acme", "acme"),
        (False, None, "acme"),
        (False, "cpu", "acme"),
    ],
)
def test_vllms_own_platform_comes_first_unless_a_device_is_forced(
    bare: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    in_tree: bool,
    forced: str | None,
    expected: str,
) -> None:
    if in_tree:
        bare.builtin_platform_plugins["cpu"] = lambda: PATH
    find(monkeypatch)
    assert made_of(platform.overlay_path(forced)).vllm_fl_platform == expected


def test_a_device_that_is_forced_where_vllm_asks_no_plugin_is_an_error(
    bare: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "vllm_release", lambda: ("vllm", "0.32.0"))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    find(monkeypatch)
    bare.current_platform = CpuPlatform()
    with pytest.raises(DeviceError, match=r"VLLM_FL_PLATFORM=acme .* VLLM_TARGET_DEVICE=cpu"):
        platform.lay_in_place("acme")
    assert type(bare.current_platform) is CpuPlatform
