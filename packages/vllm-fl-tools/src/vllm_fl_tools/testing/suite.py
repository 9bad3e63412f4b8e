"""The base class for a backend's tests."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from vllm_fl.contracts import ModelSizes
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.startup import detect_platform
from vllm_fl.plugins.types import KernelImpl

from ..devices import torch_device
from .cases import CHECKS, Case, cases_of
from .exceptions import read_xfails
from .processes import installed
from .quantised import kernel_cases, quantised_layers
from .subject import HIDE_FRAMES, SIZES, Refused, Subject, expect

__all__ = ["OpConformance"]


class OpConformance:
    """Tests every op of one installed backend against its contract.

    Derive from it in a test file; exceptions are in `xfails.toml` in the same directory.

    Attributes:
        backend: the implementations' id (`vendor.acme`).
        device: torch's name of the device; None for the platform's device.
        sizes: the model for the tested calls, in tokens and features. By default, Qwen3-0.6B and
            additional public models are tested; if set, only this model.
        deadline: seconds per op in `test_fork` and `test_spawn`, and for vLLM in `test_engine`.
    """

    backend: ClassVar[str]
    device: ClassVar[str | None] = None
    sizes: ClassVar[ModelSizes] = SIZES
    deadline: ClassVar[float] = 120.0

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize each test method with the cases of its check."""
        if "kernel" in metafunc.fixturenames:
            cases = kernel_cases(type(self).backend)
            ids = [f"{impl.op_name}-{form}" for impl, form in cases]
            metafunc.parametrize("kernel", cases, ids=ids)
        if "case" not in metafunc.fixturenames:
            return
        metafunc.config.addinivalue_line(
            "markers", "engine: serves a tiny model in vLLM; run with `python -m pytest -m engine`"
        )
        try:
            suite = _suite(type(self))
        except (LookupError, ValueError) as error:
            raise pytest.Collector.CollectError(str(error)) from error
        # Older tools in the environment may not have added the option.
        suite.requires = metafunc.config.getoption("require_available", default=False)
        check = metafunc.definition.originalname.removeprefix("test_")
        without = "engine" not in metafunc.config.option.markexpr
        why = "starts vLLM, which takes minutes: python -m pytest -m engine"
        marks = [pytest.mark.engine, pytest.mark.skipif(without, reason=why)]
        marks = marks if check == "engine" else []
        metafunc.parametrize(
            "case",
            [pytest.param(case, id=str(case), marks=marks) for case in suite.cases[check]],
        )

    def test_exceptions(self) -> None:
        """Every entry of xfails.toml matches a test."""
        suite = _suite(type(self))
        if any(subject.impl.availability() is not True for subject in suite.subjects.values()):
            pytest.skip("not every op is available here")
        cases = [case for some in suite.cases.values() for case in some]
        idle = [str(x) for x in suite.xfails if not any(x.matches(case) for case in cases)]
        expect(not idle, f"xfails.toml: these entries match no test: {', '.join(idle)}")

    def test_quantised_layers(self, kernel: tuple[KernelImpl, str]) -> None:
        """A class for quantised layers is correct; one for linear layers also after an update."""
        try:
            quantised_layers(*kernel, _suite(type(self)).device)
        except Refused as refusal:
            pytest.skip(str(refusal))

    def _run(self, case: Case) -> None:
        __tracebackhide__ = HIDE_FRAMES
        suite = _suite(type(self))
        _keep_out_of_traces()
        xfail = next((x for x in suite.xfails if x.matches(case)), None)
        subject = suite.subjects[case.op]
        if xfail is not None and not xfail.run:
            pytest.xfail(xfail.reason)
        try:
            CHECKS[case.check].run(subject, case.dtype, case.sample)
        except Refused as refusal:
            if suite.requires and case.check == "availability":
                pytest.fail(f"{refusal}, although --require-available is set", False)
            if xfail is None:
                pytest.skip(str(refusal))
        except Exception as error:
            if xfail is None:
                raise
            pytest.xfail(f"{xfail.reason} ({error})")
        if xfail is not None:
            pytest.fail(f"passes or is unsupported: remove {xfail} from xfails.toml", False)


def _test(check: str) -> Callable[[OpConformance, Case], None]:
    def test(self: OpConformance, case: Case) -> None:
        self._run(case)

    test.__name__, test.__doc__ = f"test_{check}", CHECKS[check].function.__doc__
    return test


for _check in CHECKS:  # separate methods can be selected by name
    setattr(OpConformance, f"test_{_check}", _test(_check))


def _keep_out_of_traces() -> None:
    """Remove pytest's handlers from torch's trace, which would print empty lines.

    The records of the trace have no text. pytest adds handlers to every logger that does not
    propagate.
    """
    trace = logging.getLogger("torch.__trace")
    for handler in [*trace.handlers]:
        if type(handler).__module__.partition(".")[0] == "_pytest":
            trace.removeHandler(handler)


class _Suite:
    """The subjects by op, the cases by check, and the exceptions of a test class.

    `requires`: whether an unavailable implementation is a failure.
    """

    requires = False

    def __init__(self, cls: type[OpConformance]) -> None:
        if not isinstance(getattr(cls, "backend", None), str):
            raise ValueError(f"{cls.__name__} needs backend = '<implementation id>'")
        impls = installed(cls.backend)
        self.xfails = read_xfails(Path(inspect.getfile(cls)).with_name("xfails.toml"), CHECKS)
        name = cls.device
        if name is None:
            platform = detect_platform(get_default_manager().registry.plugins)
            name = torch_device(platform)
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(
                f"torch has no device {name!r}: set {cls.__name__}.device to torch's name of it"
            ) from error
        self.device = device
        cases = [c for impl in impls for c in cases_of(Subject(impl, device, cls.sizes))]
        self.cases = {check: [c for c in cases if c.check == check] for check in CHECKS}
        left_out = frozenset(
            (case.op, case.dtype, case.sample)
            for case in self.cases["values"]
            if any(xfail.matches(case) for xfail in self.xfails)
        )
        self.subjects = {
            impl.op_name: Subject(impl, device, cls.sizes, left_out, cls.deadline) for impl in impls
        }


_suites: dict[type[OpConformance], _Suite] = {}


def _suite(cls: type[OpConformance]) -> _Suite:
    if cls not in _suites:
        _suites[cls] = _Suite(cls)
    return _suites[cls]
