"""Operators for a vLLM that was built without any (`VLLM_TARGET_DEVICE=empty`).

Others of vLLM's code call operators by name there, too, and ask with `hasattr` which there are. So
an operator is defined only while an engine is there that needs it, and undefined with the last: for
an op that its plan implements, and, where models are compiled, for vLLM's pass that reads some
whatever the graph. Its own kernel raises; what the plan implements is put in front of that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

from ...errors import NoKernelError
from ..compat import vllm_folders, vllm_version

TABLE = Path(__file__).parent.parent / "schemas.json"


@dataclass(frozen=True)
class Definition:
    """An operator that this vLLM lacks and an engine needs.

    Args:
        name: the operator, as `_C::silu_and_mul`.
        schema: its schema in this release, as vLLM's CUDA build has it.
        op: the op that it computes; empty where no binding names it.
    """

    name: str
    schema: str
    op: str = ""


@dataclass
class _Defined:
    """A definition that torch has been given, and how many engines need it."""

    definition: Definition
    library: torch.library.Library
    engines: int = 0


_defined: dict[str, _Defined] = {}


def schema(name: str) -> str:
    """The schema of an operator that is ours to define; empty where it is not.

    It is not where a part of vLLM is compiled, where somebody else has defined it or any operator
    of its namespace, and where the release's schema is not known.
    """
    known = _table(vllm_version()).get(name)
    if known is None or compiled_files() or _brought(name.partition("::")[0]):
        return ""
    return known[0]


def read_always() -> Iterator[tuple[str, str]]:
    """(operator, schema) of what vLLM reads in every graph, as far as it is ours to define."""
    for name, (_, is_read) in _table(vllm_version()).items():
        text = schema(name) if is_read else ""
        if text:
            yield name, text


def has_ours(name: str) -> bool:
    """Whether an operator is there because we defined it."""
    return name in _defined


@cache
def compiled_files() -> tuple[str, ...]:
    """The extensions with operators that the installed vLLM has, as `_C.abi3.so`."""
    return tuple(
        sorted(
            file.name
            for folder in vllm_folders()
            for file in folder.glob("*_C*")
            if file.name.endswith(tuple(EXTENSION_SUFFIXES))
        )
    )


def _brought(namespace: str) -> bool:
    """Whether somebody else has defined an operator of this namespace."""
    names: Iterable[str] = torch._C._dispatch_get_all_op_names()
    return any(
        name.startswith(f"{namespace}::") and name.partition(".")[0] not in _defined
        for name in names
    )


@cache
def _table(version: str) -> Mapping[str, tuple[str, bool]]:
    """Operator -> (its schema, whether vLLM reads it in every graph), in one release."""
    release = _numbers(version)
    return {
        entry["schema"].partition("(")[0]: (entry["schema"], entry["read"])
        for entry in json.loads(TABLE.read_text())["operators"]
        if _numbers(entry["first"]) <= release <= _numbers(entry["last"])
    }


def _numbers(version: str) -> tuple[int, int]:
    """The minor release that a version belongs to."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def define(wanted: Iterable[Definition]) -> None:
    """Define operators for an engine, those that are not defined yet."""
    for definition in wanted:
        known = _defined.get(definition.name)
        if known is None:
            known = _defined[definition.name] = _Defined(definition, _library_of(definition))
        known.engines += 1


def _library_of(definition: Definition) -> torch.library.Library:
    """What holds the operator: as long as this is there, so is the operator."""
    namespace, _, rest = definition.schema.partition("::")
    operator = rest.partition("(")[0]
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(rest)

    def fake(*args: Any, **more: Any) -> None:
        """It returns nothing: its results are where the caller wants them."""

    def without_kernel(*args: Any, **more: Any) -> None:
        raise _no_kernel(definition)

    torch.library.register_fake(definition.name, fake, lib=library)
    library.impl(operator, without_kernel, "CompositeExplicitAutograd")
    return library


def _no_kernel(definition: Definition) -> NoKernelError:
    name, op = definition.name, definition.op
    if op:
        instead = (
            f"have an implementation of '{op}' planned that takes this call (`vllm-fl explain {op}`"
            " shows those that there are)"
        )
    else:
        instead = "turn off what calls it"
    return NoKernelError(
        f"Operator {name} was called and has no kernel: this vLLM ({vllm_version()}) is an empty "
        "build, without compiled operators (VLLM_TARGET_DEVICE=empty). Install vLLM built for this "
        f"device, or {instead}.",
        operator=name,
        op=op or None,
    )


def forget(wanted: Iterable[Definition], kept: Collection[str]) -> None:
    """An engine has ended: what no other one needs is undefined.

    Args:
        wanted: what was defined for it.
        kept: operators that somebody else has overridden meanwhile, and that must stay.
    """
    for definition in wanted:
        _defined[definition.name].engines -= 1
    for name, known in list(_defined.items()):
        if not known.engines and name not in kept:
            del _defined[name]
            _retire(known.definition)
            known.library._destroy()


def _retire(definition: Definition) -> None:
    """Keep those who hold the operator itself from torch's memory, where it will not be any more.

    A model may keep `torch.ops._C.silu_and_mul`. To call it after it was undefined would read freed
    memory: now it calls the operator of that name that is there, or says that there is none.
    """
    namespace, _, operator = definition.name.partition("::")
    held = vars(getattr(torch.ops, namespace)).get(operator)
    if held is None:
        return

    def by_name(*args: Any, **more: Any) -> Any:
        if definition.name not in _defined:
            raise _no_kernel(definition)
        return getattr(getattr(torch.ops, namespace), operator)(*args, **more)

    for one in (held, held.default):
        one._op = by_name
