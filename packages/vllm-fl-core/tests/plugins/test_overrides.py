"""What plugins override of ATen's is noted, call by call, while an engine starts and no longer."""

from __future__ import annotations

import logging
import operator
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_fl.plugins import breadcrumb, overrides
from vllm_fl.plugins.breadcrumb import Crumb
from vllm_fl.plugins.calling import contained
from vllm_fl.plugins.plugin import Owner

OWNER = Owner("acme", "pytest", pytest.__version__)
PART = "the start of an engine (load_model)"


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this test's notes; nothing of another's is remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(breadcrumb._notes, "dead", None)
    monkeypatch.setattr(overrides, "_known", {})
    breadcrumb.forget_calls()
    yield tmp_path / "vllm-fl" / "running"
    breadcrumb.forget_calls()


@pytest.fixture
def library() -> Iterator[Any]:
    made = torch.library.Library("aten", "IMPL")
    yield made
    made._destroy()


def override(library: Any, name: str, fn: Any, key: str = "CPU", **how: Any) -> None:
    """As a plugin does in its hook."""
    with contained(OWNER, "its worker_start hook", ""):
        library.impl(name, fn, key, **how)


def started(*calls: Any, is_last: bool = False) -> None:
    with overrides.noted(PART, is_last=is_last):
        for call in calls:
            call()


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.add(x)


def filled(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones(x.shape)


def failing(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("no model for this device")


def refused(error: BaseException) -> Any:
    def fn(x: torch.Tensor) -> torch.Tensor:
        raise error

    return fn


def raised(error: BaseException) -> Any:
    def call() -> None:
        raise error

    return call


def cosine() -> torch.Tensor:
    return torch.cos(torch.zeros(2))


def sine() -> torch.Tensor:
    return torch.sin(torch.zeros(2))


def label(name: str, fn: Any) -> str:
    return f"aten::{name} by {__name__}.{fn.__qualname__} of pytest {pytest.__version__}"


def table(name: str) -> str:
    return torch._C._dispatch_dump(f"aten::{name}")


class TestDeaths:
    """A process that ends in a call, or behind one."""

    SCRIPT = """
        import os, torch
        from vllm_fl.plugins import overrides
        from vllm_fl.plugins.calling import contained
        from vllm_fl.plugins.plugin import Owner

        library = torch.library.Library("aten", "IMPL")
        x = torch.zeros(2)
        def cos(x): return x.clone()
        def sin(x): {sin}
        def exp(x): return torch.cos(x)

        with overrides.noted("the start of an engine (load_model)", is_last=False):
            with contained(Owner("json"), "its worker_start hook", ""):
                library.impl("cos", cos, "CPU")
                library.impl("sin", sin, "CPU")
                library.impl("exp", exp, "CPU")
            torch.cos(x), torch.cos(x), torch.exp(x)
            try:
                torch.sin(x)
            except ValueError:
                pass
            {behind}
    """

    def left(self, sin: str = "return x.clone()", behind: str = "pass") -> tuple[Crumb, ...]:
        code = textwrap.dedent(self.SCRIPT).format(sin=sin, behind=behind)
        quiet = subprocess.DEVNULL
        subprocess.run([sys.executable, "-c", code], check=False, stderr=quiet)
        return breadcrumb.lost()

    @pytest.mark.parametrize("sin", ["os._exit(0)", "os.abort()"])
    def test_in_a_call(self, sin: str) -> None:
        (crumb,) = self.left(sin)
        assert crumb.what == PART and not crumb.error
        assert crumb.inside == "aten::sin by __main__.sin of json"
        # The call inside exp began last but one.
        names = [call.partition(" ")[0] for call in crumb.calls]
        assert names == ["aten::sin", "aten::cos", "aten::exp"]

    def test_some_calls_later(self) -> None:
        (crumb,) = self.left(behind="torch.zeros(1); os.abort()")
        assert crumb.inside == ""
        assert crumb.calls[0] == "aten::sin by __main__.sin of json" and len(crumb.calls) == 3

    def test_a_start_that_comes_to_its_end_forgets_it(self, notes: Path) -> None:
        assert self.left("os._exit(0)")
        assert self.left() == ()
        assert list(notes.iterdir()) == []


def test_what_a_living_process_is_in_can_be_read() -> None:
    """For who is about to end it."""
    code = textwrap.dedent(TestDeaths.SCRIPT).format(
        sin="print(flush=True); threading.Event().wait()", behind="pass"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"import threading\n{code}"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None and child.stdout.readline()
        crumb = breadcrumb.last(child.pid)
        assert crumb is not None and crumb.inside.startswith("aten::sin")
        assert breadcrumb.lost() == () and breadcrumb.last(child.pid + 1) is None
        child.kill()
        child.wait()
    assert breadcrumb.last(child.pid) == breadcrumb.lost()[0]


class TestErrors:
    """An engine's start that fails in a process which lives on."""

    def test_in_a_call(self, library: Any, caplog: pytest.LogCaptureFixture) -> None:
        override(library, "cos", doubled)
        override(library, "sin", failing)
        with pytest.raises(KeyError):
            started(cosine, sine)
        (crumb,) = breadcrumb.lost()
        assert crumb.inside == label("sin", failing)
        assert crumb.calls == (label("sin", failing), label("cos", doubled))
        assert crumb.error == "KeyError: 'no model for this device'"
        (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert label("sin", failing) in record.getMessage() and "FL216" in record.getMessage()

    def test_of_a_device_some_calls_later(self, library: Any) -> None:
        override(library, "cos", doubled)
        fault = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        for error in (RuntimeError("ACL stream synchronize failed"), fault):
            with pytest.raises(RuntimeError):
                started(cosine, raised(error))
            (crumb,) = breadcrumb.lost()
            assert (crumb.inside, crumb.calls) == ("", (label("cos", doubled),))

    @pytest.mark.parametrize(
        "error", [ValueError("no KV cache"), SystemExit(1), KeyboardInterrupt(), OSError()]
    )
    def test_that_no_device_reports(self, library: Any, notes: Path, error: BaseException) -> None:
        override(library, "cos", doubled)
        with pytest.raises(type(error)):
            started(cosine, raised(error))
        assert list(notes.iterdir()) == []

    @pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA")])
    def test_where_memory_runs_out(self, library: Any, error: Exception) -> None:
        override(library, "sin", refused(error))
        with pytest.raises(type(error)):
            started(sine)
        assert breadcrumb.lost() == (), "no call is at fault"

    def test_a_part_that_follows_knows_the_calls_before_it(self, library: Any) -> None:
        override(library, "cos", doubled)
        started(cosine)
        with pytest.raises(RuntimeError):
            started(raised(RuntimeError("CUDA error")), is_last=True)
        assert breadcrumb.lost()[0].calls == (label("cos", doubled),)


class TestTorch:
    """What torch has is as if nothing had been noted."""

    def test_an_override_is_called_by_torch_itself_behind_the_start(self, library: Any) -> None:
        override(library, "cos", filled)
        before = table("cos")
        started(cosine)
        with pytest.raises(ZeroDivisionError):
            started(lambda: 1 // 0)
        assert table("cos") == before
        assert cosine().tolist() == [1.0, 1.0]

    def test_what_its_plugin_has_taken_off_does_not_come_back(self) -> None:
        gone = torch.library.Library("aten", "IMPL")
        override(gone, "cos", filled)
        gone._destroy()
        seen: list[torch.Tensor] = []
        before = table("cos")
        started(lambda: seen.append(cosine()))
        assert table("cos") == before and seen[0].tolist() == [1.0, 1.0]
        assert breadcrumb._notes.calls.maxlen and not breadcrumb._notes.calls

    def test_how_it_is_registered_stays(self, library: Any) -> None:
        def with_keys(keys: Any, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(keys, torch.DispatchKeySet)
            return x.new_ones(x.shape)

        override(library, "cos", with_keys, with_keyset=True)
        override(library, torch.ops.aten.sin.default, filled)
        with overrides.noted(PART, is_last=False):
            assert cosine().tolist() == sine().tolist() == [1.0, 1.0]
        assert not breadcrumb.lost()

    @pytest.mark.parametrize("key", ["CPU", "CUDA", "XPU", "PrivateUse1", "HPU", ""])
    def test_every_operator_on_every_backend(self, library: Any, key: str) -> None:
        """FlagGems overrides several hundred at once."""
        schemas = (s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::"))
        names = [".".join(filter(None, (s.name[6:], s.overload_name))) for s in schemas]
        names = [n for n in names if _has_dispatch(n)]
        assert len(names) > 2000
        taken = names[:: 1 if key == "CUDA" else 50]
        with contained(OWNER, "its worker_start hook", ""):
            for name in taken:
                library.impl(name, filled, key)
        before = list(map(table, taken))
        with overrides.noted(PART, is_last=False):
            assert all(map(operator.ne, map(table, taken), before))
        assert list(map(table, taken)) == before


def _has_dispatch(name: str) -> bool:
    """Whether torch dispatches the operator; some are TorchScript's alone."""
    try:
        table(name)
    except RuntimeError:
        return False
    return True
