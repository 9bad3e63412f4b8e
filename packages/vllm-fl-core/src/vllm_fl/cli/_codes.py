"""The pages of codes: what an error or a finding means, and what to do. They are package data."""

from __future__ import annotations

import re
from importlib.resources import files

__all__ = ["codes", "is_code", "page", "title"]

PAGES = files("vllm_fl") / "codes"
"""One file for each code, in Markdown: the documentation site has the same ones."""


def is_code(word: str) -> bool:
    """Whether this is how a code looks, in either case; no op is called so."""
    return re.fullmatch(r"FL\d{3}", word, re.IGNORECASE) is not None


def codes() -> list[str]:
    """Every code that has a page, in order."""
    names = (path.name for path in PAGES.iterdir() if path.name.endswith(".md"))
    return sorted(name.removesuffix(".md") for name in names)


def page(code: str) -> str | None:
    """The page of a code; None where there is no such code."""
    return (PAGES / f"{code}.md").read_text("utf-8") if code in codes() else None


def title(text: str) -> str:
    """What a page is about: its heading, without the code."""
    return text.splitlines()[0].partition(": ")[2]
