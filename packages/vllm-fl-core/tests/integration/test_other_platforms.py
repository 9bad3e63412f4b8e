"""Platform plugins of other distributions: precedence, and the overlay in place."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import forked
import pytest

from vllm_fl.dispatch import platforms
from vllm_fl.dispatch.platforms import foreign_platform, foreign_platforms
from vllm_fl.dispatch.startup import detect_platform, is_foreign
from vllm_fl.errors import OwnerError
from vllm_fl.integration import platform
from vllm_fl.integration.patchers import lookups

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(body, name, entry)`: a distribution vllm-NAME; its platform plugin runs `body`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def make(body: str, name: str = "acme", entry: str = "") -> None:
        info = tmp_path / f"vllm_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-{name}\nVersion: 1.0\n")
        module = f"{tmp_path.name.replace('-', '_')}_{name}"
        (info / "entry_points.txt").write_text(
            f"[vllm.platform_plugins]\n{entry or name} = {module}:register\n"
        )
        (tmp_path / f"{module}.py").write_text(f"def register():\n    {body}\n")

    return make


def test_one_that_answers_is_known_by_its_entry_point(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("return 'acme.platform.AcmePlatform'")
    (found,) = foreign_platforms()
    assert (found.name, found.release) == ("acme", "vllm-acme 1.0")
    assert detect_platform() == "acme"
    assert is_foreign("acme") and not is_foreign("cpu")
    monkeypatch.setenv("VLLM_PLUGINS", "fl,acme")
    assert is_foreign("acme")
    for chosen in ("fl", "fl,acmes", ""):
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
        assert foreign_platform() is None and detect_platform() != "acme"
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "CPU")  # it excludes plugins
    assert detect_platform() == "cpu"


@pytest.mark.parametrize("body", ["return None", "raise ImportError('no CANN')"])
def test_one_that_does_not_answer_is_none(install: Install, body: str) -> None:
    install(body)
    assert foreign_platform() is None


def test_one_that_fails_is_named(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hides the error and uses another device."""
    install(FAILS)
    install("return 'acme.platform.AcmePlatform'", "bolt")
    (message,) = platforms.broken_platforms()
    assert FAILED in message
    assert foreign_platform() is not None
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert platforms.broken_platforms() == (), "vLLM does not ask it"


@pytest.mark.parametrize("entry", ["cpu", "nvidia"])
def test_one_with_a_name_of_vllms_own_is_known_by_its_distribution(
    install: Install, entry: str
) -> None:
    """The policy files for the CPU must not apply to a third-party platform."""
    install("return 'acme.platform.AcmePlatform'", entry=entry)
    assert detect_platform() == "vllm-acme"
    assert not is_foreign("cpu") and not is_foreign("cuda")


def test_it_is_asked_once_and_in_silence(
    install: Install,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """vLLM calls our plugin twice and theirs once; their log lines must not appear three times."""
    asked = tmp_path / "asked"
    install(
        f"import logging; open({str(asked)!r}, 'a').write('x'); "
        "logging.getLogger('acme').warning('acme declines'); "
        "logging.getLogger('acme').error('acme is broken'); return 'acme.platform.AcmePlatform'"
    )
    assert foreign_platforms() == foreign_platforms() != ()
    assert asked.read_text() == "x"
    assert [record.getMessage() for record in caplog.records] == ["acme is broken"]
    logging.getLogger("acme").warning("again")
    assert "again" in caplog.text, "what it says to vLLM is heard"
    assert "declines" not in capfd.readouterr().err


class Kept(type):
    """A vendor's class may have a metaclass."""


class Vendor(metaclass=Kept):
    """A vendor's platform with everything that makes it hard to wrap."""

    device_name = "cpu"
    found = "nothing"
    made: ClassVar[list[object]] = []

    def __init_subclass__(cls) -> None:
        raise TypeError("final")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("guarded")

    @classmethod
    def find(cls) -> None:
        cls.found = "an NPU"

    @classmethod
    @functools.lru_cache
    def pool(cls) -> object:
        cls.made.append(cls)
        return object()

    @classmethod
    @functools.lru_cache
    def get_pass_manager_cls(cls) -> str:
        return "acme.Manager"

    @property
    def own_class(self) -> type:
        return type(self)


@pytest.fixture
def in_place(install: Install, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """`in_place(current)`: vLLM's platform after our general plugin."""
    install("return 'acme.platform.Vendor'")

    def lay(current: Any) -> Any:
        vllm = SimpleNamespace(builtin_platform_plugins={}, current_platform=current)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=vllm))
        monkeypatch.setitem(sys.modules, "vllm.platforms", vllm)
        assert platform.overlay_path() is None, "vLLM takes the other one's class"
        platform.lay_in_place()
        return current

    return lay


def test_the_object_stays_and_gets_a_class_over_its_own(in_place: Callable[[Any], Any]) -> None:
    made = in_place(Vendor())
    assert platform.is_overlay(made) and isinstance(made, Vendor)
    assert type(made).__name__ == "Vendor"
    assert made.vllm_fl_platform == "acme"
    own = type(made)
    platform.lay_in_place()
    assert type(made) is own, "once"
    assert pickle.loads(pickle.dumps(own)) is own, "by name"
    assert type(pickle.loads(pickle.dumps(made))) is own
    lookups.take_off()
    assert type(made) is Vendor


def test_what_is_found_out_through_the_object_is_the_vendors(
    in_place: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vendor, "found", "nothing")
    made = in_place(Vendor())
    made.find()
    assert Vendor.found == "an NPU"
    made.own_class.found = "two NPUs"
    assert Vendor.found == "two NPUs"
    del type(made).found
    assert not hasattr(Vendor, "found")
    type(made).vllm_fl_device = None
    assert not hasattr(Vendor, "vllm_fl_device"), "what is ours is not"


def test_objects_that_the_vendor_cached_are_not_recreated(in_place: Callable[[Any], Any]) -> None:
    pool = Vendor.pool()
    made = in_place(Vendor())
    assert made.pool() is pool is Vendor.pool() and Vendor.made == [Vendor]
    assert "get_pass_manager_cls" not in vars(type(made)), "ours comes first"


class Refusing(type):
    def __new__(cls, name: str, bases: tuple[type, ...], fields: dict[str, Any]) -> Any:
        if bases:
            raise TypeError("no class derives from it")
        return super().__new__(cls, name, bases, fields)


class Final(metaclass=Refusing):
    pass


class Narrow:
    __slots__ = ()


@pytest.mark.parametrize("cls", [Final, Narrow])
def test_a_class_that_takes_no_overlay_runs_as_it_is(
    in_place: Callable[[Any], Any], cls: type, caplog: pytest.LogCaptureFixture
) -> None:
    made = in_place(cls())
    assert type(made) is cls
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.getMessage().endswith("[FL513]")
    assert f"{cls.__name__}" in record.getMessage()


class Ours:
    """Our changes to a vendor's class."""

    def load_model(self) -> str:
        return "ours"


class Worker:
    """A vendor's worker."""

    def load_model(self) -> str:
        return "vendor's"


class Poor:
    """Lacks a method that ours calls."""


@pytest.mark.parametrize(("cls", "lies_over"), [(Worker, True), (Poor, False), (Final, False)])
def test_a_vendors_worker_is_wrapped_or_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cls: type, lies_over: bool
) -> None:
    module = SimpleNamespace(Worker=cls)
    monkeypatch.setitem(sys.modules, "vllm__acme", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm__acme.worker", module)
    path = lookups.path_over(__name__, "Over:", "vllm__acme.worker.Worker")
    name = path.removeprefix(f"{__name__}.")
    assert "." not in name, "vLLM takes what is before the last dot for a module"
    made = lookups.over_class(__name__, "Over:", name, Ours)
    assert (made is cls) is not lies_over
    assert issubclass(made, cls) and issubclass(made, Ours) is lies_over
    codes = [record.getMessage()[-7:] for record in caplog.records]
    assert codes == ([] if lies_over else ["[FL513]"])


def test_one_named_like_vllms_own_is_said(
    in_place: Callable[[Any], Any],
    install: Install,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("return 'acme.platform.Vendor'", "bolt", "cpu")
    monkeypatch.setenv("VLLM_PLUGINS", "fl,cpu")
    made = in_place(Vendor())
    assert made.vllm_fl_platform == "vllm-bolt"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage().endswith("[FL213]")


@needs_vllm
def test_two_that_answer_are_one_error_with_both(install: Install) -> None:
    install("return 'acme.platform.AcmePlatform'")
    install("return 'bolt.Platform'", "bolt")
    with pytest.raises(OwnerError) as error:
        platform.overlay_path()
    for part in ("'acme' of vllm-acme 1.0", "'bolt' of vllm-bolt 1.0", "VLLM_PLUGINS=fl,"):
        assert part in error.value.message
    assert "uninstall" not in error.value.message


@needs_vllm
def test_a_device_of_ours_that_is_forced_beside_one_is_an_error(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("return 'acme.platform.AcmePlatform'")
    for forced, asked in (("acme", 0), ("cpu", 0), ("bolt", 1)):
        calls: list[object] = []

        def device(name: object, calls: list[object] = calls) -> SimpleNamespace:
            calls.append(name)
            return SimpleNamespace(name=name)

        monkeypatch.setattr(platform, "_device", device)
        if asked:
            with pytest.raises(OwnerError, match="VLLM_FL_PLATFORM also selects 'bolt'"):
                platform.overlay_path(forced)
        else:
            assert platform.overlay_path(forced) is None
        assert len(calls) == asked


SCRIPT = """
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
load_general_plugins()
cls = type(current_platform)
print(cls.__module__, cls.__name__, current_platform.vllm_fl_platform)
print(current_platform.is_cpu(), isinstance(current_platform, CpuPlatform))
"""


ANSWERS = "return 'vllm.platforms.cpu.CpuPlatform'"
FAILS = "raise OSError('libacme.so.3: no such file')"
FAILED = "'acme' for vLLM's platform of vllm-acme 1.0 failed: OSError: libacme.so.3: no such file"


@needs_vllm
@pytest.mark.parametrize(
    ("body", "variables", "line", "warning"),
    [
        (ANSWERS, {}, "CpuPlatform acme", ""),
        (ANSWERS, {"VLLM_PLUGINS": "fl"}, "CpuPlatformFL cpu", ""),
        (FAILS, {}, "CpuPlatformFL cpu", FAILED),
    ],
)
def test_the_platform_of_a_process_of_vllms(
    install: Install, tmp_path: Path, body: str, variables: Any, line: str, warning: str
) -> None:
    install(body)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = forked.run(SCRIPT, env={**os.environ, "PYTHONPATH": path, **variables})
    assert done.returncode == 0, done.stderr
    whole = f"vllm_fl.integration.platform {line}"
    assert done.stdout.splitlines()[-2:] == [whole, "True True"]
    warnings = [line for line in done.stderr.splitlines() if line.endswith("[FL213]")]
    assert [warning in each for each in warnings] == [True] * bool(warning)
