"""The digest of a sealed plan: everything that affects compiled code and is not in vLLM's cache
key."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from importlib_metadata import distributions

from ..plugins.inspection import Key
from ..plugins.installed import CORE, installed_version
from ..plugins.plugin import Owner, Plugin
from ..plugins.types import Impl, KernelImpl, LayerImpl, OpImpl
from ..settings.schema import Setting, Settings
from .plan import Plan

BENEATH = ("vllm", "torch", "triton")
"""Distributions that all implementations use. They are identified by version, because they are too
large to hash."""

UNKNOWN = "no files found"
NO_CODE = {"__pycache__", ".git"}


def fingerprint(
    plan: Plan,
    owners: Mapping[Key, Owner],
    authors: Mapping[str, Owner] = MappingProxyType({}),
    *,
    required: str = "",
    settings: Settings | None = None,
    plugins: Iterable[Plugin] = (),
) -> dict[str, Any]:
    """Return the facts of a plan as JSON-able values. Plans with equal facts run the same code.

    Args:
        owners: (op, impl id) -> the owner of the implementation.
        authors: op -> the owner of its contract and its binding.
        required: the property that implementations must have, or empty.

    Returns:
        `mode`, `strict` and `required`; `ops`, each op's candidates with the hash of their code,
            also by size (key `rms_norm(<=16)`); `contracts`, the code of the planned ops'
            contracts; `versions` of core and `BENEATH`; and `settings` of the plan's plugins,
            because a compiler may have inlined them.
    """
    rows = {
        f"{op}(<={ceiling})" if ceiling else op: [
            (impl, owners.get((op, impl.impl_id), Owner(""))) for impl in impls
        ]
        for op, entry in plan.entries.items()
        if entry.is_planned
        for ceiling, impls in entry.candidates
    }
    authors = {op: each for op, each in sorted(authors.items()) if not plan.is_stock(op)}
    used = {owner for row in rows.values() for _, owner in row} | {*authors.values()}
    keys = sorted(each.key for p in plugins if p.owner in used for each in p.settings)
    return {
        "mode": plan.mode,
        "strict": plan.strict,
        "required": required,
        "ops": {op: [_candidate(impl, owner) for impl, owner in row] for op, row in rows.items()},
        "contracts": {
            op: code_facts(author, plan.contracts[op].oracle.__module__)
            for op, author in authors.items()
        },
        "versions": package_versions(),
        "settings": {key: _values(settings[key]) for key in keys if settings and key in settings},
    }


def _values(setting: Setting) -> list[Any]:
    """Return a setting's value, and the text of its variable if a file has overridden it. Code of a
    plugin may read either."""
    texts = [text for text, origin in setting.overrides if origin.startswith("environment")]
    return [setting.value, *texts]


def package_versions() -> dict[str, str]:
    """Return the versions of `BENEATH` and core. For core, the hash of its code is added."""
    beneath = {name: found for name in BENEATH if (found := installed_version(name))}
    return {**beneath, CORE: f"{installed_version(CORE)} {code_hash(CORE, 'vllm_fl')}"}


def _candidate(impl: Impl, owner: Owner) -> dict[str, Any]:
    code = impl.fn if isinstance(impl, OpImpl) else impl.class_path
    module = _module_of(code)
    if owner.distribution is None and _top(module) in BENEATH:
        module = owner.plugin  # a plugin's module that uses a function of torch
    facts = code_facts(owner, module)
    if facts["source"] == UNKNOWN:
        name = code if isinstance(code, str) else type(code).__qualname__
        facts["source"] = f"{UNKNOWN}: {name}"
    return {
        "impl": impl.impl_id,
        **({"class": impl.class_path} if isinstance(impl, LayerImpl | KernelImpl) else {}),
        "distribution": str(owner.distribution),
        "version": str(owner.version),
        **facts,
    }


def code_facts(owner: Owner, module: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"source": code_hash(owner.distribution, module)}
    if owner.kernels:
        facts["kernels"] = {
            name: f"{installed_version(name)} {code_hash(name)}" for name in sorted(owner.kernels)
        }
    return facts


def digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_hash(distribution: str | None, module: str = "") -> str:
    """Return a hash of all files in a distribution's top-level modules: 16 hexadecimal digits, or
    `UNKNOWN` without files. `distribution` is None for code without a distribution; `module` is one
    of its modules."""
    loaded = sys.modules.get(_top(module))
    return _code_of(distribution, _top(module), str(getattr(loaded, "__file__", None)))


@cache
def _code_of(distribution: str | None, top: str, file: str) -> str:
    """Compute the hash. `file` is only a part of the cache key: the file from which the top-level
    module was loaded."""
    tops = {top, *_top_levels(distribution)} - {"", *BENEATH}
    found = sorted(each for top in tops for each in _files(top))
    state = hashlib.sha256()
    for name, path in found:
        content = _content(path)
        state.update(f"{len(name)}:{name}:{len(content)}:".encode())
        state.update(content)
    return state.hexdigest()[:16] if found else UNKNOWN


def _top_levels(name: str | None) -> set[str]:
    dist = next(iter(distributions(name=name)), None) if name else None
    if dist is None:
        return set()
    tops = set((dist.read_text("top_level.txt") or "").split())
    if not tops:  # an editable installation has no files in the environment
        inside = (file.parts for file in dist.files or () if file.parts[0] != "..")
        first = (parts[0] if parts[1:] else inspect.getmodulename(parts[0]) for parts in inside)
        tops = {top for top in first if top and top.isidentifier() and top not in NO_CODE}
    return (tops | {_top(entry.module) for entry in dist.entry_points}) or {
        str(name).replace("-", "_")
    }


def _files(top: str) -> Iterator[tuple[str, str]]:
    module: Any = sys.modules.get(top)
    if module is None:
        try:
            spec = find_spec(top)
        except (ImportError, ValueError):
            spec = None
        file = getattr(spec, "origin", None)
        folders = getattr(spec, "submodule_search_locations", None)
    else:
        file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
    if folders is None and file is not None:
        yield top, file
    seen: set[str] = set()
    for root in folders or ():
        for here, inner, names in os.walk(root, followlinks=True):
            real = os.path.realpath(here)
            inner[:] = () if real in seen else sorted({*inner} - NO_CODE)
            for name in () if real in seen else names:
                path = os.path.join(here, name)
                if not (name.endswith(".pyc") and os.path.exists(path[:-1])):
                    yield f"{top}/{os.path.relpath(path, root)}", path
            seen.add(real)


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b"(cannot be read)"


def _top(module: str) -> str:
    return module.partition(".")[0]


def _module_of(code: Callable[..., Any] | str) -> str:
    if isinstance(code, str):
        return code.rpartition(".")[0]
    code = inspect.unwrap(code)
    function = getattr(code, "func", code)  # functools.partial
    return str(getattr(function, "__module__", None) or type(function).__module__ or "")
