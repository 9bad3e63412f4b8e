"""Running a check of `doctor` that may itself break."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..plugins.finding import Finding
from ..text import quote

__all__ = ["contained"]


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
