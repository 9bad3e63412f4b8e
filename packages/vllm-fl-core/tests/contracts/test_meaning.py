"""A contract's digest: it changes with what the op must compute, and with nothing else."""

from __future__ import annotations

import compileall
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

import vllm_fl
import vllm_fl_ops
from vllm_fl.contracts import Tolerance, Within, contracts
from vllm_fl.contracts.meaning import contract_digest
from vllm_fl.contracts.spec import OpSpec

HELPERS = '''\
"""What the op is made of."""

import functools
import re

STEPS = {"small": 1.5, "large": (2, 3)}
PATTERN = re.compile("a+")
UNUSED = 1


@functools.cache
def half(x: float) -> float:
    """Half of it."""
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
from types import SimpleNamespace

from vllm_fl.contracts import OpSpec, Tolerance, Variant
from vllm_fl.contracts.checks import finite_number

from . import helpers
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
    text = f"{factor!r:>{8}}" "" f"{x=}" 'end'
    rest = [half(part) for part in (1, 2) if not math.isnan(part)]
    grown_by = (lambda y: helpers.PATTERN.sub("", text))(rest)
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

    def make(
        *changes: tuple[str, str], name: str = "", module: str = "op", compiled: bool = False
    ) -> OpSpec:
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
        if compiled:
            assert compileall.compile_dir(folder, quiet=1, legacy=True)
            for source in folder.glob("*.py"):
                source.unlink()
        monkeypatch.syspath_prepend(str(root))
        importlib.invalidate_caches()
        spec = importlib.import_module(f"{name}.{module}").SPEC
        assert isinstance(spec, OpSpec)
        return spec

    return make


SAME = {
    "a comment": ("# A comment.", "# Another one,\n    # of two lines."),
    "a docstring": ('"""x grown by a factor."""', '"""Something else."""'),
    "no docstring": ('    """x grown by a factor."""\n', ""),
    "a helper's docstring": ('    """Half of it."""\n', ""),
    "the format": ("for part in (1, 2) if", "for part in (\n        1,\n        2,\n    ) if"),
    "the way to write a number": ("return 7", "return 0x7"),
    "an annotation": ("def twice(x):", "def twice(x: 'torch.Tensor') -> object:"),
    "what lies above it": ("RULE = Rule(3)", "RULE = Rule(3)\nOTHER = 5"),
    "what it does not reach": ("UNUSED = 1", "UNUSED = 2"),
    "the reason of a tolerance": ('"a reason"', '"a better reason"'),
    "samples": ("samples=lambda dtype, device: ()", "samples=lambda dtype, device: []"),
    "the order of fields": ("oracle=grown,\n", "second_form=grown,\n    oracle=grown,\n"),
}

OTHER = {
    "the formula": ("* factor + STEPS", "* factor - STEPS"),
    "a number": ("(1, 2)", "(1, 3)"),
    "an empty text in a list": ("(1, 2)", '(1, 2, "")'),
    "a default": ("def grown(x, factor=2)", "def grown(x, factor=3)"),
    "a tolerance": ("1e-5", "1e-4"),
    "a dtype": ('tolerances={"float32"', 'tolerances={"float16"'),
    "a schema": ("float factor=2)", "float factor=2.0)"),
    "what may be consumed": ('consumable=frozenset({"x"}),', ""),
    "the op's name": ("def grown(", "def widened("),
    "a cached helper": ("return x / 2", "return x / 4"),
    "a helper of a helper": ("return 7", "return 8"),
    "a method": ("x * self.factor", "x / self.factor"),
    "an object's state": ("Rule(3)", "Rule(4)"),
    "data": ("(2, 3)", "(2, 4)"),
    "a pattern in a module": ('re.compile("a+")', 're.compile("b+")'),
    "what a closure holds": ("_plus(5)", "_plus(6)"),
    "a closure": ("lambda x: x + number", "lambda x: x - number"),
    "what the code imports itself": ("return x + x", "return x * 2"),
    "which helper of vllm-fl's": ("import finite_number", "import one_number as finite_number"),
    "which function of a library": ("math.isnan", "math.isinf"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_computes_nothing_keeps_it(change: tuple[str, str], made: Make) -> None:
    assert contract_digest(made(change)) == contract_digest(made())


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_the_op_computes_changes_it(change: tuple[str, str], made: Make) -> None:
    renamed = [("oracle=grown", "oracle=widened")] if "widened" in change[1] else []
    assert contract_digest(made(change, *renamed)) != contract_digest(made())


def test_outputs_change_it() -> None:
    spec = contracts()["silu_and_mul"]
    known = contract_digest(spec)
    wider = {"float32": Tolerance(1e-3, 1e-3, "")}
    for output in (Within(), Within(wider)):
        assert contract_digest(replace(spec, outputs=(output,))) != known
    assert contract_digest(replace(spec, dtypes=spec.dtypes[::-1])) == known


def test_it_is_the_same_in_another_package_and_module(made: Make) -> None:
    known = contract_digest(made(name="fl_before"))
    assert contract_digest(made(name="fl_after", module="moved")) == known


def test_what_an_oracle_remembers_is_not_part_of_it(made: Make) -> None:
    spec = made()
    known = contract_digest(spec)
    sys.modules[spec.oracle.__module__].__dict__["_seen"]["last"] = object()
    assert contract_digest(spec) == known


def test_code_without_source_has_one_by_what_it_computes(made: Make) -> None:
    def of(*changes: tuple[str, str]) -> str:
        return contract_digest(made(*changes, compiled=True))

    known = of()
    assert known == of() == of(SAME["a comment"]) == of(SAME["a docstring"])
    assert known != contract_digest(made())
    for change in ("the formula", "a helper of a helper", "a method", "a closure", "data"):
        assert of(OTHER[change]) != known, change


def test_code_that_was_made_at_a_prompt_has_one(made: Make) -> None:
    def of(text: str) -> str:
        names: dict[str, Callable[..., object]] = {}
        exec(text, names)
        return contract_digest(replace(made(), oracle=names["op"]))

    assert of("def op(x): return x + 1") == of("\ndef op(x): return x + 1")
    assert of("def op(x): return x + 1") != of("def op(x): return x + 2")


def test_code_that_reaches_itself_has_one(made: Make) -> None:
    loop = ("return 7", "return RING.pop() if RING else _offset()\n\n\nRING = [Rule]")
    assert contract_digest(made(loop)) == contract_digest(made(loop))


ASKED = """
import importlib, json, sys
from vllm_fl.contracts.meaning import contract_digest

third, *ops = sys.argv[1:]
specs = {op: importlib.import_module(f"vllm_fl_ops.contracts.{op}").SPEC for op in ops}
specs["a third party's"] = importlib.import_module(third).SPEC
assert "torch" not in sys.modules
print(json.dumps({op: contract_digest(spec) for op, spec in specs.items()}))
"""


def others() -> Mapping[str, str]:
    """Version -> another supported Python of this machine."""
    found = {}
    for version in ("3.11", "3.12", "3.13"):
        near = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        for python in [*map(str, near), shutil.which(f"python{version}")]:
            if python is None:
                continue
            done = subprocess.run([python, "-c", ""], check=False, capture_output=True)
            if done.returncode == 0:  # a shim may lead nowhere
                found[version] = python
                break
    found.pop(f"{sys.version_info.major}.{sys.version_info.minor}", None)
    return MappingProxyType(found)


def test_it_is_the_same_on_every_python(made: Make) -> None:
    pythons = others()
    if not pythons:
        pytest.skip("no other supported Python is here")
    third = made()
    here = {op: contract_digest(spec) for op, spec in contracts().items()}
    here["a third party's"] = contract_digest(third)
    own = Path(str(sys.modules[third.oracle.__module__].__file__)).parents[1]
    packages = [Path(package.__path__[0]).parent for package in (vllm_fl, vllm_fl_ops)]
    roots = os.pathsep.join(map(str, (own, *packages)))
    for version, python in pythons.items():
        told = subprocess.run(
            [python, "-B", "-c", ASKED, third.oracle.__module__, *contracts()],
            env={**os.environ, "PYTHONPATH": roots},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        assert json.loads(told) == here, version
