"""The distribution as a whole: its imports and its contents."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules, walk_packages

import vllm_fl_ops.bindings
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.reserved import FL_OPS

MODULES = [m.name for m in walk_packages(vllm_fl_ops.__path__, "vllm_fl_ops.")]


def test_no_module_or_contract_of_it_imports_torch_vllm_or_a_kernel() -> None:
    code = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "importlib.import_module('vllm_fl.plugins.registry').known_contracts()\n"
        "print(json.dumps(sorted({'torch', 'vllm', 'triton', 'flag_gems'} & {*sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(MODULES)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == []


def test_each_op_has_a_contract_and_a_binding() -> None:
    known = known_contracts()
    ours = {op for op, author in known.authors.items() if author.distribution == FL_OPS}
    bound = set()
    for name in (m.name for m in iter_modules(vllm_fl_ops.bindings.__path__) if m.name[0] != "_"):
        binding = import_module(f"vllm_fl_ops.bindings.{name}").BINDING
        bound |= {*binding} if isinstance(binding, Mapping) else {name}
    assert ours == bound
