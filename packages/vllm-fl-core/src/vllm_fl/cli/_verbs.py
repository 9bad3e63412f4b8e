"""The verbs that are installed: entry points of the group `vllm_fl.cli`, core's own among them.

    [project.entry-points."vllm_fl.cli"]
    tune = "vllm_fl_tools.cli.tune"

Each names a module with `add_arguments(parser)` and `run(arguments) -> int`. Its docstring is
"`vllm-fl tune`: what it does."; what stands behind the colon is its line of `vllm-fl --help`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ..errors import VllmFLError
from ..plugins.installed import CORE, canonical, entry_points, identity
from ..text import quote
from ._show import UsageError, say

GROUP = "vllm_fl.cli"
"""The entry-point group by which verbs are found."""

OWN = ("doctor", "explain", "ops", "plugins", "policy")
"""Core's own verbs. They need no metadata: where it is gone, `doctor` says so."""

TOOLS = "vllm-fl-tools"

_THEIRS = "bisect collect coverage lock new plan report show tune verify"

ELSEWHERE: Mapping[str, str] = MappingProxyType(dict.fromkeys(_THEIRS.split(), TOOLS))
"""Well-known verbs that core does not bring, with the distribution that does."""


class VerbError(VllmFLError):
    """A verb of an installed distribution cannot be run.

    Attributes:
        verb: its name; empty where all of its distribution's are meant.
    """

    code = "FL703"

    def __init__(self, message: str, *, verb: str = "", **facts: Any) -> None:
        super().__init__(message, **facts)
        self.verb = verb


def brought() -> dict[str, list[Any]]:
    """The name of each verb -> others' entry points that bring it, in the order of `sys.path`."""
    found: dict[str, list[Any]] = {name: [] for name in OWN}
    for entry in entry_points(GROUP):
        if canonical(identity(entry.dist)[0]) != CORE:
            found.setdefault(entry.name, []).append(entry)
    return dict(sorted(found.items()))


def missing(name: str) -> UsageError:
    """What to say where a well-known verb is not installed."""
    distribution = ELSEWHERE[name]
    extra = distribution.removeprefix("vllm-fl-")
    return UsageError(
        f"`vllm-fl {name}` is not installed; {distribution} brings it: pip install {distribution}, "
        f"or '{CORE}[{extra}]'"
    )


def load(name: str, entries: Sequence[Any]) -> tuple[str, Any]:
    """The verb of this name: core's, or that of these entry points.

    Returns:
        (what it does, in one line without a full stop; its module).

    Raises:
        VerbError: two distributions bring it and neither is core, its module cannot be imported,
            or that is no verb.
    """
    owners = sorted({_owner(entry) for entry in entries})
    told = " and ".join(owners)
    if name in OWN and owners:
        say(f"vllm-fl: {told} would bring the verb {name!r}, too; it is {CORE}'s", error=True)
    elif len(owners) > 1:
        raise VerbError(
            f"`vllm-fl {name}` is brought by {' and by '.join(owners)}, and runs for neither: "
            "uninstall one of them",
            verb=name,
            distribution=", ".join(owners),
        )
    owner = CORE if name in OWN else told
    try:
        module = import_module(f"{__package__}.{name}") if name in OWN else entries[0].load()
    except VllmFLError:  # such as one of another version: it says all
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever its distribution does
        raise VerbError(
            f"`vllm-fl {name}` of {owner} cannot be imported: {quote(error)}. Repair or uninstall "
            "that distribution; the other verbs work",
            verb=name,
            distribution=owner,
            cause=error,
        ) from error
    lacking = [
        wanted for wanted in ("add_arguments", "run") if not callable(getattr(module, wanted, None))
    ]
    if lacking:
        raise VerbError(
            f"`vllm-fl {name}` of {owner} is no verb: {getattr(module, '__name__', name)} has no "
            f"{' and no '.join(lacking)}. Update or uninstall that distribution; the other verbs "
            "work",
            verb=name,
            distribution=owner,
        )
    heading = str(getattr(module, "__doc__", None) or f"from {owner}").splitlines()[0]
    summary = heading.removeprefix(f"`vllm-fl {name}`: ").rstrip(".")
    return summary, module


def _owner(entry: Any) -> str:
    """The distribution that brings it, with its version."""
    name, version, _ = identity(entry.dist)
    return f"{name} {version}" if version else name
