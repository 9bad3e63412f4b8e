"""The documentation site: link targets, and errors that stop its build."""

from __future__ import annotations

from pathlib import Path

import docs_site
import pytest

URL = "https://example.org/repository"
SOURCES = {"docs/README.md": "index.md", "docs/engine.md": "engine.md"}


@pytest.mark.parametrize("target", ["nowhere.md", "../../elsewhere.md", "/etc/passwd"])
def test_a_link_that_leads_nowhere_ends_the_build(target: str) -> None:
    with pytest.raises(docs_site.SiteError, match=r"docs/engine\.md: broken link "):
        docs_site.link(target, "docs/engine.md", SOURCES, URL)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('<a href="gone.html">', r"page\.html: broken link gone\.html"),
        ('<a href="other.html#gone">', r"page\.html: other\.html#gone: no such anchor"),
        ('<a href="#gone">', r"page\.html: #gone: no such anchor"),
        ('<img src="gone.svg">', r"page\.html: broken link gone\.svg"),
        ('<source srcset="gone.svg">', r"page\.html: broken link gone\.svg"),
        ('<a href="https://a.example" data-md-component="source">', r"page\.html loads https://a"),
        ('<script src="//example.org/a.js">', r"page\.html loads //example\.org/a\.js"),
        ('<link rel="stylesheet" href="https://a.example/f">', r"page\.html loads https://a"),
    ],
)
def test_a_fault_of_a_built_page_is_named(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "other.html").write_text('<h1 id="there">')
    page = tmp_path / "page.html"
    page.write_text('<a href="other.html#there"><a href="https://example.org/">')
    docs_site.check(tmp_path)
    page.write_text(line)
    with pytest.raises(docs_site.SiteError, match=fault):
        docs_site.check(tmp_path)
