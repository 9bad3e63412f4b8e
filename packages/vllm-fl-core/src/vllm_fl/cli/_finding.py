"""What the findings of `doctor` have in common: their codes, and a check that itself breaks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from ..plugins.finding import Finding
from ..text import quote

__all__ = ["CODES", "code_of", "contained"]

CODES: Mapping[str, str] = MappingProxyType(
    {
        "settings": "FL110",
        "entry-point": "FL210",
        "half-installed": "FL211",
        "owners": "FL212",
        "platforms": "FL213",
        "plugins": "FL214",
        "device": "FL215",
        "ended": "FL216",
        "contracts": "FL217",
        "ops": "FL310",
        "vllm-range": "FL510",
        "vllm-plugins": "FL511",
        "vllm-target-device": "FL512",
        "torch": "FL520",
        "torch-build": "FL521",
        "torch-companions": "FL522",
        "driver": "FL523",
        "table": "FL610",
    }
)
"""Check -> the code of its findings. A plugin's own check has none, unless it has such a name."""

BROKEN = "FL702"
"""The code of a check that could not be made."""

_CODE = re.compile(r"\[(FL\d{3})\]")


def code_of(finding: Finding) -> str | None:
    """The code of the error that a finding tells of, or of its check; None for a plugin's own."""
    if told := _CODE.search(finding.what):
        return told[1]
    return CODES.get(finding.check)


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
                f"The check {check!r} could not be made. [{BROKEN}]",
                quote(error),
                "Repair what the error names; the other checks were made.",
            )
        )
    return findings
