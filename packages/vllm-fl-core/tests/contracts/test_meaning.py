"""A contract's digest: it changes with what the op must compute, and with nothing else."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_fl.contracts.meaning import contract_digest
from vllm_fl.contracts.spec import OpSpec

HELPERS = '''\
"""What the op is made of."""

import functools

STEPS = {"small": 1.5, "large": (2, 3)}
UNUSED = 1


@functools.cache
def half(x: float) -> float:
    return x / 2


def twice(x):
    return x + x


class Rule:
    """How to scale."""

    def __init__(self, factor):
        self.factor = factor

    def scaled(self, x):
        return x * self.factor + _offset()


def _offset():
    return 7
'''

OP = '''\
"""An op of a third party."""

import math

from vllm_fl.contracts import OpSpec, Tolerance, Variant
from vllm_fl.contracts.arguments import on_device_of

from .helpers import STEPS, Rule, half

RULE = Rule(3)
_seen = {}


def _plus(number):
    return lambda x: x + number


shift = _plus(5)


def grown(x, factor=2):
    """x grown by a factor."""
    import torch
    from .helpers import twice as doubled

    # A comment.
    _seen["last"] = factor
    rest = [half(part) for part in (1, 2) if not math.isnan(part)]
    more = shift(0) + doubled(finite_number("x", 4))
    return RULE.scaled(x.double()) * factor + STEPS["small"] + more


SPEC = OpSpec(
    oracle=grown,
    variants=(Variant("", "(Tensor x, float factor=2) -> Tensor"),),
    fake=lambda x, factor=2: x,
    check=lambda x, factor=2: None,
    samples=lambda dtype, device: (),
    served=lambda sizes, dtype, device, large=False: (),
    by_token=frozenset({"x"}),
    bad_inputs=lambda dtype, device: (),
    tolerances={"float32": Tolerance(1e-6, 1e-5, "a reason")},
    consumable=frozenset({"x"}),
)
'''

Make = Callable[..., OpSpec]

NUMBERS = itertools.count()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """`made((old, new))`: the contract above with this change; `name` is its package's."""

    def make(*changes: tuple[str, str], name: str = "", module: str = "op") -> OpSpec:
        op, helpers = OP, HELPERS
        for old, new in changes:
            assert (op + helpers).count(old) == 1, old
            op, helpers = op.replace(old, new), helpers.replace(old, new)
        root = tmp_path / str(next(NUMBERS))
        name = name or f"fl_grown_{root.name}"
        folder = root / name
        folder.mkdir(parents=True)
        for file, text in (("__init__", ""), (module, op), ("helpers", helpers)):
            (folder / f"{file}.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(root))
        importlib.invalidate_caches()
        spec = importlib.import_module(f"{name}.{module}").SPEC
        assert isinstance(spec, OpSpec)
        return spec

    return make


SAME = {
    "a comment": ("# A comment.", "# Another one,\n    # of two lines."),
    "a docstring": ('"""x grown by a factor."""', '"""Something else."""'),
    "an annotation": ("def twice(x):", "def twice(x: 'torch.Tensor') -> object:"),
    "what it does not reach": ("UNUSED = 1", "UNUSED = 2"),
    "the reason of a tolerance": ('"a reason"', '"a better reason"'),
    "samples": ("samples=lambda dtype, device: ()", "samples=lambda dtype, device: []"),
}

OTHER = {
    "the formula": ("* factor + STEPS", "* factor - STEPS"),
    "a default": ("def grown(x, factor=2)", "def grown(x, factor=3)"),
    "a tolerance": ("1e-5", "1e-4"),
    "a dtype": ('tolerances={"float32"', 'tolerances={"float16"'),
    "a schema": ("float factor=2)", "float factor=2.0)"),
    "what may be consumed": ('consumable=frozenset({"x"}),', ""),
    "the op's name": ("def grown(", "def widened("),
    "a helper of a helper": ("return 7", "return 8"),
    "a method": ("x * self.factor", "x / self.factor"),
    "an object's state": ("Rule(3)", "Rule(4)"),
    "data": ("(2, 3)", "(2, 4)"),
    "what a closure holds": ("_plus(5)", "_plus(6)"),
    "which function of a library": ("math.isnan", "math.isinf"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_computes_nothing_keeps_it(change: tuple[str, str], made: Make) -> None:
    assert contract_digest(made(change)) == contract_digest(made())


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_the_op_computes_changes_it(change: tuple[str, str], made: Make) -> None:
    renamed = [("oracle=grown", "oracle=widened")] if "widened" in change[1] else []
    assert contract_digest(made(change, *renamed)) != contract_digest(made())


def test_it_is_the_same_in_another_package_and_module(made: Make) -> None:
    known = contract_digest(made(name="fl_before"))
    assert contract_digest(made(name="fl_after", module="moved")) == known


def test_it_is_the_same_on_every_python(made: Make) -> None:
    """`nox -s pythons` runs this on each. The digest changes with the text above."""
    assert contract_digest(made()) == "6270401e7bccce17"
