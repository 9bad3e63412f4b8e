"""`vllm-fl show --html`: the page, and the errors of its files."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tables
from commands import Command

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_tools.engine.tuning_table import Figure, Row, Tuned, TunedOp

EVIL = "<script>alert('1')</script>&\"x=\x1b[2J"
VOID = {"meta"}
DRAWS = pytest.importorskip("matplotlib", reason="the pages' plots need the extra `report`")


class Page(HTMLParser):
    """A parsed page, checked to be well formed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(self.text)
        self.close()
        assert self.open == [], "elements that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        if "style" not in tags:
            self.words.append(data)
        if "td" in tags or "th" in tags:
            self.rows[-1][-1] += data.replace("\xa0", " ")

    def attributes(self, name: str) -> list[str]:
        return [str(attrs[name]) for _, attrs in self.elements if name in attrs]

    def row(self, *cells: str) -> list[str]:
        """The only row that begins with these cells."""
        (found,) = (row for row in self.rows if tuple(row[: len(cells)]) == cells)
        return found


def verification(**environment: Any) -> dict[str, Any]:
    """`vllm-fl verify --json` of a correct, an unsupported and an incorrect implementation."""

    def result(impl: str, dtype: str, **fields: Any) -> dict[str, Any]:
        plain = {"ok": 0, "refused": 0, "wrong": 0, "raised": 0}
        samples = {**plain, **fields.pop("samples", {"ok": 4})}
        base = {"op": "rms_norm", "impl_id": impl, "dtype": dtype, "worst": 0.25, "findings": []}
        return {**base, "samples": samples, **fields}

    def finding(status: str, reason: str, share: float | None = None) -> dict[str, Any]:
        return {"sample": "odd sizes", "status": status, "share": share, "reason": reason}

    refused = finding("refused", "no float32")
    wrong = finding("wrong", "element (0, 1) is 3, the oracle says 2", 7.5)
    return {
        "schema": 1,
        "date": "2026-11-22T10:00:00+00:00",
        "environment": {
            "python": "3.11.7",
            "system": "Linux",
            "distributions": {"torch": "2.13.0"},
            "device": {"type": "cpu", "name": "EPYC", "cores": 2},
            "emulated": None,
            **environment,
        },
        "complete": True,
        "results": [
            result("vendor.good", "float32"),
            result("vendor.good", "bfloat16", samples={"ok": 3, "refused": 1}),
            result("vendor.picky", "float32", samples={"refused": 4}, worst=None,
                   findings=[refused]),
            result("vendor.bad", "float32", samples={"ok": 2, "wrong": 1, "raised": 1},
                   worst=7.5, findings=[wrong]),
        ],
        "not_run": [{"op": "rms_norm", "impl_id": "vendor.absent", "reason": "no absent card"}],
    }  # fmt: skip


def made(fl: Command, tmp_path: Path, *contents: Any) -> Page:
    """The page of these tables and runs."""
    paths = []
    for number, content in enumerate(contents):
        path = tmp_path / f"f{number}.json"
        document = tables.printed(content) if isinstance(content, Tuned) else content
        path.write_text(json.dumps(document))
        paths.append(str(path))
    done = fl("show", *paths, "--html", str(tmp_path / "page.html"))
    assert (done.status, done.err) == (0, "")
    return Page(tmp_path / "page.html")


def one(*figures: Figure, rows: tuple[Row, ...], default: str = "stock") -> Any:
    return tables.table({"rms_norm": TunedOp(default, rows, figures)})


STOCK = Figure(16, "stock", 10.0, 9.5, 10.5, 40)
FAST = Figure(16, "vendor.fast", 8.0, 7.5, 8.5, 40, 1.25, 1.24)
NEAR = Figure(16, "vendor.near", 9.9, 9.0, 11.0, 40, 1.01, 0.97)
WRONG = Figure(16, "vendor.bad", rejected="wrong: element (3, 517) is 1, the oracle says 2")


def test_what_serves_and_why(fl: Command, tmp_path: Path) -> None:
    page = made(fl, tmp_path, one(STOCK, FAST, NEAR, WRONG, rows=(Row(16, "vendor.fast"),)))
    assert page.row("16", "▲ vendor.fast")[2:] == [
        "faster than the default: ×1.250 (lower quartile ×1.240, n 40)",
        "10.09.50–10.5, n 40",
        "rejected",
        "8.007.50–8.50, n 40×1.250 (low 1.240)",
        "9.909.00–11.0, n 40×1.010 (low 0.970)",
    ]
    assert "<b>8.00</b>" in page.text and page.text.count("<b>") == 1
    assert page.row("■ vendor.bad")[1:] == ["16", f"rejected: {WRONG.rejected}"]
    assert page.row("above 16")[1] == "● stock (default)"


def test_the_support_matrix(fl: Command, tmp_path: Path) -> None:
    page = made(fl, tmp_path, verification())
    cells = {row[1]: row[2:] for row in page.rows if row[0] == "rms_norm" and len(row) == 4}
    assert cells == {
        "vendor.good": ["ok: 4 of 4worst 0.25", "ok: 3 of 4worst 0.251 unsupported"],
        "vendor.picky": ["unsupported", "–"],
        "vendor.bad": ["incorrect: 2 of 4worst 7.50", "–"],
    }
    findings = [row[1:3] + row[5:] for row in page.rows if len(row) == 7]
    assert findings[1:] == [
        ["vendor.bad", "incorrect", "7.5", "element (0, 1) is 3, the oracle says 2"],
        ["vendor.picky", "unsupported", "–", "no float32"],
    ], "what is wrong comes first"
    assert page.row("rms_norm", "vendor.absent")[2] == "no absent card"
    assert page.row("f0.json")[2] == "2 incorrect"
    assert page.row("device: name")[1] == "EPYC"


def test_what_stood_in_for_hardware_and_what_was_cut_short(fl: Command, tmp_path: Path) -> None:
    run = {**verification(emulated="Acme's simulator"), "complete": False}
    page = made(fl, tmp_path, run)
    words = "".join(page.words)
    assert "No such hardware was used" in words and "The run was interrupted" in words
    cells = page.row("f0.json")
    assert "Acme's simulator" in cells[1] and "incomplete" in cells[2]


def test_whatever_files_say_is_text(fl: Command, tmp_path: Path) -> None:
    figures = tuple(dataclasses.replace(f, impl=f.impl + EVIL, slower=EVIL) for f in (STOCK, FAST))
    wrong = dataclasses.replace(WRONG, impl=EVIL, rejected=EVIL)
    tuned = TunedOp("stock" + EVIL, (Row(16, "vendor.fast" + EVIL),), (*figures, wrong))
    table = tables.table(
        {EVIL: tuned},
        holds={"device": EVIL, "vllm": EVIL, "distributions": {EVIL: EVIL}},
        sizes={EVIL: 1},
        dtype=EVIL,
        model=EVIL,
        date=EVIL,
    )
    text = json.dumps(verification(emulated="EVIL")).replace("rms_norm", "EVIL")
    for word in ("vendor.bad", "no float32", "odd sizes", "torch", "EPYC", "2.13.0", "Linux"):
        text = text.replace(word, "EVIL")
    run = json.loads(text.replace("EVIL", json.dumps(EVIL)[1:-1]))
    page = made(fl, tmp_path, table, table, run)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "img", "iframe", "link"})
    assert "\x1b" not in page.text and "\\x1b" in page.text
    assert not [a for _, attrs in page.elements for a in attrs if a.startswith("on") or a == "x="]
    assert "".join(page.words).count("<script>alert('1')</script>") > 20


def test_nothing_is_fetched_and_nothing_runs(fl: Command, tmp_path: Path) -> None:
    page = made(fl, tmp_path, one(STOCK, FAST, rows=(Row(16, "vendor.fast"),)), verification())
    addresses = [v for a in ("src", "href", "xlink:href", "srcset") for v in page.attributes(a)]
    assert addresses and all(address.startswith("#") for address in addresses)
    assert {a[1:] for a in addresses} <= {*page.attributes("id")}, "links that lead nowhere"
    policy = dict(page.elements)["meta"]  # the last one
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    style = page.text.partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in style and not re.search(r"url\((?!#)", page.text)


@pytest.mark.parametrize(
    "ops",
    [["rms_norm", "relu2"], pytest.param(known_contracts().contracts, marks=pytest.mark.slow)],
    ids=len,
)
def test_ids_and_looks_over_a_whole_page(fl: Command, tmp_path: Path, ops: Any) -> None:
    """Every op, 14 token counts, 4 implementations: small enough for an email."""
    page = made(fl, tmp_path, tables.table([*ops]))
    assert [i for i, n in Counter(page.attributes("id")).items() if n > 1] == []
    used = re.findall(r"url\(#([^)]+)\)", page.text)
    assert used and {*used} <= {*page.attributes("id")}
    svgs = re.findall(r"<svg.*?</svg>", page.text, re.S)
    assert len(svgs) == len(ops)
    assert not re.findall(r"#f[de]00[0-9a-f]{2}", page.text), "a stand-in for a colour is left"
    assert all("var(--s" in svg and "<text" in svg for svg in svgs)
    assert len(page.text) < 3e6
    assert page.text.count("</table>") == page.text.count("<caption")
    headers = [attrs for tag, attrs in page.elements if tag == "th"]
    assert all(attrs.get("scope") in ("row", "col") for attrs in headers)
    signs = re.findall(
        r'style="color:(var\(--s\d\))" aria-hidden="true">(.)</span>(?:&nbsp;)?([\w.]+)', page.text
    )
    by_impl = {
        name: {(colour, sign) for colour, sign, n in signs if n == name} for _, _, name in signs
    }
    assert {*by_impl} >= {*tables.IMPLS}
    assert all(len(found) == 1 for found in by_impl.values())


def test_without_matplotlib_the_error_names_the_extra(
    fl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_svg", None)
    path = tables.written(tmp_path / "a.json", tables.table(["relu2"]))
    out = tmp_path / "page.html"
    done = fl("show", path, "--html", str(out))
    assert done.status == 2
    assert "pip install 'vllm-fl-tools[report]'" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"], "nothing is left half written"
    (tmp_path / "run.json").write_text(json.dumps(verification()))
    assert fl("show", str(tmp_path / "run.json"), "--html", str(out)).status == 0


BROKEN = {
    "no json": ("{", "not complete JSON"),
    "a list": ("[]", "not a vllm-fl file"),
    "another schema": ('{"schema": 2, "results": []}', "schema 2"),
    "no results": ('{"schema": 1}', "not a vllm-fl file"),
    "no page": ('{"schema": 1, "plan": {}}', "which has no page"),
    "half a table": ('{"schema": 1, "table": {}}', "'ops'"),
    "half a run": ('{"schema": 1, "results": [{}]}', ": incomplete"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_error_names_a_broken_file(fl: Command, tmp_path: Path, name: str) -> None:
    text, words = BROKEN[name]
    (tmp_path / "x.json").write_text(text)
    good = tables.written(tmp_path / "a.json", tables.table(["relu2"]))
    done = fl("show", good, str(tmp_path / "x.json"), "--html", str(tmp_path / "page.html"))
    assert done.status == 2
    message, *more = done.err.splitlines()
    assert words in message and "x.json" in message
    assert all(line.startswith("`vllm-fl explain FL") for line in more) and len(more) <= 1
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_not_there(fl: Command, tmp_path: Path) -> None:
    done = fl("show", str(tmp_path / "none.json"), "--html", str(tmp_path / "page.html"))
    assert done.status == 2 and "none.json" in done.err
    path = tables.written(tmp_path / "a.json", tables.table(["relu2"]))
    done = fl("show", path, "--html", str(tmp_path / "nowhere" / "page.html"))
    assert done.status == 2 and "--html" in done.err


def test_json_says_what_was_written(fl: Command, tmp_path: Path) -> None:
    path = tables.written(tmp_path / "a.json", tables.table(["relu2"]))
    out = tmp_path / "page.html"
    answer = fl("show", path, path, "--html", str(out), "--json").json()
    assert answer["html"] == str(out) and answer["bytes"] == out.stat().st_size
    assert [f["name"] for f in answer["files"]] == ["a.json", "a.json"]
