"""Known deviations of a backend, from `xfails.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cases import Case


@dataclass(frozen=True)
class Xfail:
    """One `[[xfail]]` of xfails.toml: tests that must fail, with the reason.

    A sample with an exception for `values` is omitted from every other check.

    Args:
        op: the op.
        reason: why the backend deviates.
        dtype: `float32`, `float16` or `bfloat16`; empty for all.
        check: the test without its `test_`.
        sample: name of the sample or bad input; empty for all.
        run: false for a test that must not run, because it would end the process.
    """

    op: str
    reason: str
    dtype: str = ""
    check: str = "values"
    sample: str = ""
    run: bool = True

    def matches(self, case: Case) -> bool:
        """Whether the exception applies to a test."""
        return (
            self.op == case.op
            and self.check == case.check
            and self.dtype in ("", case.dtype)
            and self.sample in ("", case.sample)
        )

    def __str__(self) -> str:
        named = (self.op, self.check, self.dtype, self.sample)
        return " / ".join(filter(None, named))


def read_xfails(path: Path, checks: Collection[str]) -> tuple[Xfail, ...]:
    """Return the exceptions in a TOML file; empty without the file. `checks` are the valid checks.

    Raises:
        ValueError: the file is not TOML, or an entry has an unknown key, check or type, or has no
            op or reason.
    """
    if not path.exists():
        return ()
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    entries = content.pop("xfail", [])
    if content or not isinstance(entries, list):
        raise ValueError(f"{path}: expected [[xfail]] entries only, got {', '.join(content)}")
    return tuple(_entry(f"{path}: xfail {i}", entry, checks) for i, entry in enumerate(entries, 1))


def _entry(where: str, entry: dict[str, Any], checks: Collection[str]) -> Xfail:
    for key, value in entry.items():
        wanted = bool if key == "run" else str
        if not isinstance(value, wanted):
            raise ValueError(f"{where}: {key} must be a {wanted.__name__}, got {value!r}")
    try:
        xfail = Xfail(**entry)
    except TypeError as error:  # an unknown or missing key
        raise ValueError(f"{where}: {str(error).partition(' ')[2]}") from error
    if xfail.check not in checks:
        raise ValueError(f"{where}: no check {xfail.check!r}; known: {', '.join(checks)}")
    return xfail
