"""Every kind of output through comparison, startup and kit: only correct ones pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sample_ops import FOLDER, RIGHT, WRONG, impl_of, sample_contracts

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl_tools.testing import CHECKS, failures
from vllm_fl_tools.testing.subject import Subject
from vllm_fl_verify.preflight import find_faults
from vllm_fl_verify.trials import Request, Role
from vllm_fl_verify.verification import compare, tried

pytest_plugins = ["pytester"]

CPU = torch.device("cpu")
SIZES = ModelSizes(None, None, None, None, None, None, tokens=(1, 700))
PER_WRONG = pytest.mark.parametrize("wrong", WRONG)
OF_EACH_OP = ("one id off by one", "one row off by one", "half a scale", "swapped weights")
PER_RIGHT = pytest.mark.parametrize(("op", "fn"), RIGHT, ids=lambda v: getattr(v, "__name__", ""))
PER_OP = pytest.mark.parametrize(
    ("op", "fn"),
    [
        pytest.param(op, fn, id=fn.__name__, marks=() if fn.__name__ == op else pytest.mark.slow)
        for op, fn in RIGHT
    ],
)


@pytest.fixture(autouse=True, scope="module")
def ops() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    with sample_contracts():
        yield
    torch.set_num_threads(threads)


def compared(impl: OpImpl) -> dict[str, tuple[str, str]]:
    """(dtype, sample) -> (status, reason)."""
    spec = known_contracts().contracts[impl.op_name]
    dtypes = [getattr(torch, name) for name in spec.dtypes]
    found = (
        compare(impl, spec, sample, kind) for kind in dtypes for sample in tried(spec, kind, CPU)
    )
    return {f"{c.dtype}, {c.sample}": (c.status, c.reason) for c in found}


def fault(
    impl: OpImpl, dtype: torch.dtype = torch.bfloat16, calls: float = 80, compiled: Any = None
) -> str | None:
    request = Request([Role(impl, compiled=compiled)], dtype, CPU, SIZES, seed=1, calls=calls)
    found = find_faults(dataclasses.replace(request, backend="aot_eager")).objections
    return next((each.reason for each in found.values()), None)


@PER_RIGHT
def test_a_right_one_passes(op: str, fn: Callable[..., Any]) -> None:
    impl = impl_of(op, fn)
    assert {name: found for name, found in compared(impl).items() if found[0] != "ok"} == {}
    assert fault(impl) is None


@PER_OP
def test_a_right_one_passes_the_kit(op: str, fn: Callable[..., Any]) -> None:
    assert list(failures(impl_of(op, fn))) == []


@PER_OP
def test_a_right_one_passes_where_a_compiler_looks_inside(op: str, fn: Callable[..., Any]) -> None:
    impl = impl_of(op, fn, traceable=True, supports=None)
    assert list(failures(impl, without=CHECKS.keys() - {"tracing"})) == []
    assert fault(impl, compiled=fn) is None


@PER_WRONG
def test_comparison_sees_a_wrong_one(wrong: str) -> None:
    op, fn = WRONG[wrong]
    found = [why for status, why in compared(impl_of(op, fn)).values() if status == "wrong"]
    assert found and all(why.startswith(("result ", "the result")) for why in found)


@PER_WRONG
def test_an_engine_leaves_a_wrong_one_out(wrong: str) -> None:
    op, fn = WRONG[wrong]
    assert str(fault(impl_of(op, fn))).startswith("it is incorrect: ")


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(name, marks=() if name in OF_EACH_OP else pytest.mark.slow) for name in WRONG],
)
def test_the_kit_fails_a_wrong_one(wrong: str) -> None:
    op, fn = WRONG[wrong]
    for check in ("values", "preflight"):
        assert next(failures(impl_of(op, fn), without=CHECKS.keys() - {check}), None), check


@pytest.mark.parametrize(
    ("op", "count"),
    [
        pytest.param(op, count, marks=() if place == number else pytest.mark.slow)
        for place, op in enumerate(("greedy_token", "quantise", "quantise_tensor", "route"))
        for number, count in enumerate((1, 2, 257, 700))
    ],
)
def test_what_is_wrong_in_one_row_of_a_batch_is_seen_at_start(op: str, count: int) -> None:
    right = dict(RIGHT)[op]

    def wrong(*args: Any) -> Any:
        results = right(*args)
        if len(args[0]) == count:
            last = (results if isinstance(results, tuple) else (results,))[-1]
            last[-1:] += 1
        return results

    wrong.__signature__ = known_contracts().contracts[op].signature  # type: ignore[attr-defined]
    for dtype in (torch.float32, torch.bfloat16):
        found = str(fault(impl_of(op, wrong), dtype, calls=1e9))
        assert found.startswith("it is incorrect: " + "result 1:" * (op != "greedy_token"))


def test_the_dtypes_of_a_contract_are_what_is_run() -> None:
    for op, fn in RIGHT:
        dtypes = known_contracts().contracts[op].dtypes
        assert Subject(impl_of(op, fn), CPU).spec.dtypes == dtypes
        assert {name.partition(",")[0] for name in compared(impl_of(op, fn))} == set(dtypes)


def test_an_op_that_is_for_other_dtypes_than_the_model_is_left_out() -> None:
    impl = impl_of("quantise_tensor", dict(RIGHT)["quantise_tensor"])
    assert fault(impl, torch.float16) == (
        "the contract of its op supports float32, bfloat16, not float16"
    )


PLUGIN = f"""
import sys
from importlib import import_module

sys.path.append({str(FOLDER.parent)!r})

from sample_ops import RIGHT, WRONG, impl_of
from vllm_fl import Contract, hookimpl

@hookimpl
def contracts():
    return [Contract(import_module("sample_contracts." + op).SPEC) for op in dict(RIGHT)]

@hookimpl
def register_ops():
    fns = {{**dict(RIGHT), **dict([WRONG[name] for name in WRONGS])}}
    return [impl_of(op, fn) for op, fn in fns.items()]
"""
TEST = """
from vllm_fl_tools.testing import ModelSizes, OpConformance

class TestSampleOps(OpConformance):
    backend = "vendor.acme"
    sizes = ModelSizes(None, None, None, None, None, None, tokens=(1, 40))
"""


@pytest.mark.parametrize(
    "wrongs",
    [
        ["an id off by one", "swapped weights", "a scale off by two"],
        pytest.param(["an expert off by one"], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_the_test_class(
    wrongs: list[str], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(toy_ops=f"WRONGS = {wrongs}\n{PLUGIN}", test_toy_ops=TEST)
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "toy_ops")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
    not_seen_here = "not fork and not spawn and not tracing and not opcheck"
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-k", not_seen_here)
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] > 60
    failed = {line for line in result.outlines if line.startswith("FAILED ")}
    ops = [WRONG[name][0] for name in wrongs]
    assert failed and all(
        any(f".{op}-" in line or f"[{op}-" in line for op in ops) for line in failed
    )
    for name in wrongs:
        op, _ = WRONG[name]
        for check in ("values", "preflight"):
            result.stdout.re_match_lines([f"FAILED .*test_{check}.{op}-float32.*"])
