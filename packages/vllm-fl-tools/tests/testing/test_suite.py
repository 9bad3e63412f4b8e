"""The test class in a vendor's pytest run: exceptions, unavailability, incorrect use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_fl.dispatch import reset_default_manager
from vllm_fl_tools.testing import CHECKS, OpConformance
from vllm_fl_tools.testing.exceptions import read_xfails
from vllm_fl_tools.testing.processes import installed

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]

PLUGIN = """
from vllm_fl import BackendImplKind, OpImpl

def silu_and_mul(x):
    import torch
    d = x.shape[-1] // 2
    if x.shape[-1] % 2 or not x.is_floating_point():
        raise ValueError("x")
    return (torch.nn.functional.silu(x[..., :d]) * x[..., d:]{mistake}).contiguous()

def register(registry):
    registry.register_impl(OpImpl(
        "silu_and_mul", "vendor.toy", BackendImplKind.VENDOR, silu_and_mul, "toy", traceable=True,
        available=lambda: {available},
    ))
"""
TEST = """
from vllm_fl_tools.testing import OpConformance

class TestToy(OpConformance):
    backend = "vendor.toy"
"""
WRONG = '[[xfail]]\nop = "silu_and_mul"\nreason = "twice too large"\n'


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    def run(
        xfails: str = "", *args: str, mistake: str = "", available: str = "True"
    ) -> pytest.RunResult:
        pytester.makepyfile(
            toy_plugin=PLUGIN.format(mistake=mistake, available=available), test_toy=TEST
        )
        (pytester.path / "xfails.toml").write_text(xfails)
        monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "toy_plugin")
        options = ("-q", "-rs", "-p", "no:cacheprovider", *args)
        if not args:  # compiling imports modules that one process cannot import twice
            monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
            return pytester.runpytest_subprocess(*options)
        monkeypatch.syspath_prepend(pytester.path)
        reset_default_manager()
        return pytester.runpytest_inprocess(*options)

    yield run
    monkeypatch.undo()
    reset_default_manager()


def test_a_sound_backend_passes_in_every_check(run: Run) -> None:
    result = run()
    assert result.ret == 0
    outcomes = result.parseoutcomes()
    assert "failed" not in outcomes
    assert outcomes["skipped"] == 3 + 2  # opcheck of a traceable op, classes of layers, the engine


def test_what_is_excepted_fails_as_it_should(run: Run) -> None:
    result = run(WRONG, "-k", "values or exceptions", mistake=" * 2")
    outcomes = result.parseoutcomes()
    assert outcomes["xfailed"] > 30
    assert outcomes["failed"] == 3  # 0 tokens are correct despite the mistake, in each dtype
    result.stdout.fnmatch_lines(["*remove silu_and_mul / values from xfails.toml*"])


def test_a_failure_shows_the_finding_and_no_source_of_the_kit(run: Run) -> None:
    """`values` fails first, although the other checks fail too."""
    shown = run("", "-x", "-k", "test_values or test_determinism or test_preflight", mistake=" * 2")
    shown.stdout.fnmatch_lines(["*TestToy.test_values*", "E*Error: incorrect: the result: *"])
    shown.stdout.no_fnmatch_line("*checks.py*")
    shown.stdout.no_fnmatch_line("*cases.py*")


def test_an_exception_that_is_none_any_more_fails(run: Run) -> None:
    result = run(WRONG + 'sample = "1 token"\ndtype = "float16"\n', "-k", "values")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*passes or is unsupported: remove*from xfails.toml*"])


def test_an_exception_that_names_no_test_fails(run: Run) -> None:
    result = run(WRONG + 'sample = "1 tokn"\n', "-k", "exceptions")
    assert result.parseoutcomes()["failed"] == 1
    result.stdout.fnmatch_lines(["*match no test: silu_and_mul / values / 1 tokn*"])


def test_what_would_end_the_process_is_not_run(run: Run) -> None:
    result = run(WRONG + "run = false\n", "-k", "values", mistake=" * exit(3)")
    assert set(result.parseoutcomes()) == {"xfailed", "deselected"}


def test_an_unavailable_backend_is_skipped_with_its_reason(run: Run) -> None:
    result = run("", "-k", "not exceptions", available="'no toy device'")
    assert result.ret == 0
    assert set(result.parseoutcomes()) == {"skipped", "deselected"}
    result.stdout.fnmatch_lines(["*vendor.toy is not available: no toy device*"])


def test_where_it_has_to_be_available_it_fails(run: Run) -> None:
    result = run("", "-k", "not exceptions", "--require-available", available="'no toy device'")
    assert (result.ret, result.parseoutcomes()["failed"]) == (1, 1)  # nothing is computed
    result.stdout.fnmatch_lines(["*vendor.toy is not available: no toy device*"])


def test_a_backend_that_is_not_installed_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST)
    result = pytester.runpytest_subprocess("-q")
    result.stdout.fnmatch_lines(["*No installed plugin provides the backend 'vendor.toy'*"])
    assert result.ret != 0


def test_a_backend_of_ops_without_contract_has_its_own_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_its_own.py").write_text(
        "from vllm_fl import BackendImplKind, OpImpl, hookimpl\n"
        "@hookimpl\n"
        "def register_ops():\n"
        "    kind = BackendImplKind.VENDOR\n"
        "    return [OpImpl('frobnicate', 'vendor.own', kind, lambda x: x, 'own')]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "of_its_own")
    reset_default_manager()
    try:
        with pytest.raises(LookupError, match=r"provides only frobnicate.*no contract"):
            installed("vendor.own")
    finally:
        monkeypatch.undo()
        reset_default_manager()


def test_every_check_has_a_test_method_and_stands_in_the_guide() -> None:
    import vllm_fl_tools.testing

    methods = {n.removeprefix("test_") for n in vars(OpConformance) if n.startswith("test_")}
    assert methods == {*CHECKS, "exceptions", "quantised_layers"}
    assert vllm_fl_tools.testing.__doc__
    for name in methods:
        assert f"`test_{name}`" in vllm_fl_tools.testing.__doc__


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('op = "x"', "expected [[xfail]] entries only, got op"),
        ('[[xfail]]\nop = "x"', "missing 1 required positional argument: 'reason'"),
        ('[[xfail]]\nreason = "x"', "missing 1 required positional argument: 'op'"),
        (WRONG + 'sampel = "1 token"', "unexpected keyword argument 'sampel'"),
        (WRONG + 'check = "vales"', "no check 'vales'"),
        (WRONG + "run = 0", "run must be a bool, got 0"),
        (WRONG + "dtype = 16", "dtype must be a str, got 16"),
        ("[[xfail", "xfails.toml"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "xfails.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_xfails(path, CHECKS)
    assert problem in str(caught.value)


WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None  # `import pytest` then raises ModuleNotFoundError

import torch
from vllm_fl import BackendImplKind, OpImpl
from vllm_fl_tools.testing import CHECKS, ModelSizes, Xfail, failures

def silu_and_mul(x):
    d = x.shape[-1] // 2
    return 2 * torch.nn.functional.silu(x[..., :d]) * x[..., d:]

impl = OpImpl("silu_and_mul", "vendor.toy", BackendImplKind.VENDOR, silu_and_mul, "toy")
print(next(failures(impl)).case.check)
try:
    from vllm_fl_tools.testing import OpConformance
except ImportError as error:
    print(error)
"""


def test_without_pytest_the_checks_run_and_the_class_says_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTEST],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    check, needs = done.stdout.splitlines()
    assert check in CHECKS
    assert needs == "OpConformance needs pytest: pip install 'vllm-fl-tools[testing]'"
