"""Build the documentation site into build/site/html, from the pages listed in site.yml.

    python tools/docs_site.py [--into FOLDER]

Copies the repository's pages. Links to other pages become links within the site; links to other
files become links to GitHub. With `--into`, the site is added to FOLDER, which contains the sites
of all versions and lets the reader choose one. Generated pages:

- `ops`: the pages of docs/ops, each in the navigation;
- the pages of error codes (data of vllm-fl-core) and of wrong kernels; they are linked and
  searchable, but not in the navigation;
- `api`: the API reference for plugin authors, from docstrings;
- `options`: the output of each verb's `--help`;
- `report`: the output of `vllm-fl show --html` for one tuning table and the support matrix's runs.

The build fails on each warning of the generator, and on:

- a broken link
- a page of docs/ that is missing from site.yml
- a public name without a docstring
- anything that a browser would load from another host
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "site"
PAGES, HTML = BUILD / "pages", BUILD / "html"
CORE = ROOT / "packages" / "vllm-fl-core" / "src"
TOOLS = ROOT / "packages" / "vllm-fl-tools" / "src"
CODES = CORE / "vllm_fl" / "codes"
MEASURED = ROOT / "benchmarks" / "results" / "h200-2026-11-22.json"
TABLE = "tune qwen3-8b's sizes, compiled, qk_norm_rope"
"""The entry of MEASURED that contains a tuning table of `vllm-fl tune`."""

API = {
    "vllm_fl": "Plugin API",
    "vllm_fl_tools.testing": "The conformance kit for backends",
    "vllm_fl_tools.testing.triton": "Triton without a GPU",
    "vllm_fl.dispatch": "Calling ops",
    "vllm_fl.errors": "Errors",
}
"""Module -> title of its page. A name that several modules export is described in the first."""


OPTIONS = "api/options.md"
"""Source name of the page of all verbs' options, as if it were in the repository."""


class SiteError(Exception):
    """Faults of the pages, one line each."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="also copy the site there, in a directory named by version",
    )
    into = parser.parse_args(arguments).into
    shutil.rmtree(BUILD, ignore_errors=True)
    try:
        write_pages(yaml.safe_load((ROOT / "site.yml").read_text()))
        run("-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml")
        write_report(HTML / "report.html")
        check(HTML)
    except (SiteError, subprocess.CalledProcessError) as error:
        print(f"The site was not built: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in HTML.rglob("*") if file.is_file())
    pages = len(list(HTML.rglob("*.html")))
    print(f"{pages} pages, {size / 1e6:.1f} MB: {HTML.relative_to(ROOT)}/index.html")
    if into:
        print(put_into(into, HTML, version()))
    return 0


def version() -> str:
    """Return core's version without the patch number. Patch releases keep the pages valid."""
    project = tomllib.loads((CORE.parent / "pyproject.toml").read_text())["project"]
    return ".".join(project["version"].split(".")[:2])


def put_into(folder: Path, site: Path, version: str) -> Path:
    """Copy a built site into a folder of versions and update `versions.json` for the theme.

    `index.html` in the folder redirects to the newest version.

    Returns:
        The folder of this version.
    """
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version)
    listed = folder / "versions.json"
    there = {each["version"] for each in json.loads(listed.read_text())} if listed.exists() else ()
    newest, *older = sorted({*there, version}, key=lambda v: [*map(int, v.split("."))])[::-1]
    named = [{"version": v, "title": v, "aliases": []} for v in (newest, *older)]
    named[0]["aliases"] = ["latest"]
    listed.write_text(json.dumps(named, indent=1) + "\n")
    lead = f'<meta http-equiv="refresh" content="0; url={newest}/index.html">\n'
    (folder / "index.html").write_text(lead)
    return folder / version


def write_pages(config: dict[str, Any]) -> None:
    """Write the pages and the configuration for the generator.

    Raises:
        SiteError: `left_out`, `linked` or `api_pages` found a fault.
    """
    config["nav"] = expanded(config["nav"])
    sources = {source: place(source) for source in (*named(config["nav"]), *unlisted())}
    if missing := left_out(sources):
        raise SiteError(f"site.yml does not list {', '.join(missing)}")
    reference, url = {**api_pages(), OPTIONS: options_page()}, config.pop("repo_url")
    for source, where in sources.items():
        text = reference.get(source) or linked(source, sources, url)
        (PAGES / where).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / where).write_text(text)
    shutil.copytree(ROOT / "docs" / "pictures", PAGES / "pictures")
    shutil.copy(ROOT / "docs" / "site.css", PAGES)
    config["nav"] = placed(config["nav"])
    config |= {"docs_dir": PAGES.name, "site_dir": HTML.name}
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))


def run(*arguments: str) -> None:
    """Run Python in the build folder, with the sources of core and tools on PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (CORE, TOOLS)))}
    subprocess.run([sys.executable, *arguments], cwd=BUILD, env=environment, check=True)


# ---------------------------------------------------------------------------------------------
# The navigation: titles and pages, by their path in the repository


def expanded(nav: Any) -> Any:
    """Replace `ops`, `options` and `api` in the navigation by their pages."""
    if isinstance(nav, list):
        return [expanded(each) for each in nav]
    if isinstance(nav, dict):
        return {title: expanded(below) for title, below in nav.items()}
    if nav == "ops":
        pages = sorted((ROOT / "docs" / "ops").glob("[!R]*.md"))
        return ["docs/ops/README.md", *({p.stem: f"docs/ops/{p.name}"} for p in pages)]
    if nav == "options":
        return OPTIONS
    if nav == "api":
        return [{module: api_source(module)} for module in API]
    return nav


def named(nav: Any) -> Iterator[str]:
    """Yield all pages of a navigation."""
    for below in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from named(below)
    if isinstance(nav, str) and nav.endswith(".md"):
        yield nav


def unlisted() -> list[str]:
    """Pages that are only linked and searchable. In the navigation they would hide the others."""
    kernels = (ROOT / "docs" / "wrong-kernels").glob("*.md")
    return [str(path.relative_to(ROOT)) for path in sorted([*CODES.glob("*.md"), *kernels])]


def left_out(sources: Collection[str]) -> list[str]:
    """Pages of docs/ that are not part of the site."""
    pages = (ROOT / "docs").rglob("*.md")
    return sorted({str(path.relative_to(ROOT)) for path in pages}.difference(sources))


def placed(nav: Any) -> Any:
    """Replace each page of the navigation by its path in the site."""
    if isinstance(nav, list):
        return [placed(each) for each in nav]
    if isinstance(nav, dict):
        return {title: placed(below) for title, below in nav.items()}
    return place(nav) if nav.endswith(".md") else nav


def title(source: str) -> str:
    heading = re.search(r"^# (.+)$", (ROOT / source).read_text(), re.M)
    if heading is None:
        raise SiteError(f"{source} has no heading")
    return heading[1]


def place(source: str) -> str:
    """Path of a repository page in the site; docs/README.md becomes the first page."""
    path = source.removeprefix("docs/")
    if (ROOT / source).parent == CODES:
        return f"errors/{Path(source).name.lower()}"
    if found := re.fullmatch(r"(?:packages|examples)/(.+)/README\.md", path):
        return f"backends/{found[1]}.md"
    if path != source or path.startswith("api/"):
        return path.replace("README.md", "index.md")
    return path.lower()


# ---------------------------------------------------------------------------------------------
# Pages of the repository

CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r'(?<=\]\()[^)\s]+(?=\))|(?<= src=")[^"]+|(?<= srcset=")[^"]+')
NAMED = re.compile(r"\[[\w./-]+\.md\](?=\(([^)\s#]+))")
"""A link with a file name as its text."""
BARE = re.compile(r"(?<![\w/(\[.-])docs/[\w-]+\.md")
"""A page mentioned without a link. Pages of error codes do so because terminals print them."""
PICTURE = re.compile(
    r'<picture>\s*<source media="[^"]*dark[^"]*" srcset="([^"]+)">\s*<img ([^>]*)>\s*</picture>'
)
"""A drawing with a dark variant for dark colour schemes."""


def linked(source: str, sources: Mapping[str, str], url: str) -> str:
    """Return the text of a page with the links of the site.

    Raises:
        SiteError: a link has no target file in the repository.
    """
    text = (ROOT / source).read_text()

    def there(found: re.Match[str]) -> str:
        return link(found[0], source, sources, url)

    def named(found: re.Match[str]) -> str:
        name = os.path.normpath(os.path.join(os.path.dirname(source), found[1]))
        return f"[{title(name)}]" if name in sources else found[0]

    def bare(found: re.Match[str]) -> str:
        return f"[{found[0]}]({os.path.relpath(found[0], os.path.dirname(source))})"

    def prose(text: str) -> str:
        text = PICTURE.sub(_by_scheme, text)
        if (ROOT / source).parent == CODES:
            text = BARE.sub(bare, text)
        return LINK.sub(there, NAMED.sub(named, text))

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [prose(text[end : code.start()]), _folded(code[0], source)]
        end = code.end()
    joined = "".join([*parts, prose(text[end:])])
    if (ROOT / source).parent == CODES:  # it is not in the navigation
        joined = re.sub(r"(?m)^(# .+)$", r"\1\n\n[All codes](../errors.md)", joined, count=1)
    # In table code, GitHub needs `|` escaped, but Python-Markdown would show the backslash.
    return re.sub(r"^\|.*$", lambda row: re.sub(r"`[^`]+`", _bars, row[0]), joined, flags=re.M)


def _folded(code: str, source: str) -> str:
    """Mark a contract's text for line wrapping by site.css; tables and drawings scroll instead."""
    is_contract = source.startswith("docs/ops/") and code.startswith("```text\n")
    return code.replace("```text", "``` { .text .folded }", 1) if is_contract else code


def _by_scheme(picture: re.Match[str]) -> str:
    """Return both drawings; site.css shows the drawing for the chosen colour scheme."""
    dark, attributes = picture.groups()
    other = re.sub(r' src="[^"]+"', f' src="{dark}"', attributes)
    return f'<img class="only-light" {attributes}><img class="only-dark" {other}>'


def _bars(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


def link(target: str, source: str, sources: Mapping[str, str], url: str) -> str:
    """Return a link's target in the site; on GitHub if the site does not contain it."""
    path, hash_, anchor = target.partition("#")
    if urlsplit(target).scheme or not path:
        return target
    file = Path(os.path.normpath((ROOT / source).parent / path))
    if not (file.exists() and file.is_relative_to(ROOT)):
        raise SiteError(f"{source}: broken link {target}")
    name = str(file.relative_to(ROOT))
    if (file / "README.md").exists() and f"{name}/README.md" in sources:
        name += "/README.md"
    here = os.path.dirname(sources[source])
    if name in sources:
        return os.path.relpath(sources[name], here or ".") + hash_ + anchor
    if name.startswith("docs/pictures/"):
        return os.path.relpath(name.removeprefix("docs/"), here or ".")
    return f"{url}/{'tree' if file.is_dir() else 'blob'}/main/{name}{hash_}{anchor}"


# ---------------------------------------------------------------------------------------------
# The API reference


def api_source(module: str) -> str:
    """Source name of a module's page, as if it were in the repository."""
    return f"api/{module}.md"


def api_pages() -> dict[str, str]:
    """Page name -> text, for each page of the API reference.

    Raises:
        SiteError: `undocumented` found a name, or a module has no public names.
    """
    import griffe

    loader = griffe.GriffeLoader(search_paths=[CORE, TOOLS])
    for package in dict.fromkeys(module.partition(".")[0] for module in API):
        loader.load(package)
    loader.resolve_aliases()
    pages: dict[str, str] = {}
    links: dict[str, str] = {}
    bare: list[str] = []
    for module, title in API.items():
        found = loader.modules_collection[module]
        own: list[tuple[str, Any]] = []
        elsewhere: list[tuple[str, Any]] = []
        for name in public_names(found):
            target = found[name].final_target if found[name].is_alias else found[name]
            (elsewhere if target.path in links else own).append((name, target))
            links.setdefault(target.path, f"{module}.md#{module}.{name}")
        if not own:
            raise SiteError(f"{module}: no public name was found")
        lines = [f"# {module}", "", f"{title}: all public names.", ""]
        if elsewhere:
            linked = ", ".join(f"[`{name}`]({links[target.path]})" for name, target in elsewhere)
            lines += [f"Also importable from here, documented there: {linked}.", ""]
        for name, target in own:
            bare += undocumented(f"{module}.{name}", target)
            lines += [f"::: {module}.{name}", ""]
        pages[api_source(module)] = "\n".join(lines)
    if bare:
        raise SiteError("undocumented: " + "; ".join(bare))
    return pages


def public_names(module: Any) -> list[str]:
    """Return the public names of a module: its `__all__`, or its classes if it has no `__all__`."""
    if module.exports is not None:
        return list(module.exports)
    classes = [name for name, each in module.members.items() if each.is_public and each.is_class]
    return list(getattr(import_module(module.path), "__all__", classes))


def undocumented(name: str, target: Any) -> Iterator[str]:
    """Yield undocumented names: `name`, its public methods, and wrong or missing parameters. A
    method may have its docstring in a base class."""
    if not target.has_docstring:
        yield name
        return
    if not (target.is_class or target.is_function):
        return
    parameters = {each.name.strip("*") for each in target.parameters} - {"self"}
    for section in target.docstring.parse("google", warnings=False):
        if section.kind.value == "parameters":
            known = {word.strip(" *") for each in section.value for word in each.name.split(",")}
            yield from (f"{name}, parameter {each}" for each in sorted(known ^ parameters))
    for member in target.members.values() if target.is_class else ():
        ours = member.is_function or "property" in member.labels
        of_bases = [base.members.get(member.name, member) for base in target.mro()]
        is_documented = any(each.has_docstring for each in (member, *of_bases))
        if ours and not member.name.startswith("_") and not is_documented:
            yield f"{name}.{member.name}"


def options_page() -> str:
    """Return the page with each verb's `--help`."""
    text = "# Options of each verb\n\nWhat `vllm-fl VERB --help` prints.\n"
    from vllm_fl_tools.cli._verbs import VERBS

    for verb in VERBS:
        command = [sys.executable, "-m", "vllm_fl_tools.cli", verb, "--help"]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        text += f"\n## vllm-fl {verb}\n\n```text\n{output}```\n"
    return text


# ---------------------------------------------------------------------------------------------
# The benchmark report, and checks of the result


def stored_table() -> dict[str, Any]:
    """Convert the stored table to the current format of `vllm-fl tune --json`."""
    stored: dict[str, Any] = json.loads(MEASURED.read_text())[TABLE]
    names = ("mode", "dtype", "sizes", "model", "date", "seconds")
    table: dict[str, Any] = {name: stored[name] for name in names}
    table["holds"] = {"device": stored["identity"]["device"], "distributions": {}}
    table["ops"] = {}
    for op, tuned in stored["ops"].items():
        figures = [{k: v for k, v in f.items() if k != "copy_share"} for f in tuned["figures"]]
        rows = {"default": tuned["default"], "rows": tuned["rows"], "figures": figures}
        table["ops"][op] = rows
    return table


def write_report(path: Path) -> None:
    """Write `vllm-fl show --html` of the stored table and of the support matrix's runs."""
    table = BUILD / "qk_norm_rope.json"
    table.write_text(json.dumps({"schema": 1, "table": stored_table()}))
    runs = sorted(map(str, (ROOT / "docs" / "support").glob("*.json")))
    run("-m", "vllm_fl_tools.cli", "show", str(table), *runs, "--html", str(path))
    path.write_text(with_a_way_back(path.read_text()))


def with_a_way_back(report: str) -> str:
    """Add links to the site at the top of a report.

    Raises:
        SiteError: the report has no `<body><main>`.
    """
    way = '<p><a href="index.html">vllm-fl documentation</a> › <a href="tuning.html">Tuning</a></p>'
    text, count = re.subn(r"(<body[^>]*>\s*<main>\n?)", rf"\g<1>{way}\n", report)
    if count != 1:
        raise SiteError("the report has no <body> for the link to the documentation")
    return text


class _Page(HTMLParser):
    """Links, anchors and browser-loaded resources of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        values = {key: value or "" for key, value in attrs}
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        if values.get("data-md-component") == "source":  # its script loads the star count
            self.fetched.append(values.get("href", ""))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        fetches = {"link": "href", "script": "src", "img": "src", "source": "srcset"}
        if fetches.get(tag) in values and values.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(values[fetches[tag]])


def check(site: Path) -> None:
    """Check every link of every page.

    Raises:
        SiteError: a link has no page or anchor, or a page loads a resource from another host.
    """
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for target in (*page.links, *page.fetched):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.fetched:
                    faults.append(f"{where} loads {target} from another site")
                continue
            if path.name == "404.html" and target.startswith("/"):
                continue  # served for every missing address, so it uses absolute links
            there = Path(os.path.normpath(path.parent / unquote(parts.path or path.name)))
            there = there / "index.html" if there.is_dir() else there
            if not there.exists():
                faults.append(f"{where}: broken link {target}")
            elif there in pages and unquote(parts.fragment) not in {"", *pages[there].anchors}:
                faults.append(f"{where}: {target}: no such anchor")
    if faults:
        raise SiteError("\n  ".join(["", *dict.fromkeys(faults)]))


if __name__ == "__main__":
    sys.exit(main())
