"""A finding of `doctor`, and running a check that may itself break."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..text import quote

__all__ = ["Finding", "contained"]


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Args:
        check: the check that found it, for programs (`vllm-plugins`).
        what: what is wrong, one sentence.
        why: what follows from it, or what caused it.
        todo: what ends it.
    """

    check: str
    what: str
    why: str
    todo: str


def contained(check: str, find: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one check; one that breaks is a finding itself, and the others go on."""
    findings = []
    try:
        for finding in find():
            findings.append(finding)
    # Metadata, drivers and packages may be broken in any way: that is what doctor is for.
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        findings.append(
            Finding(
                check,
                f"The check {check!r} could not be made.",
                quote(error),
                "Repair what the error names; the other checks were made.",
            )
        )
    return findings
