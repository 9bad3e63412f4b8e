"""FlagGems's settings, their checks, and findings for `vllm-fl doctor`. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from vllm_fl import (
    AttentionImpl,
    BackendImplKind,
    CommunicatorImpl,
    Finding,
    OpImpl,
    SettingsError,
    SettingSpec,
)

INSTALL = 'pip install "vllm-fl-flaggems[beside-vllm]" && pip install --no-deps flag-gems==5.0.2'
"""flag-gems 5.0.2 pins numpy 1.26.4 and other releases that no vLLM accepts; it runs without them,
hence --no-deps."""

USE = SettingSpec("use_flaggems", "USE_FLAGGEMS", True)
"""False disables FlagGems completely: ops and PyTorch operators."""

WHITELIST = SettingSpec[tuple[str, ...] | None](
    "flagos_whitelist",
    "VLLM_FL_FLAGOS_WHITELIST",
    None,
    in_file=True,
    names="FlagGems op",
    excludes="flagos_blacklist",
)
"""FlagGems ops to use exclusively, or None."""

BLACKLIST = SettingSpec[tuple[str, ...]](
    "flagos_blacklist",
    "VLLM_FL_FLAGOS_BLACKLIST",
    (),
    in_file=True,
    names="FlagGems op",
)
"""FlagGems ops to disable."""

APPEND = replace(
    BLACKLIST, key="flagos_blacklist_append", variable="VLLM_FL_FLAGOS_BLACKLIST_APPEND"
)
"""FlagGems ops to disable in addition to the blacklist."""

OPLIST = SettingSpec(
    "oplist_path", "FLAGGEMS_ENABLE_OPLIST_PATH", "/tmp/flaggems_enable_oplist.txt"
)
"""File for the replaced PyTorch operators, written by rank 0."""

SETTINGS: tuple[SettingSpec[Any], ...] = (USE, WHITELIST, BLACKLIST, APPEND, OPLIST)


def value(settings: Any, spec: SettingSpec[Any]) -> Any:
    """Return the value in an engine's settings; the default if the engine's host lacks FlagGems."""
    return settings[spec.key].value if spec.key in settings else spec.default


def blacklist(settings: Any) -> tuple[str, ...]:
    """Return the disabled FlagGems ops.

    Raises:
        SettingsError: the append list is set together with a whitelist, which excludes it.
    """
    more, white = value(settings, APPEND), value(settings, WHITELIST)
    if more and white is not None:
        origin, other = settings[APPEND.key].origin, settings[WHITELIST.key].named
        problem = f"has no effect with {other}; unset one of the two"
        raise SettingsError(f"{origin}: {APPEND.key}: {problem}", key=APPEND.key, origin=origin)
    return (*value(settings, BLACKLIST), *more)


def rejected(
    settings: Any, op: str, impls: Sequence[OpImpl | AttentionImpl | CommunicatorImpl]
) -> dict[str, str] | None:
    """Return impl id -> name of the setting that disables FlagGems for `op`."""
    listed, out = value(settings, WHITELIST), blacklist(settings)
    if not value(settings, USE):
        reason = "USE_FLAGGEMS=false"
    elif listed is not None and op not in listed:
        reason = WHITELIST.key
    elif op in out:
        reason = BLACKLIST.key
    else:
        return None
    # Communicators (FlagCX) have the same kind but do not belong to FlagGems.
    return {
        impl.impl_id: reason
        for impl in impls
        if impl.kind is BackendImplKind.DEFAULT and not isinstance(impl, CommunicatorImpl)
    }


def check_list_names(settings: Any, known: Collection[str]) -> None:
    """Check the names in the lists.

    Raises:
        SettingsError: FlagGems does not know a name; the message suggests the closest known name.
    """
    for spec in (WHITELIST, BLACKLIST, APPEND):
        for name in value(settings, spec) or ():
            if name in known:
                continue
            near = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            origin = settings[spec.key].origin
            raise SettingsError(
                f"{origin}: {spec.key}: unknown FlagGems op {name!r}.{meant}",
                key=spec.key,
                origin=origin,
            )


def findings(settings: Any) -> Iterator[Finding]:
    """Report missing requirements of FlagGems, and FlagGems settings that have no effect."""
    gems = version_of("flag-gems")
    if gems is None:
        yield Finding(
            "flag-gems",
            f"vllm-fl-flaggems {version_of('vllm-fl-flaggems')} is installed, flag-gems is not.",
            "flag-gems provides the backend's kernels. It pins releases of numpy and others that "
            "vLLM does not accept, so pip cannot install both in one step.",
            INSTALL,
        )
    elif not any(map(version_of, ("triton", "triton-ascend", "flagtree"))):
        yield Finding(
            "flag-gems",
            f"flag-gems {gems} is installed, Triton is not.",
            "FlagGems's kernels need Triton, but flag-gems does not require it. Your hardware "
            "vendor may have its own build.",
            "pip install triton",
        )
    owners = sorted({*packages_distributions().get("flag_gems", ())})
    if len(owners) > 1:
        yield Finding(
            "owners",
            f"{len(owners)} installed distributions provide the import name 'flag_gems': "
            f"{', '.join(owners)}.",
            "They overwrite each other's files; the one installed last is imported. The command "
            f"keeps {owners[-1]}; you can install another one instead.",
            f"pip uninstall -y {' '.join(owners)} && pip install --no-deps {owners[-1]}",
        )
    if not value(settings, USE):
        why = f"{settings[USE.key].named} disables FlagGems."
        yield from _idle(settings, SETTINGS[1:], why)
    elif gems is None:
        yield from _idle(settings, SETTINGS, "flag-gems is not installed.")


def _idle(settings: Any, specs: Iterable[SettingSpec[Any]], why: str) -> Iterator[Finding]:
    chosen = settings.chosen
    for spec in specs:
        if spec.key in chosen:
            setting = chosen[spec.key]
            yield Finding("settings", f"{setting.named} has no effect.", why, setting.undo)


def version_of(distribution: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
