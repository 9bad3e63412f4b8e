"""`compat.OVERRIDDEN` and bindings' `needs` have all that integration imports or overrides of vLLM.

What is imported where a vLLM without it still serves is listed apart.
"""

from __future__ import annotations

import ast
from pathlib import Path

from vllm_fl.contracts import sizes
from vllm_fl.integration import compat
from vllm_fl.integration.compat import OVERRIDDEN
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ops import bindings
from vllm_fl_ops.contracts import rules

WITHOUT_AN_ENGINE = {
    "describing.py",
    "engine_args.py",
    "forcing.py",
    "leaving.py",
    "models.py",
    "stock.py",
    "threads.py",
    "workload.py",
}
"""What verbs of the command line alone import: a vLLM that lacks what they use still serves."""

MODULES = [p for p in Path(compat.__file__).parent.rglob("*.py") if p.name not in WITHOUT_AN_ENGINE]
MODULES += [Path(rules.__file__), Path(sizes.__file__), *Path(bindings.__path__[0]).glob("*.py")]

MIXINS = {"PlatformOverlay": "Platform", "PlannedWorker": "WorkerBase"}
"""A class of ours -> the class of vLLM's that it is mixed in before."""

SUBMODULES = {part for module in OVERRIDDEN for part in module.split(".")} | {"selector"}
DECLARED = {name for names in OVERRIDDEN.values() for name in names} | {
    path.partition(":")[2]
    for binding in known_contracts().bindings.values()
    for path in binding.needs
}

OF_PLACES = {
    "GemmaRMSNorm",
    "RMSNorm",
    "TritonExperts",
    "chunk_gated_delta_rule",
    "cutlass_scaled_mm",
    "grouped_topk",
    "is_deep_gemm_e8m0_used",
    "unquantized",
}
"""What a place calls beside what it takes; a release without it lacks the place, too."""


def used(path: Path) -> set[str]:
    """What one module imports from vLLM, and the methods of vLLM's classes that it overrides."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                node.body = []
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "vllm":
                found |= {alias.name for alias in node.names} - SUBMODULES
            case ast.ClassDef(name=name) if name in MIXINS:
                methods = (each.name for each in node.body if isinstance(each, ast.FunctionDef))
                ours = ("__", "vllm_fl", "_vllm_fl")
                found |= {f"{MIXINS[name]}.{m}" for m in methods if not m.startswith(ours)}
    return found


def test_everything_that_is_used_is_in_the_table() -> None:
    known = DECLARED | {name.partition(".")[0] for name in DECLARED}
    assert set().union(*map(used, MODULES)) - known == OF_PLACES
