"""The overlay over a platform class: what it changes, and what it leaves to the class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from vllm_fl.errors import PluginError
from vllm_fl.integration import platform
from vllm_fl.plugins.types import DeviceProfile

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


class CpuPlatform:
    """As much of a platform class as the overlay calls."""

    configured: ClassVar[list[Any]] = []
    dist_backend = "gloo"
    manager = "acme.PassManager"

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return cls.manager

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cls.configured.append(vllm_config.parallel_config.worker_cls)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "stock.Communicator"

    @classmethod
    def get_attn_backend_cls(cls, *request: Any) -> str:
        return f"stock.Attention for {request[2]}"


@pytest.fixture
def acme() -> Iterator[ModuleType]:
    """A module `acme_platform` with the class."""
    module = ModuleType("acme_platform")
    module.CpuPlatform = CpuPlatform  # type: ignore[attr-defined]
    sys.modules["acme_platform"] = module
    yield module
    del sys.modules["acme_platform"]
    for name in [n for n in vars(platform) if n.startswith(("Overlay__acme", "Device__"))]:
        del vars(platform)[name]


@pytest.fixture
def device(acme: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`device(**fields)`: the overlay over the platform of a device that a plugin brings."""

    def make(path: str = "acme_platform.CpuPlatform", **fields: Any) -> Any:
        profile = DeviceProfile("acme", path, "acme.Worker", detect=lambda: True, **fields)
        monkeypatch.setattr(platform, "profile_named", lambda name: profile)
        return platform.Device__acme  # type: ignore[attr-defined]

    return make


def test_the_class_is_made_from_its_path_once(acme: ModuleType) -> None:
    made: Any = platform.Overlay__acme_platform__CpuPlatform  # type: ignore[attr-defined]
    assert made is platform.Overlay__acme_platform__CpuPlatform  # type: ignore[attr-defined]
    assert issubclass(made, platform.PlatformOverlay) and issubclass(made, CpuPlatform)
    assert made.__name__ == "CpuPlatformFL" and made.vllm_fl_platform == "cpu"
    assert platform.is_overlay(made()) and not platform.is_overlay(CpuPlatform())
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = platform.Nothing  # type: ignore[attr-defined]


def test_a_device_brings_its_name_communicator_and_collectives(device: Callable[..., Any]) -> None:
    made = device(communicator_class="acme.Communicator", dist_backend="acmecl")
    assert made.vllm_fl_platform == "acme" and made.dist_backend == "acmecl"
    assert made.get_device_communicator_cls() == "acme.Communicator"


def test_what_a_device_does_not_bring_is_the_platforms(device: Callable[..., Any]) -> None:
    made = device()
    assert made.dist_backend == "gloo"
    assert made.get_device_communicator_cls() == "stock.Communicator"


@needs_vllm
def test_passes_of_ours_are_behind_the_platforms_own_manager(
    device: Callable[..., Any], acme: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.integration.passes import manager_path

    in_tree: Any = platform.Overlay__acme_platform__CpuPlatform  # type: ignore[attr-defined]
    own = manager_path("acme.PassManager")
    assert device().get_pass_manager_cls() == own, "a manager of the device's own"
    vllms = "vllm.compilation.passes.pass_manager.PostGradPassManager"
    monkeypatch.setattr(CpuPlatform, "manager", vllms)
    assert device().get_pass_manager_cls() == manager_path(vllms)
    assert in_tree.get_pass_manager_cls() == manager_path(vllms)


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
def test_what_the_plan_leaves_to_vllm_is_the_platforms_attention(
    device: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fl.integration.seams import attention

    monkeypatch.setattr(platform, "active_plan", lambda: "the plan")
    answers = iter(("acme.Attention", None))
    monkeypatch.setattr(attention, "choose", lambda plan, *request: next(answers))
    made = device()
    assert made.get_attn_backend_cls(None, "request", 8) == "acme.Attention"
    assert made.get_attn_backend_cls(None, "request", 8) == "stock.Attention for 8"


@needs_vllm
def test_an_engine_that_is_stock_has_the_platforms_attention(
    device: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's workers get the engine's variables after they have chosen their platform."""
    monkeypatch.setenv("VLLM_FL_PREFER_ENABLED", "false")
    monkeypatch.setattr(platform, "active_plan", lambda: pytest.fail("asked for a plan"))
    assert device().get_attn_backend_cls(None, "request", 8) == "stock.Attention for 8"


@pytest.mark.parametrize(
    ("in_tree", "forced", "expected"),
    [
        ("vllm.platforms.cpu.CpuPlatform", None, "Overlay__vllm__platforms__cpu__CpuPlatform"),
        ("vllm.platforms.cpu.CpuPlatform", "cpu", "Overlay__vllm__platforms__cpu__CpuPlatform"),
        ("vllm.platforms.cpu.CpuPlatform", "acme", "Device__acme"),
        (None, None, "Device__acme"),
        ("vllm.platforms.tpu.TpuPlatform", None, "Device__acme"),
    ],
)
def test_vllms_own_platform_comes_first_unless_a_device_is_forced(
    monkeypatch: pytest.MonkeyPatch, in_tree: str | None, forced: str | None, expected: str
) -> None:
    vllm = SimpleNamespace(builtin_platform_plugins={"one": lambda: in_tree})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=vllm))
    monkeypatch.setitem(sys.modules, "vllm.platforms", vllm)
    monkeypatch.setattr(platform, "other_platforms", tuple)
    found = SimpleNamespace(name="acme")
    monkeypatch.setattr(platform, "detect_device", lambda forced: found)
    assert platform.overlay_path(forced) == f"{platform.__name__}.{expected}"


def test_a_machine_that_nobody_knows_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_in_tree_path", lambda: None)
    monkeypatch.setattr(platform, "detect_device", lambda forced: None)
    assert platform.overlay_path() is None
