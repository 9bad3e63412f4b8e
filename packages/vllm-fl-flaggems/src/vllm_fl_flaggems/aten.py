"""Replacement of PyTorch operators by FlagGems, and the list of replaced operators."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from vllm_fl import WorkerContext, WorkerReport
from vllm_fl.dispatch import get_default_manager

from .loading import available, flag_gems, problem
from .settings import BLACKLIST, OPLIST, USE, WHITELIST, blacklist, check_list_names, value

NO_LIST = f"no list selects any ({WHITELIST.variable}, {BLACKLIST.variable})"

_replaced: list[tuple[str, ...]] = []
"""The replaced operators of this process, if any. Replacing cannot be undone."""


def replace_operators(context: WorkerContext) -> WorkerReport | None:
    """Replace PyTorch operators as configured, once per process.

    A whitelist has the FlagGems functions to use. A blacklist has functions not to use, and also
    excludes all overloads and in-place variants of their operators. Operators are replaced only
    with a list, because no contract defines what they compute, and because vLLM does not start on
    every device if all are replaced. Rank 0 writes the replaced operators to `oplist_path`.

    Args:
        context: the worker, its device and its settings.

    Returns:
        A report; None if the settings replace nothing.

    Raises:
        SettingsError: a list has a name that FlagGems does not know.
        RuntimeError: this engine requires batch-invariant kernels, and an earlier engine in this
            process has replaced operators.
    """
    settings = context.settings
    wanted, is_listed = _wanted(settings), value(settings, WHITELIST) is not None
    if not value(settings, USE) or context.device.type == "cpu" or (is_listed and not wanted):
        return None
    if context.wants_invariance:
        if _replaced and _replaced[0]:
            raise RuntimeError(
                f"{context.wants_invariance}: an earlier engine in this process replaced PyTorch "
                "operators by FlagGems's. This cannot be undone, and they are not verified. Start "
                "this engine in its own process"
            )
        why = f"{context.wants_invariance}, and FlagGems's operators are not verified"
        return WorkerReport((f"FlagGems: no PyTorch operator replaced: {why}",), {"aten": []})
    reason = NO_LIST if wanted == () and not _replaced else problem()
    if reason:
        return WorkerReport((f"FlagGems: no PyTorch operator replaced: {reason}",), {"aten": []})
    gems = flag_gems()
    check_list_names(settings, known_names(gems) | _ops_of_the_plan())
    if _replaced:
        cause = "set by the first engine in this process, and cannot be changed"
    else:
        _replaced.append(_replace(gems, wanted, settings))
        which, spec = ("all not in", BLACKLIST) if wanted is None else ("all in", WHITELIST)
        cause = f"{which} {spec.key} ({settings[spec.key].origin})"
        cause += ". To replace none, remove PyTorch's operators from this list"
    keys = _replaced[0]
    lines = [f"FlagGems: {len(keys)} PyTorch operators replaced: {cause}"]
    unused = sorted(set(wanted or ()) - set(gems.FULL_CONFIG_BY_FUNC))
    if unused:
        lines.append(f"flagos_whitelist: not PyTorch operators, ignored: {', '.join(unused)}")
    if context.rank == 0:
        lines.append(_listed(value(settings, OPLIST), keys))
    return WorkerReport(tuple(lines), {"flag_gems": str(gems.__version__), "aten": list(keys)})


def _wanted(settings: Any) -> tuple[str, ...] | None:
    """Return the selected names; None selects everything outside the blacklist."""
    planned, listed = _ops_of_the_plan(), value(settings, WHITELIST)
    if listed is not None:
        return tuple(name for name in listed if name not in planned)
    return None if {*blacklist(settings)} - planned else ()


def _ops_of_the_plan() -> frozenset[str]:
    """Names in the lists that refer to ops of the plan instead of PyTorch operators."""
    return frozenset({*get_default_manager().registry.snapshot().ops, "attention_backend"})


def known_names(gems: Any) -> frozenset[str]:
    """Return the names of all functions in FlagGems, also of fused ones."""
    names = set(gems.FULL_CONFIG_BY_FUNC)
    for module in ("ops", "fused"):
        names.update(getattr(getattr(gems, module, None), "__all__", ()))
    return frozenset(names)


def replaceable() -> Collection[str]:
    """Return the names that select PyTorch operators in the lists.

    The result is empty if FlagGems cannot run here, or if the lists select no operators.
    """
    if _wanted(get_default_manager().settings or {}) == () or available() is not True or problem():
        return ()
    return tuple(flag_gems().FULL_CONFIG_BY_FUNC)


def write_list(path: str | os.PathLike[str], lines: Iterable[str]) -> None:
    """Write `lines` to `path` atomically. A symbolic link at `path` is replaced, not followed.

    Raises:
        OSError: the directory does not exist or is not writable.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        os.replace(scratch, target)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def _replace(gems: Any, wanted: tuple[str, ...] | None, settings: Any) -> tuple[str, ...]:
    """Register FlagGems's kernels with PyTorch; return the replaced operators."""
    if wanted is None:
        gems.enable(unused=_banned(gems, blacklist(settings)))
    else:
        names = [name for name in wanted if name in gems.FULL_CONFIG_BY_FUNC]
        if not names:
            return ()
        gems.only_enable(include=names)
    return tuple(sorted(gems.all_registered_keys()))


def _banned(gems: Any, names: Collection[str]) -> list[str]:
    """Return `names` and the functions of all overloads and in-place variants."""
    table = gems.FULL_CONFIG_BY_FUNC
    families = {family for name in names for family in _families(table.get(name, ()))}
    return sorted({*names, *(name for name in table if _families(table[name]) & families)})


def _families(entries: Iterable[Any]) -> set[str]:
    """Return the operators without overload and in-place suffix, such as `addmm`."""
    return {operator.partition(".")[0].removesuffix("_") for operator, *_ in entries}


def _listed(path: str, keys: Iterable[str]) -> str:
    try:
        write_list(path, keys)
    except OSError as error:
        return f"FlagGems: cannot write the list of replaced operators to {path}: {error}"
    return f"FlagGems: the replaced operators are listed in {path}"
