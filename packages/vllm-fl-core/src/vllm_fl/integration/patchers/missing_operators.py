"""Operators for a vLLM that was built without compiled operators (`VLLM_TARGET_DEVICE=empty`).

vLLM's code still calls operators by name, and checks with `hasattr` which operators exist.
Therefore only the operators that an engine needs are defined. These are the operators of planned
ops and, in compiled mode, operators that a vLLM pass reads in every graph. A defined operator
exists until the process ends. Its kernel raises an error. The planned implementation overrides the
kernel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from ...contracts.binding import OperatorTarget
from ...errors import NoKernelError
from ..compat import vllm_folders, vllm_version
from ..targets import installed_bindings, targets

TABLE = Path(__file__).parent.parent / "schemas.json"


_libraries: dict[str, torch.library.Library] = {}
"""Operator -> the library that defines it. The operator exists as long as its library."""


def schema(name: str) -> str:
    """Return the schema of an operator that vllm-fl may define. The result is empty if vLLM has
    compiled files, if other code has defined an operator of the namespace, or if the schema in this
    release is unknown."""
    known = _table(vllm_version()).get(name)
    if known is None or compiled_files() or _brought(name.partition("::")[0]):
        return ""
    return known[0]


def read_always() -> Iterator[tuple[str, str]]:
    """Yield (operator, schema) for operators that vLLM reads in every graph and vllm-fl may
    define."""
    for name, (_, is_read) in _table(vllm_version()).items():
        text = schema(name) if is_read else ""
        if text:
            yield name, text


def has_ours(name: str) -> bool:
    return name in _libraries


@cache
def compiled_files() -> tuple[str, ...]:
    """Return the installed vLLM's extension modules with operators, such as `_C.abi3.so`."""
    return tuple(
        sorted(
            file.name
            for folder in vllm_folders()
            for file in folder.glob("*_C*")
            if file.name.endswith(tuple(EXTENSION_SUFFIXES))
        )
    )


def _brought(namespace: str) -> bool:
    names: Iterable[str] = torch._C._dispatch_get_all_op_names()
    return any(
        name.startswith(f"{namespace}::") and name.partition(".")[0] not in _libraries
        for name in names
    )


@cache
def _table(version: str) -> Mapping[str, tuple[str, bool]]:
    """Return operator -> (schema, whether vLLM reads it in every graph), for one release."""
    release = _numbers(version)
    return {
        entry["schema"].partition("(")[0]: (entry["schema"], entry["read"])
        for entry in json.loads(TABLE.read_text())["operators"]
        if _numbers(entry["first"]) <= release <= _numbers(entry["last"])
    }


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def define(schemas: Mapping[str, str]) -> None:
    for name, text in schemas.items():
        if name not in _libraries:
            namespace, _, rest = text.partition("::")
            library = torch.library.Library(namespace, "FRAGMENT")
            library.define(rest)
            # These operators return nothing, because they write to the caller's tensors.
            torch.library.register_fake(name, lambda *_, **__: None, lib=library)
            raising = partial(_without_kernel, name)
            library.impl(rest.partition("(")[0], raising, "CompositeExplicitAutograd")
            _libraries[name] = library


def _without_kernel(name: str, /, *_: Any, **__: Any) -> None:
    op = next(
        (op for op, t in targets(installed_bindings(), OperatorTarget) if t.name == name), None
    )
    instead = "disable the feature that calls it"
    if op is not None:
        instead = (
            f"select an implementation of '{op}' that supports this call (`vllm-fl explain {op}` "
            "lists the installed implementations)"
        )
    raise NoKernelError(
        f"Operator {name} was called and has no kernel: this vLLM ({vllm_version()}) is an empty "
        "build, without compiled operators (VLLM_TARGET_DEVICE=empty). Install vLLM built for this "
        f"device, or {instead}.",
        operator=name,
        op=op,
    )
