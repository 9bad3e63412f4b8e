"""The supported vLLM releases, and all code for the differences between them."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, MutableMapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ..plugins.installed import vllm_release
from ..settings.schema import VARIABLES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..contracts.binding import Binding

OLDEST, TOO_NEW = (0, 26), (0, 34)
"""Releases from `OLDEST` up to, but not including, `TOO_NEW` are supported."""

UNTAGGED = (0, 1)
"""The release in the version of a vLLM that was built from source without tags:
`0.1.dev1+g0123abc`."""

FORMER_LAYERS = frozenset({"fused_moe", "FusedMoE"})
"""Layer names of older vLLM releases that users' settings may still contain."""

OF_FEW_MODELS = (
    "vllm.model_executor.layers.fused_moe.",
    "vllm.model_executor.layers.mamba.",
    "vllm.third_party.flash_linear_attention.",
)
"""Modules of vLLM that take 0.4 to 1 s to import. Some query the GPU, and vLLM could not fork an
engine's processes after that. Spawned processes import all of vLLM again (20 s on one machine), and
the parent process keeps GPU memory."""

LAYER = re.compile(
    r"""^@(CustomOp|PluggableLayer)\.register\(\s*["'](\w+)["'].*?^class (\w+)""", re.M | re.S
)
"""Matches a registered layer class in vLLM's source, with the groups (kind, registered name, class
name)."""


def vllm_version() -> str:
    release = vllm_release()
    if release is not None:
        return release[1]
    import vllm

    return str(vllm.__version__)


def vllm_folders() -> list[Path]:
    spec = find_spec("vllm")
    return [Path(folder) for folder in (spec.submodule_search_locations if spec else None) or ()]


def obstacle() -> str | None:
    return unsupported_version(vllm_version())


def unsupported_version(version: str) -> str | None:
    """Return why this version of vLLM is not supported, or None if it is supported or unknown."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = tuple(map(int, numbers.groups())) if numbers else UNTAGGED
    if release == UNTAGGED or OLDEST <= release < TOO_NEW:
        return None
    span = f"{'.'.join(map(str, OLDEST))} to {TOO_NEW[0]}.{TOO_NEW[1] - 1}"
    return f"vLLM {version} is outside the supported range {span}"


def missing_requirement(binding: Binding) -> str:
    """Return the first of a binding's `needs` and `shared` that this vLLM lacks, or empty."""
    missing = [path for path in binding.needs if not _has(path)]
    missing += [path for path in binding.shared if shared_table(path) is None]
    return missing[0] if missing else ""


def _has(path: str) -> bool:
    """Whether vLLM has the object, or a class with code that sets it as an attribute."""
    module, _, names = path.partition(":")
    owner, _, name = names.rpartition(".")
    try:
        found: Any = resolve_name(f"{module}:{owner}")
        return hasattr(found, name) or f"self.{name} = " in inspect.getsource(found)
    except Exception:  # an older release, or a module that fails
        return False


def shared_table(path: str) -> MutableMapping[Any, Any] | None:
    try:
        found = resolve_name(path)
    except Exception:  # an older release, or a module that fails
        return None
    return found if isinstance(found, MutableMapping) else None


@cache
def declared_layers() -> dict[str, str]:
    """Read layer class -> registered name from vLLM's source, because a process imports few
    classes."""
    files = (file for root in vllm_folders() for file in root.rglob("*.py"))
    found = (layer for file in files for layer in LAYER.findall(file.read_text("utf-8")))
    return {cls: name for _, name, cls in found}


def hide_our_variables(more: Iterable[str] = ()) -> None:
    """Register vllm-fl's variables with vLLM, which would otherwise warn about unknown variables or
    fail.

    `vllm.envs.validate_environ` checks them up to release 0.30, `Platform.validate_environ` from
    0.31 on. vLLM's compile-cache key contains the names and values of the table. The key must not
    vary: all names are registered, and getters return None, because the plan's digest is a better
    key.
    """
    import vllm.envs

    table = getattr(vllm.envs, "environment_variables", {})  # an unsupported vLLM may lack it
    for name in sorted({*VARIABLES, *more, *os.environ}):
        if name.startswith("VLLM_FL_"):
            table.setdefault(name, lambda: None)


def leave_out_cuda_fusions(vllm_config: VllmConfig) -> None:
    """Disable fusion passes that vLLM does not define on a plugin's hardware. If Inductor does not
    compile norms and activations, vLLM enables their fusion with quantisation. It defines the
    passes only for CUDA and XPU, so startup would end in a NameError. A user's setting is kept."""
    passes = vllm_config.compilation_config.pass_config
    passes.fuse_norm_quant = passes.fuse_norm_quant or False
    passes.fuse_act_quant = passes.fuse_act_quant or False
