"""The documentation site: where links lead, and what ends its build."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docs_site
import pytest
import yaml

URL = "https://example.org/repository"
SOURCES = {
    "docs/README.md": "index.md",
    "docs/engine.md": "engine.md",
    "docs/errors.md": "errors.md",
    "docs/ops/README.md": "ops/index.md",
    "SECURITY.md": "security.md",
    "packages/vllm-fl-cuda/README.md": "backends/vllm-fl-cuda.md",
}


@pytest.mark.parametrize(
    ("source", "target", "there"),
    [
        ("docs/engine.md", "#the-plan", "#the-plan"),
        ("docs/engine.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/engine.md", "README.md#a", "index.md#a"),
        ("docs/engine.md", "../SECURITY.md", "security.md"),
        ("docs/engine.md", "ops", "ops/index.md"),
        ("docs/engine.md", "errors.md", "errors.md"),
        ("docs/errors.md", "engine.md", "engine.md"),
        ("docs/ops/README.md", "../engine.md#a", "../engine.md#a"),
        ("SECURITY.md", "docs/engine.md", "engine.md"),
        ("packages/vllm-fl-cuda/README.md", "../../docs/engine.md", "../engine.md"),
        ("docs/engine.md", "../packages/vllm-fl-cuda", "backends/vllm-fl-cuda.md"),
        ("docs/engine.md", "../noxfile.py#L1", f"{URL}/blob/main/noxfile.py#L1"),
        ("docs/engine.md", "../tools", f"{URL}/tree/main/tools"),
        ("docs/ops/README.md", "../pictures/plan-dark.svg", "../pictures/plan-dark.svg"),
    ],
)
def test_a_link_leads_to_the_page_or_to_the_repository(
    source: str, target: str, there: str
) -> None:
    assert docs_site.place(source) == SOURCES[source]
    assert docs_site.link(target, source, SOURCES, URL) == there


@pytest.mark.parametrize("target", ["nowhere.md", "../../elsewhere.md", "/etc/passwd"])
def test_a_link_that_leads_nowhere_ends_the_build(target: str) -> None:
    with pytest.raises(docs_site.SiteError, match=r"docs/engine\.md: .* leads nowhere"):
        docs_site.link(target, "docs/engine.md", SOURCES, URL)


def test_links_in_code_are_left_alone_and_bars_in_a_table_s_code_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        "[b](b.md) `[x](y.md)`\n```\n[x](y.md)\n```\n| `p \\| q` | [b](b.md) |\n`p \\| q`\n"
    )
    (tmp_path / "docs" / "b.md").touch()
    sources = {"docs/a.md": "a.md", "docs/b.md": "deep/b.md"}
    assert docs_site.linked("docs/a.md", sources, URL) == (
        "[b](deep/b.md) `[x](y.md)`\n```\n[x](y.md)\n```\n| `p | q` | [b](deep/b.md) |\n`p \\| q`\n"
    )


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a page of a repository of its own."""

    def write(source: str, text: str) -> None:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text(text)

    monkeypatch.setattr(docs_site, "ROOT", tmp_path)
    monkeypatch.setattr(docs_site, "CODES", tmp_path / "core" / "codes")
    return write


def test_a_link_that_is_named_by_a_file_has_the_title_of_the_page(
    written: Callable[[str, str], None],
) -> None:
    written("docs/b.md", "<!-- made -->\n# The title\n")
    written("c.md", "# Not in the site\n")
    written("docs/a.md", "[b.md](b.md#x), [docs/b.md](b.md), [own](b.md), [c.md](../c.md)\n")
    sources = {"docs/a.md": "a.md", "docs/b.md": "b.md"}
    assert docs_site.linked("docs/a.md", sources, URL) == (
        f"[The title](b.md#x), [The title](b.md), [own](b.md), [c.md]({URL}/blob/main/c.md)\n"
    )


def test_a_page_that_a_code_s_page_names_is_linked(written: Callable[[str, str], None]) -> None:
    written("docs/b.md", "# B\n")
    text = "docs/b.md says, and `docs/b.md`.\n"
    written("core/codes/FL1.md", text)
    written("docs/a.md", text)
    sources = {"core/codes/FL1.md": "errors/fl1.md", "docs/a.md": "a.md", "docs/b.md": "b.md"}
    linked = docs_site.linked("core/codes/FL1.md", sources, URL)
    assert linked == "[B](../b.md) says, and `docs/b.md`.\n"
    written("core/codes/FL2.md", "# FL2: wrong\n\nSo.\n")
    linked = docs_site.linked("core/codes/FL2.md", sources, URL)
    assert linked == "# FL2: wrong\n\n[All codes](../errors.md)\n\nSo.\n"
    assert docs_site.linked("docs/a.md", sources, URL) == text


def test_of_a_picture_s_two_forms_the_chosen_scheme_s_is_shown(
    written: Callable[[str, str], None],
) -> None:
    for name in ("dark", "light"):
        written(f"docs/pictures/{name}.svg", "")
    written(
        "docs/a.md",
        '<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="pictures/dark.svg">\n'
        '  <img alt="A" src="pictures/light.svg" width="5">\n</picture>\n',
    )
    assert docs_site.linked("docs/a.md", {"docs/a.md": "a.md"}, URL) == (
        '<img class="only-light" alt="A" src="pictures/light.svg" width="5">'
        '<img class="only-dark" alt="A" src="pictures/dark.svg" width="5">\n'
    )


def test_a_contract_s_text_is_folded_and_a_drawing_is_not(
    written: Callable[[str, str], None],
) -> None:
    for source in ("docs/ops/a.md", "docs/a.md"):
        written(source, "```python\nf()\n```\n```text\na\n```\n")
    sources = {"docs/ops/a.md": "ops/a.md", "docs/a.md": "a.md"}
    contract = docs_site.linked("docs/ops/a.md", sources, URL)
    assert contract == "```python\nf()\n```\n``` { .text .folded }\na\n```\n"
    assert "folded" not in docs_site.linked("docs/a.md", sources, URL)


def test_a_label_of_the_navigation_is_the_page_s_title() -> None:
    nav = docs_site.expanded(yaml.safe_load((docs_site.ROOT / "site.yml").read_text())["nav"])

    def labels(nav: Any) -> Iterator[tuple[str, str]]:
        for each in nav if isinstance(nav, list) else ():
            for label, below in each.items() if isinstance(each, dict) else ():
                yield from labels(below)
                if isinstance(below, str) and below.endswith(".md"):
                    yield label, below

    found = dict(labels(nav))
    assert found.pop("Start") == "docs/README.md"
    pages = {label: page for label, page in found.items() if not page.startswith("api/")}
    assert {label: docs_site.title(page) for label, page in pages.items()} == {
        label: label for label in pages
    }


def test_pages_of_codes_are_in_the_site_and_not_in_the_navigation() -> None:
    nav = docs_site.expanded(yaml.safe_load((docs_site.ROOT / "site.yml").read_text())["nav"])
    found = docs_site.unlisted()
    assert "FL102: a setting's text or value is wrong" in map(docs_site.title, found)
    assert not {*found} & {*docs_site.named(nav)}
    assert "docs/errors.md" in docs_site.named(nav)


def test_versions_lie_side_by_side_and_the_newest_is_the_first(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "all"
    site.mkdir()
    for version in ("0.9", "0.10", "0.3", "0.9"):
        (site / "index.html").write_text(version)
        assert docs_site.put_into(folder, site, version) == folder / version
    listed = json.loads((folder / "versions.json").read_text())
    assert [(each["version"], each["aliases"]) for each in listed] == [
        ("0.10", ["latest"]),
        ("0.9", []),
        ("0.3", []),
    ]
    assert (folder / "0.3" / "index.html").read_text() == "0.3"
    assert "url=0.10/index.html" in (folder / "index.html").read_text()


def test_a_report_has_a_way_back_and_one_without_a_place_for_it_ends_the_build() -> None:
    assert docs_site.with_a_way_back("<body>\n<main>\n<h1>A</h1>") == (
        '<body>\n<main>\n<p><a href="index.html">vllm-fl documentation</a> › '
        '<a href="tuning.html">Tuning</a></p>\n<h1>A</h1>'
    )
    with pytest.raises(docs_site.SiteError, match="no place"):
        docs_site.with_a_way_back("<h1>A</h1>")


def test_a_page_of_docs_that_the_navigation_leaves_out_is_named() -> None:
    docs = docs_site.ROOT / "docs"
    every = {str(path.relative_to(docs_site.ROOT)) for path in docs.rglob("*.md")}
    assert docs_site.left_out(every) == []
    for one in ("docs/engine.md", "docs/guides/operate.md"):
        assert docs_site.left_out(every - {one}) == [one]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('<a href="gone.html">', r"page\.html: gone\.html leads nowhere"),
        ('<a href="other.html#gone">', r"page\.html: other\.html#gone leads to no anchor"),
        ('<a href="#gone">', r"page\.html: #gone leads to no anchor"),
        ('<img src="gone.svg">', r"page\.html: gone\.svg leads nowhere"),
        ('<source srcset="gone.svg">', r"page\.html: gone\.svg leads nowhere"),
        (
            '<a href="https://a.example" data-md-component="source">',
            r"page\.html fetches https://a",
        ),
        ('<script src="//example.org/a.js">', r"page\.html fetches //example\.org/a\.js"),
        ('<link rel="stylesheet" href="https://a.example/f">', r"page\.html fetches https://a"),
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
