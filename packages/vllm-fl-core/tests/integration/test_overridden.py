"""`compat.OVERRIDDEN` and bindings' `needs` name all of vLLM's that integration uses or overrides.

The sources are walked as `ast` gives them: what comes from vLLM is followed through assignments,
and each attribute of it must be in one of the two. What is asked for with a default (`getattr` with
three arguments) is optional, and is not in it. Names that stand in strings (the forwards of a
layer) are not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from vllm_fl.contracts import sizes
from vllm_fl.integration import compat
from vllm_fl.integration.compat import OVERRIDDEN
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_ops import bindings
from vllm_fl_ops.contracts import rules

ROOT = Path(compat.__file__).parent
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

MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path.name not in WITHOUT_AN_ENGINE]
MODULES += [
    Path(rules.__file__),
    Path(sizes.__file__),
    *sorted(Path(bindings.__path__[0]).glob("*.py")),
]

MIXINS = {"PlatformOverlay": "Platform", "PlannedWorker": "WorkerBase"}
"""A class of ours -> the class of vLLM's that it is mixed in before."""

TYPES = {
    "VllmConfig.attention_config": "AttentionConfig",
    "VllmConfig.cache_config": "CacheConfig",
    "VllmConfig.compilation_config": "CompilationConfig",
    "VllmConfig.kernel_config": "KernelConfig",
    "VllmConfig.model_config": "ModelConfig",
    "VllmConfig.parallel_config": "ParallelConfig",
    "VllmConfig.scheduler_config": "SchedulerConfig",
    "CompilationConfig.pass_config": "PassConfig",
    "KernelConfig.ir_op_priority": "IrOpPriorityConfig",
    "WorkerBase.vllm_config": "VllmConfig",
    "get_current_vllm_config": "VllmConfig",
    "get_world_group": "GroupCoordinator",
    "current_platform": "Platform",
    "ops": "ir.ops",
    "ir.ops.rms_norm": "IrOp",
    "ir.ops.fused_add_rms_norm": "IrOp",
    "IrOp.impls": "IrOpImpl",
}
"""What is read or called -> the type of what it gives, where its attributes are vLLM's, too."""

PARAMETERS = {
    ("_from_positions", "layer"): "RotaryEmbeddingBase",
    ("_intermediate", "config"): "VllmConfig",
    ("_rotary", "config"): "VllmConfig",
    ("model_sizes", "config"): "VllmConfig",
    ("", "config"): "VllmConfig",
    ("", "c"): "VllmConfig",
}
"""(function, parameter without a type of vLLM's) -> what it is."""


SUBMODULES = {part for module in OVERRIDDEN for part in module.split(".")} | {"selector"}
SUBMODULES -= {"platforms"}  # the package; `current_platform` is what has attributes
DECLARED = {name for names in OVERRIDDEN.values() for name in names} | {
    path.partition(":")[2]
    for binding in known_contracts().bindings.values()
    for path in binding.needs
}
CLASSES = {name.partition(".")[0] for name in DECLARED if "." in name}


def type_named(name: str) -> str | None:
    """The type of a name of vLLM's: a module's and a class's is itself."""
    return TYPES.get(name) or (name if name in SUBMODULES | CLASSES else None)


def is_vllms(name: str) -> bool:
    return not name.startswith(("__", "vllm_fl", "_vllm_fl"))


class Uses:
    """What one module uses of vLLM: names of modules, and `Class.attribute`."""

    def __init__(self, module: ast.Module) -> None:
        self.found: set[str] = set()
        known: dict[str, str] = {}
        for node in ast.walk(module):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []  # types alone
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for alias in node.names if node.module.split(".")[0] == "vllm" else ():
                    if given := type_named(alias.name):
                        known[alias.asname or alias.name] = given
                    if alias.name not in SUBMODULES:
                        self.found.add(alias.name)
        self.walk(module, known, "")

    def walk(self, scope: ast.AST, outer: Mapping[str, str], owner: str) -> None:
        """Follow what is known of vLLM's through one scope."""
        known = dict(outer)
        if isinstance(scope, ast.FunctionDef | ast.Lambda):
            for arg in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs):
                said = ast.unparse(arg.annotation) if arg.annotation else ""
                name = getattr(scope, "name", "")
                known.pop(arg.arg, None)
                given = PARAMETERS.get((name, arg.arg)) or MIXINS.get(said)
                given = given or (said if said == "VllmConfig" else None)
                if owner in MIXINS and arg.arg in ("self", "cls"):
                    given = MIXINS[owner]
                if given:
                    known[arg.arg] = given
        for node in self.own(scope):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                self.assign(node.targets[0], node.value, known)
            elif isinstance(node, ast.AnnAssign) and (
                given := type_named(ast.unparse(node.annotation))
            ):
                known[ast.unparse(node.target)] = given
            if isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
                self.type_of(node, known, owner)
        for node in self.inner(scope):
            if isinstance(node, ast.ClassDef):
                for method in node.body if node.name in MIXINS else ():
                    if isinstance(method, ast.FunctionDef) and is_vllms(method.name):
                        self.found.add(f"{MIXINS[node.name]}.{method.name}")
                self.walk(node, known, node.name)
            else:
                self.walk(node, known, owner)

    def own(self, scope: ast.AST) -> Iterator[ast.AST]:
        """The nodes of a scope without those of the scopes inside, in the order of the source."""
        for node in ast.iter_child_nodes(scope):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Lambda):
                yield node
                yield from self.own(node)

    def inner(self, scope: ast.AST) -> Iterator[ast.AST]:
        """The scopes inside a scope."""
        for node in (scope, *self.own(scope)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.Lambda):
                    yield child

    def assign(self, target: ast.expr, value: ast.expr, known: dict[str, str]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, part in zip(target.elts, value.elts, strict=True):
                self.assign(one, part, known)
        elif isinstance(target, ast.Name):
            given = self.type_of(value, known, "")
            known.pop(target.id, None)
            if given:
                known[target.id] = given

    def type_of(self, node: ast.AST, known: Mapping[str, str], owner: str) -> str | None:
        """The type of an expression, where it is vLLM's; what it reads of vLLM is noted."""
        match node:
            case ast.Name(id=name):
                return known.get(name)
            case ast.Call(func=ast.Name(id="super")):
                return MIXINS.get(owner)
            case ast.Call(func=ast.Name(id="getattr"), args=[of, _]):
                return "IrOp" if self.type_of(of, known, owner) == "ir.ops" else None
            case ast.Call(func=function):
                return self.type_of(function, known, owner)
            case ast.Subscript(value=value):
                return self.type_of(value, known, owner)
            case ast.Attribute(value=value, attr=attribute):
                base = self.type_of(value, known, owner)
                if base is None or not is_vllms(attribute):
                    return None
                path = f"{base}.{attribute}" if base not in SUBMODULES else attribute
                if attribute != "ops":
                    self.found.add(path.removeprefix("ir.ops."))
                return type_named(path)
        return None


def used() -> dict[str, set[str]]:
    """Name -> the modules of ours that use it."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for name in Uses(ast.parse(path.read_text())).found:
            found.setdefault(name, set()).add(path.name)
    return found


def undeclared(declared: set[str]) -> dict[str, set[str]]:
    """What is used and is not in the table. A class is in it with any of its attributes."""
    classes = {name.partition(".")[0] for name in declared}
    return {name: where for name, where in used().items() if name not in declared | classes}


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


def test_everything_that_is_used_is_in_the_table() -> None:
    assert set(undeclared(DECLARED)) == OF_PLACES


@pytest.mark.parametrize(
    "name",
    [
        "AttentionConfig.backend",
        "CompilationConfig.mode",
        "CompilationMode.NONE",
        "GroupCoordinator.world_size",
        "IrOp.register_impl",
        "IrOpImpl.impl_fn",
        "IrOpImpl.uuid",
        "IrOpPriorityConfig.set_default",
        "KernelConfig.ir_op_priority",
        "ModelConfig.get_num_kv_heads",
        "ParallelConfig.worker_cls",
        "Platform.check_and_update_config",
        "Platform.get_attn_backend_cls",
        "RotaryEmbedding.forward_static",
        "RotaryEmbeddingBase.head_size",
        "SiluAndMul.forward_native",
        "VllmConfig.attention_config",
        "VllmConfig.kernel_config",
        "WorkerBase.device",
        "WorkerBase.load_model",
        "builtin_platform_plugins",
        "get_current_vllm_config",
        "op_registry_oot",
    ],
)
def test_one_that_is_not_there_is_found(name: str) -> None:
    assert name in DECLARED
    assert name in undeclared(DECLARED - {name})


def test_nothing_in_the_table_is_a_name_that_we_have_given_up() -> None:
    mentioned = set()
    for path in MODULES:
        if path.name == "compat.py":
            mentioned |= {
                "environment_variables",
                "fuse_act_quant",
                "fuse_norm_quant",
                "pass_config",
            }
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                    mentioned.add(name)
                case ast.FunctionDef(name=name):
                    mentioned.add(name)
                case (
                    ast.Constant(value=str(text))
                    | ast.JoinedStr(values=[*_, ast.Constant(value=str(text))])
                ):
                    if ":" not in text:  # as those of `needs`
                        mentioned |= {text, text.rpartition(".")[2]}  # a place's path
    assert {name for name in DECLARED if name.rpartition(".")[2] not in mentioned} == set()
