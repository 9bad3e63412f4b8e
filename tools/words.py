"""Count the words in docs/: by page, by sentence, and by kind of reader.

    python tools/words.py

The pages of a kind of reader are the first link in each table row of its section in docs/README.md.
Pages below a subheading, such as "To look up", are not counted.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def pages() -> list[Path]:
    """All pages except the generated ones (ops, wrong kernels, the support matrix)."""
    made = {DOCS / "ops", DOCS / "wrong-kernels", DOCS / "support-matrix.md"}
    written = (path for path in DOCS.rglob("*.md") if made.isdisjoint((path, path.parent)))
    return sorted([*written, *ROOT.glob("*.md")])


def sentences(text: str) -> list[str]:
    """Sentences of the prose, without code blocks, tables and headings; inline code is one word."""
    prose = re.sub(r"^```.*?^```|^[|#<].*?$", "", text, flags=re.M | re.S)
    prose = re.sub(r"`[^`]+`", "code", re.sub(r"\]\([^)]+\)", "]", prose))
    parts = re.split(r"\n\s*\n|\n\s*(?:-|\d+\.) |[.!?][*)\"]*\s", prose)
    return [part for part in parts if part.strip()]


def longest_cell(text: str) -> int:
    """Words in the longest table cell."""
    rows = re.findall(r"^\|.*$", text, re.M)
    cells = (cell for row in rows for cell in re.split(r"(?<!\\)\|", row))
    return max((len(cell.split()) for cell in cells), default=0)


def readers() -> dict[str, list[Path]]:
    """Section of docs/README.md -> its linked pages."""
    found = {}
    for section in re.split(r"^## ", (DOCS / "README.md").read_text(), flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        read = text.partition("\n### ")[0]
        links = re.findall(r"^\|.*?\]\(([^)#]+\.md)\)", read, re.M)
        found[title] = [(DOCS / link).resolve() for link in dict.fromkeys(links)]
    return {title: named for title, named in found.items() if named}


def main() -> None:
    print("page                                words  a sentence  longest cell")
    for path in pages():
        text = path.read_text()
        lengths = [len(sentence.split()) for sentence in sentences(text)]
        mean = sum(lengths) / max(1, len(lengths))
        name = str(path.relative_to(ROOT))
        print(f"{name:<34} {len(text.split()):>6} {mean:>11.1f} {longest_cell(text):>13}")
    print("\nreader                              words  pages")
    for title, named in readers().items():
        words = sum(len(path.read_text().split()) for path in named)
        print(f"{title:<34} {words:>6} {len(named):>6}")


if __name__ == "__main__":
    main()
