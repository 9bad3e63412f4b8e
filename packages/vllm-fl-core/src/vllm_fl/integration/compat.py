"""What differs between releases of vLLM, and which of them we support. The only file that knows."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..plugins.installed import vllm_release
from ..settings.schema import VARIABLES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..contracts.binding import Binding

OLDEST, TOO_NEW = (0, 26), (0, 34)
"""Supported: from `OLDEST` up to, not including, `TOO_NEW`."""

UNTAGGED = (0, 1)
"""The release that vLLM's build gives itself where the source has no tags: `0.1.dev1+g0123abc`."""

FORMER_LAYERS = frozenset({"fused_moe", "FusedMoE"})
"""Layer names of vLLM releases that are gone, which users' lists of layers may still hold."""

_OPENING = (
    "vllm.model_executor.layers.mamba.gdn.",
    "vllm.third_party.flash_linear_attention.",
)
"""Modules with layers of vLLM's that ask what GPU there is, while they are imported."""

_NAMES = {
    "platforms": ("builtin_platform_plugins current_platform",),
    "platforms.interface": (
        "Platform: check_and_update_config device_type fp8_dtype get_attn_backend_cls "
        "get_default_ir_op_priority get_device_capability get_device_communicator_cls "
        "get_device_name get_pass_manager_cls "
        "import_ir_kernels is_cpu is_cuda is_rocm is_xpu pre_register_and_update",
    ),
    "envs": ("environment_variables",),
    "compilation.passes.inductor_pass": ("InductorPass: hash_source uuid", "get_pass_context"),
    "compilation.passes.pass_manager": ("PostGradPassManager: add configure",),
    "config.attention": ("AttentionConfig: backend",),
    "config.cache": ("CacheConfig: block_size cache_dtype",),
    "config.compilation": (
        "CompilationConfig: backend compile_ranges_endpoints compile_sizes "
        "cudagraph_capture_sizes cudagraph_mode custom_ops mode pass_config "
        "static_forward_context",
        "CompilationMode: NONE STOCK_TORCH_COMPILE VLLM_COMPILE",
        "CUDAGraphMode: NONE",
        "PassConfig: fuse_act_quant fuse_norm_quant",
    ),
    "config.kernel": (
        "IrOpPriorityConfig: set_default",
        "KernelConfig: ir_op_priority",
    ),
    "config.model": (
        "ModelConfig: dtype get_head_size get_hidden_size get_num_attention_heads "
        "get_num_kv_heads get_vocab_size hf_config hf_text_config max_model_len quantization "
        "use_mla",
    ),
    "config.parallel": (
        "ParallelConfig: data_parallel_size enable_expert_parallel pipeline_parallel_size "
        "ray_runtime_env tensor_parallel_size use_ray worker_cls world_size",
    ),
    "config.scheduler": ("SchedulerConfig: max_num_batched_tokens",),
    "config.vllm": (
        "VllmConfig: additional_config attention_config cache_config "
        "compilation_config kernel_config lora_config model_config "
        "parallel_config scheduler_config",
        "get_current_vllm_config set_current_vllm_config",
    ),
    "distributed.device_communicators.base_device_communicator": (
        "DeviceCommunicatorBase: destroy",
    ),
    "distributed.parallel_state": (
        "GroupCoordinator: cpu_group device_communicator rank world_size",
        "_groups get_world_group",
    ),
    "engine.arg_utils": ("EngineArgs",),
    "forward_context": (
        "ForwardContext: no_compile_layers skip_compiled",
        "create_forward_context get_forward_context is_forward_context_available",
    ),
    "ir.op": (
        "IrOp: allow_inplace impls register_impl torch_op",
        "IrOpImpl: impl_fn inplace supported supports_args uuid",
    ),
    "model_executor.custom_op": (
        "CustomOp: dispatch_forward forward forward_cpu forward_cuda forward_native forward_oot",
        "PluggableLayer op_registry op_registry_oot",
    ),
    "model_executor.layers.attention_layer_base": ("AttentionLayerBase",),
    "v1.attention.backends.registry": ("AttentionBackendEnum",),
    "v1.worker.worker_base": (
        "WorkerBase: compile_or_warm_up_model device get_model init_device list_loras load_model "
        "rank shutdown vllm_config",
    ),
}
"""Module below `vllm` -> `Class: attribute attribute`, and names of the module itself."""

OVERRIDDEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        module: tuple(
            ".".join(filter(None, (owner, name)))
            for owner, _, names in (entry.rpartition(": ") for entry in entries)
            for name in names.split()
        )
        for module, entries in _NAMES.items()
    }
)
"""Module below `vllm` -> what of it we override, call, read or patch; a vLLM that lacks one runs as
stock. What is optional, and asked for with a default, is not here; nor is what a single op needs,
which its binding names."""


def vllm_version() -> str:
    """The installed vLLM's version."""
    release = vllm_release()
    if release is not None:
        return release[1]
    import vllm

    return str(vllm.__version__)


def vllm_folders() -> list[Path]:
    """Where the package `vllm` lies, which is not imported; nowhere where there is none."""
    spec = find_spec("vllm")
    return [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]


@cache
def obstacle() -> str | None:
    """Why we cannot run inside this vLLM, in one line; None when we can. Imports no vLLM."""
    version = vllm_version()
    problem = outside(version)
    if problem is None:
        lacks = missing(vllm_folders())
        problem = lacks and f"vLLM {version} has no {lacks}, which vllm-fl overrides or calls"
    return problem


def outside(version: str) -> str | None:
    """Why a vLLM of this version is not supported; None when it is, or cannot be told."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = tuple(map(int, numbers.groups())) if numbers else UNTAGGED
    # A build that does not know its release is judged by what it has.
    if release == UNTAGGED or OLDEST <= release < TOO_NEW:
        return None
    span = f"{'.'.join(map(str, OLDEST))} to {TOO_NEW[0]}.{TOO_NEW[1] - 1}"
    return f"vLLM {version} is outside the supported range {span}"


def missing(folders: Iterable[Path]) -> str | None:
    """The first name of `OVERRIDDEN` that a vLLM lacks, as `vllm.module.name`; None for none.

    It is read from the source: where the platform is chosen vLLM's modules may not be imported,
    since most of them ask for the platform; and later a choice of stock would come too late.

    Args:
        folders: where the package `vllm` lies.
    """
    roots = list(folders)
    for module, names in OVERRIDDEN.items():
        known = _defined(roots, module)
        if known is None:
            return f"vllm.{module}"
        for name in names:
            if name not in known:
                return f"vllm.{module}.{name}"
    return None


def lacks(binding: Binding) -> str:
    """The first of a binding's `needs` and `shared` that the installed vLLM lacks, or nothing.

    What is needed is read from the source, as `missing` does, since it may be an attribute that
    only instances have; what is shared is an object, and is looked up.
    """
    for needed in binding.needs:
        if not _is_defined(needed):
            return needed
    for path in binding.shared:
        if shared_table(path) is None:
            return path
    return ""


def opens_the_device(module: str) -> bool:
    """Whether importing a module of vLLM's would open this process's GPU, which is not open yet.

    vLLM cannot fork an engine's processes then. Spawned ones import all of vLLM once more, which
    took 20 s on one machine, and the process that starts them keeps memory of the GPU.
    """
    if not module.startswith(_OPENING) or module in sys.modules:
        return False
    import torch
    from vllm.platforms import current_platform

    return current_platform.device_type == "cuda" and not torch.cuda.is_initialized()


def shared_table(path: str) -> MutableMapping[Any, Any] | None:
    """The dictionary at a path of a binding's `shared`; None where there is none."""
    module, _, names = path.partition(":")
    try:
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except Exception:  # a release without it, or somebody's module that fails
        return None
    return found if isinstance(found, MutableMapping) else None


@cache
def _is_defined(path: str) -> bool:
    module, _, name = path.partition(":")
    known = _defined(vllm_folders(), module.removeprefix("vllm."))
    return known is not None and name in known


def _defined(roots: Iterable[Path], module: str) -> frozenset[str] | None:
    """What a module defines, by its source; None where there is none.

    Args:
        roots: where its package lies.
        module: its name below the package.
    """
    stem = module.replace(".", "/")
    files = (root / form for root in roots for form in (f"{stem}.py", f"{stem}/__init__.py"))
    source = next((file for file in files if file.is_file()), None)
    return None if source is None else frozenset(_names(ast.parse(source.read_bytes()).body))


def _names(body: Iterable[ast.stmt], prefix: str = "") -> Iterator[str]:
    """What these statements define: `function`, `Class`, `Class.attribute`, imported names."""
    for statement in body:
        match statement:
            case ast.ClassDef(name=name, body=inner):
                yield prefix + name
                yield from _names(inner, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
                if name == "__init__":
                    yield from (prefix + attribute for attribute in _set_on_self(statement))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
            case ast.Assign(targets=targets):
                yield from (prefix + t.id for t in targets if isinstance(t, ast.Name))
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (prefix + (alias.asname or alias.name) for alias in aliases)
            case ast.If(body=inner, orelse=rest) | ast.Try(body=inner, orelse=rest):
                yield from _names([*inner, *rest], prefix)


def _set_on_self(method: ast.stmt) -> Iterator[str]:
    """The attributes that a method sets on its object."""
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


@dataclass(frozen=True, order=True)
class DeclaredLayer:
    """A class that vLLM's source registers as a layer.

    Args:
        registered: the name that it is registered by.
        cls: the class's name, by which vLLM's table of replacements knows it.
        kind: `CustomOp` or `PluggableLayer`.
        module: where it is, below `vllm`.
    """

    registered: str
    cls: str
    kind: str
    module: str


def declared_layers(folders: Iterable[Path]) -> list[DeclaredLayer]:
    """Every layer that a vLLM registers, read from its source: most are not imported in a process.

    Args:
        folders: where the package `vllm` lies.
    """
    found: list[DeclaredLayer] = []
    for root in folders:
        for file in sorted(root.rglob("*.py")):
            source = file.read_bytes()
            if b"CustomOp.register(" in source or b"PluggableLayer.register(" in source:
                module = ".".join(file.relative_to(root).with_suffix("").parts)
                found += _registered(ast.parse(source), module.removesuffix(".__init__"))
    return sorted(found)


def _registered(source: ast.Module, module: str) -> Iterator[DeclaredLayer]:
    classes = (node for node in ast.walk(source) if isinstance(node, ast.ClassDef))
    for cls in classes:
        for decorator in cls.decorator_list:
            match decorator:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Name(id="CustomOp" | "PluggableLayer" as kind), attr="register"
                    ),
                    args=[ast.Constant(value=str(name)), *_],
                ):
                    yield DeclaredLayer(name, cls.name, kind, module)


def hide_our_variables(more: Iterable[str] = ()) -> None:
    """Make our variables known to vLLM, so that it neither warns of them nor fails.

    Args:
        more: the variables of plugins' settings, once these are loaded.

    Up to 0.30 `vllm.envs.validate_environ` asks, from 0.31 on `Platform.validate_environ`; both
    look into one table. The getters return None, since values would enter vLLM's compile key,
    which our plan's digest does better; names enter it too, so all are given at all times.
    """
    import vllm.envs

    table = getattr(vllm.envs, "environment_variables", {})  # a vLLM out of range may lack it
    for name in sorted({*VARIABLES, *more, *os.environ}):
        if name.startswith("VLLM_FL_"):
            table.setdefault(name, lambda: None)


def leave_out_cuda_fusions(vllm_config: VllmConfig) -> None:
    """Keep vLLM's pass manager, on hardware that is not vLLM's own, from passes that are not there.

    Where norms and activations are not left to Inductor, it turns their fusion with quantisation on
    by default, and defines these passes for CUDA and XPU alone: the start would end in a NameError.
    What a user sets stands.
    """
    passes = vllm_config.compilation_config.pass_config
    passes.fuse_norm_quant = passes.fuse_norm_quant or False
    passes.fuse_act_quant = passes.fuse_act_quant or False
