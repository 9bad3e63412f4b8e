"""Documentation and code agree: everything is documented, and everything documented exists."""

from __future__ import annotations

import ast
import enum
import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import docs_site
import layer_table
import op_pages
import pytest
import support_matrix
import words
import yaml

import envs

ROOT = envs.ROOT
SOURCES = ROOT / "packages" / "vllm-fl-core" / "src"
HOMES = {
    "vllm_fl": SOURCES,
    "vllm_fl_ops": ROOT / "packages" / "vllm-fl-ops" / "src",
    "vllm_fl_verify": ROOT / "packages" / "vllm-fl-verify" / "src",
    "vllm_fl_tools": ROOT / "packages" / "vllm-fl-tools" / "src",
}
"""Package -> its source folder, for distributions with modules that the pages mention."""
for home in (SOURCES, HOMES["vllm_fl_tools"], ROOT / "packages" / "vllm-fl-flaggems" / "src"):
    sys.path.insert(0, str(home))  # imports without torch

import vllm_fl  # noqa: E402
from vllm_fl import dispatch, errors  # noqa: E402
from vllm_fl.plugins import hookspecs  # noqa: E402
from vllm_fl.plugins.discovery import BACKENDS, EXTENSIONS  # noqa: E402
from vllm_fl.plugins.registry import known_contracts  # noqa: E402
from vllm_fl.settings import loading  # noqa: E402
from vllm_fl.settings.policy import DEFAULT_ORDERS  # noqa: E402
from vllm_fl.settings.schema import CONFIG, ITEMS, file_keys, variables, variables_of  # noqa: E402
from vllm_fl.settings.values import OP_CONFIG, PER_OP  # noqa: E402
from vllm_fl_flaggems.settings import SETTINGS  # noqa: E402
from vllm_fl_tools.cli._verbs import VERBS  # noqa: E402

DECLARED = {**ITEMS, **{spec.key: spec for spec in SETTINGS}}
VARIABLES = variables(DECLARED)
load_settings = partial(loading.load_settings, plugins=SETTINGS)

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = words.pages()
EVERY_PAGE = [
    *PAGES,
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def section(text: str, title: str, level: int = 2) -> str:
    """The text under the heading `title` of this level."""
    heading = f"{'#' * level} {re.escape(title)}"
    found = re.search(rf"^{heading}\n(.*?)(?=^#{{2,{level}}} |\Z)", text, re.M | re.S)
    assert found, f"there is no section {title!r}"
    return found[1]


def headings(text: str) -> list[str]:
    """The code in headings of the third level: ### `name`."""
    return re.findall(r"^### `([^`]+)`", text, re.M)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each table row that starts with code."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def code(cell: str) -> str:
    return cell.strip("`").replace(r"\|", "|")


class _Word:
    """An annotation, printed as in the source."""

    def __init__(self, text: object) -> None:
        self.text = text

    def __repr__(self) -> str:
        return str(self.text)


def _is_literal(default: object) -> bool:
    return default == frozenset() or isinstance(default, str | int | float | tuple | None)


def signature(value: Callable[..., Any]) -> str:
    """The literal signature, with `...` for a non-literal default."""
    found = inspect.signature(value)
    parameters = [
        p.replace(
            annotation=p.empty
            if p.name == "self" or p.annotation is p.empty
            else _Word(p.annotation),
            default=p.default if p.default is p.empty or _is_literal(p.default) else _Word("..."),
        )
        for p in found.parameters.values()
    ]
    returns = found.return_annotation
    if inspect.isclass(value):
        returns = found.empty
    elif returns is not found.empty:
        returns = _Word(returns)
    text = str(found.replace(parameters=parameters, return_annotation=returns))
    for request in (a for base in getattr(value, "__orig_bases__", ()) for a in get_args(base)):
        text = text.replace("Callable[[R]", f"Callable[[{request.__name__}]")
    return text


def public(value: type) -> dict[str, Any]:
    """The public methods and properties of one of our classes."""
    return {
        name: member
        for owner in value.__mro__[:-1]
        for name, member in vars(owner).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | classmethod))
    }


def is_protocol(value: object) -> bool:
    return getattr(value, "_is_protocol", False)


def one_line(text: str) -> str:
    """Normalise layout: line breaks, and the comma before a closing bracket."""
    text = re.sub(r"\s+", " ", text)
    return re.sub(r",? ([)\]])", r"\1", re.sub(r"([(\[]) ", r"\1", text))


def written_signatures(text: str) -> set[str]:
    """Every signature in a reference's Python blocks; blocks with an import are examples."""
    found = set()
    for block in blocks(text, "python"):
        if "import " in block:
            continue
        for part in re.split(r"\n(?=\S)(?![)\]])", block.strip()):
            found.add(one_line(part))
    return found


def expected_signatures(module: Any) -> set[str]:
    """The signatures that a module's API reference must have."""
    wanted = set()
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type) and issubclass(value, enum.Enum):
            wanted |= {f"{name}.{member.name} = {json.dumps(member.value)}" for member in value}
        elif is_protocol(value):  # never instantiated
            wanted |= {f"{name}.{key}: {kind}" for key, kind in value.__annotations__.items()}
        elif inspect.isclass(value) or inspect.isroutine(value):
            wanted.add(f"{name}{signature(value)}")
        else:
            wanted.add(name)
        if name in ("OpManager", "OpRegistry") or is_protocol(value):
            for method, member in public(value).items():
                if isinstance(member, property):
                    kind = member.fget.__annotations__["return"]
                    wanted.add(f"{name}.{method}: {kind}")
                else:
                    wanted.add(f"{name}.{method}{signature(member)}")
    return wanted


@pytest.mark.parametrize(
    ("text", "module"),
    [(section(page("dispatch.md"), "API reference"), dispatch), (page("plugin-api.md"), vllm_fl)],
    ids=["dispatch.md", "plugin-api.md"],
)
def test_every_public_name_is_documented_with_its_signature(text: str, module: Any) -> None:
    assert written_signatures(text) == expected_signatures(module)


def test_every_hook_is_documented_with_its_signature() -> None:
    text = section(page("plugins.md"), "Hooks")
    hooks = {
        name
        for name, value in vars(hookspecs).items()
        if getattr(value, f"{hookspecs.PROJECT}_spec", None)
    }
    assert set(headings(text)) == hooks
    wanted = {f"{name}{signature(getattr(hookspecs, name))}" for name in hooks}
    assert wanted <= {one_line(code(c)) for c in re.findall(r"`[^`\n]+`", text)}


def test_contracts_are_documented_by_the_command_and_no_page_lists_them() -> None:
    """tests/cli/test_explain_verb.py of the tools compares the command with every contract."""
    text = section(page("dispatch.md"), "Contracts")
    assert set(headings(text)) == {"attention_backend", "communicator"}
    assert {"vllm-fl explain rms_norm --contract"} <= {b.strip() for b in blocks(text, "sh")}
    assert known_contracts().contracts
    listing = re.compile(r"\b(two|three|four|five|all \d+) (ops|operators)\b")
    for path in EVERY_PAGE:
        assert not listing.findall(path.read_text()), path
        for op in known_contracts().contracts:
            assert f"### `{op}`" not in path.read_text(), path


def test_every_error_is_documented_with_its_fields() -> None:
    table = {code(r[0]): r[1] for r in rows(section(page("dispatch.md"), "Errors"))}
    assert set(table) == {name for name in vars(errors) if name.endswith("Error")}
    for name, fields in table.items():
        documented = inspect.getdoc(getattr(errors, name)) or ""
        documented_fields = re.findall(r"^    (\w+): ", documented, re.M)
        assert re.findall(r"`(\w+)`", fields) == documented_fields, name


def test_every_code_is_listed_with_the_title_of_its_page() -> None:
    listed = re.findall(r"^\| \[(FL\d{3})\]\(\.\./(.+)\) \| (.+) \|$", page("errors.md"), re.M)
    pages = {
        path: path.read_text().splitlines()[0].removeprefix(f"# {path.stem}: ")
        for path in sorted((SOURCES / "vllm_fl" / "codes").glob("*.md"))
    }
    assert listed == [(p.stem, str(p.relative_to(ROOT)), title) for p, title in pages.items()]


def test_every_variable_is_documented_with_its_key_and_default() -> None:
    text = page("settings.md").split("## Precedence")[0]
    table = {code(r[0]): [*map(code, r[1:4])] for r in rows(text) if r[0].isupper()}
    assert set(table) == set(VARIABLES), "docs/settings.md: a row in one of the first tables"
    for item in DECLARED.values():
        default = {None: "–", (): "–", True: "true", False: "false"}.get(item.default, item.default)
        for variable in variables_of(item):
            assert table[variable] == [item.key, default, "yes" if item.in_file else "no"], variable
    for variable in (PER_OP, OP_CONFIG):
        assert table[variable][0] == "op_backends"


def reported(function: ast.FunctionDef) -> set[str]:
    """The top-level keys of the dictionaries that a function makes."""
    inner: set[ast.AST] = set()
    found: set[str] = set()
    for node in ast.walk(function):  # outer ones first
        if isinstance(node, ast.Dict) and node not in inner:
            found |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Dict | ast.DictComp):
            inner |= {*ast.walk(node)} - {node}
    return found


def test_every_field_of_a_worker_s_report_is_documented() -> None:
    core = SOURCES / "vllm_fl" / "integration"
    extensions = (HOMES[f"vllm_fl_{name}"] for name in ("verify", "tools"))
    wanted = set[str]()
    for folder in (core, core / "patchers", *extensions):
        for path in sorted(folder.rglob("*.py") if folder.name == "src" else folder.glob("*.py")):
            if folder.name == "patchers":  # `report` of several has the class's key
                wanted |= {*re.findall(r'^    key = "(\w+)"$', path.read_text("utf-8"), re.M)}
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef) and (
                    node.name in ("vllm_fl_report", "worker_report")
                    or (node.name == "report" and folder.name == "patchers")
                ):
                    wanted |= reported(node)
    fields = section(page("worker-report.md"), "Fields")
    documented = {name for row in rows(fields) for name in re.findall(r"`(\w+)`", row[0])}
    assert documented == wanted


def test_every_key_of_a_file_is_documented() -> None:
    documented = {code(r[0]) for r in rows(section(page("settings.md"), "Files"))}
    assert documented == set(file_keys(DECLARED)), (
        "docs/settings.md, under Files: the table of keys"
    )


def test_tokens_and_orders_are_the_codes() -> None:
    text = page("settings.md")
    orders = {code(r[0]): re.findall(r"`(\w+)`", r[1]) for r in rows(section(text, "Orders"))}
    assert orders == {kind: list(order) for kind, order in DEFAULT_ORDERS.items()}
    tokens = {code(r[0]) for r in rows(section(text, "Selectors"))}
    kinds = {"flagos", "vendor", "vendor:NAME", "reference", "impl:ID"}
    assert tokens == {*kinds, "foreign", "stock"}


def test_every_verb_is_documented() -> None:
    documented = headings(page("cli.md"))
    assert {h.split()[1] for h in documented} == {*VERBS}, (
        "docs/cli.md has a heading '### `vllm-fl VERB`' for each verb"
    )
    readme = (ROOT / "README.md").read_text()
    hints = re.findall(r"\{command\} (\w+)", (ROOT / "quickstart.py").read_text())
    for verb in [*re.findall(r"vllm-fl (\w+)", "\n".join(blocks(readme, "sh"))), *hints]:
        assert verb in VERBS


def test_no_page_speaks_of_a_verb_or_variable_that_is_not_there() -> None:
    for path in EVERY_PAGE:
        text = path.read_text()
        commands = re.findall(r"`vllm-fl ([a-z]+)[^`\n]*`", text)
        for block in (*blocks(text, "sh"), *blocks(text, "")):
            commands += re.findall(r"^vllm-fl ([a-z]+)", block, re.M)
        assert set(commands) <= {*VERBS}, path
        if path.name != "migration.md":  # it also names variables of the other system
            named = set(re.findall(r"\bVLLM_FL_[A-Z_]*[A-Z]\b", text))
            assert {name for name in named if "VENDOR_" not in name} <= set(VARIABLES), path


def test_the_conformance_kit_is_documented() -> None:
    folder = HOMES["vllm_fl_tools"] / "vllm_fl_tools" / "testing"
    text = page("kit.md")
    made = (folder / "cases.py").read_text()
    checks = re.findall(r'^    "(\w+)": ConformanceCheck\(', made, re.M)
    documented = {code(r[0]) for r in rows(text) if r[0].startswith("`test_")}
    assert documented == {*(f"test_{name}" for name in checks), "test_exceptions"}
    package = (folder / "__init__.py").read_text()
    (exported,) = re.findall(r"^__all__ = (\[.*?\])", package, re.M | re.S)
    for name in ast.literal_eval(exported):
        assert f"`{name}" in text, name


@pytest.mark.parametrize("number", range(len(blocks(page("settings.md"), "yaml"))))
def test_every_yaml_example_loads(number: int, tmp_path: Path) -> None:
    path = tmp_path / "fl.yaml"
    path.write_text(blocks(page("settings.md"), "yaml")[number])
    settings = load_settings({CONFIG: str(path)})
    assert any(s.origin.startswith(str(path)) for s in settings.values())
    assert settings.warnings == ()


@pytest.mark.parametrize("path", GUIDES, ids=lambda p: p.stem)
def test_every_settings_file_in_a_guide_loads(path: Path, tmp_path: Path) -> None:
    """Including manifests, because a ConfigMap contains settings files as text."""
    texts = blocks(path.read_text(), "yaml")
    for manifest in blocks(path.read_text(), "yml"):
        for each in yaml.safe_load_all(manifest):
            assert {"apiVersion", "kind", "metadata"} <= set(each)
            texts += each.get("data", {}).values()
    for text in texts:
        file = tmp_path / "fl.yaml"
        file.write_text(text)
        assert load_settings({CONFIG: str(file)}).warnings == ()


@pytest.mark.parametrize("path", GUIDES, ids=lambda p: p.stem)
def test_a_guide_has_six_hundred_words_at_most(path: Path) -> None:
    assert len(path.read_text().split()) <= 600


@pytest.mark.parametrize("number", range(len(blocks(page("settings.md"), "sh"))))
def test_every_shell_example_loads(number: int, tmp_path: Path) -> None:
    text = page("settings.md")
    config, orders = tmp_path / "fl.yaml", tmp_path / "ops.json"
    config.write_text(blocks(text, "yaml")[0])
    orders.write_text(blocks(text, "json")[0])
    table = tmp_path / "table.yaml"
    table.write_text("holds: {}\ndevices: []\n")
    env: dict[str, str] = {}
    for line in blocks(text, "sh")[number].splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[0] != "export":
            continue
        name, equals, value = words[1].partition("=")
        assert equals and len(words) == 2, line
        files = {CONFIG: config, OP_CONFIG: orders, "VLLM_FL_TABLE": table}
        env[name] = str(files.get(name, value))
    assert env
    assert set(env) <= set(VARIABLES)
    settings = load_settings(env, platform="cuda")
    origins = [setting.origin for setting in settings.values()]
    named = {each.split()[1] for each in origins if each.startswith("environment ")}
    if CONFIG not in env:
        assert set(env) <= named | {PER_OP, OP_CONFIG}
        assert settings.warnings == ()


def test_every_json_example_loads() -> None:
    for block in blocks(page("settings.md"), "json"):
        json.loads(block)


def _anchors(text: str) -> set[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", EVERY_PAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_internal_links_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    pictures = re.findall(r' (?:src|srcset)="([^"]+)"', text)
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *pictures]:
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in _anchors(linked.read_text()), f"{path.name}: {target}"


def test_the_readme_leads_to_the_list_of_every_page() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()
    listed = page("README.md")
    docs = ROOT / "docs"
    pages = {str(p.relative_to(docs)) for p in PAGES if p.is_relative_to(docs)} - {"README.md"}
    assert not [name for name in sorted(pages) if f"({name})" not in listed]


def test_the_site_has_every_page() -> None:
    nav = docs_site.expanded(yaml.safe_load((ROOT / "site.yml").read_text())["nav"])
    made = {docs_site.OPTIONS, *map(docs_site.api_source, docs_site.API)}
    sources = {*docs_site.named(nav), *docs_site.unlisted()} - made
    assert not docs_site.left_out(sources)
    assert not [source for source in sources if not (ROOT / source).is_file()]


def test_each_contradiction_of_the_other_system_has_a_test() -> None:
    numbers = [int(r[0].strip("`")) for r in rows(section(page("migration.md"), "Contradictions"))]
    assert numbers == list(range(1, 15))
    tests = (ROOT / "packages/vllm-fl-core/tests/test_contradictions.py").read_text()
    assert sorted(map(int, re.findall(r"^def test_(\d\d)_", tests, re.M))) == numbers


def test_modules_named_in_the_pages_exist() -> None:
    for path in EVERY_PAGE:
        text = path.read_text()
        named = re.findall(rf"`((?:{'|'.join(HOMES)})(?:\.[a-z_]+)+)`", text)
        for name in {*named} - {BACKENDS, EXTENSIONS}:
            place = HOMES[name.partition(".")[0]].joinpath(*name.split("."))
            assert place.with_suffix(".py").is_file() or place.is_dir(), f"{path.name}: {name}"


def test_the_architecture_names_modules_that_exist_and_every_room_in_order() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    core = SOURCES / "vllm_fl"
    rooms = {path.parent.name for path in core.glob("*/__init__.py")}
    beside = {name: section(text, name.replace("_", "-"), 3) for name in HOMES if name != "vllm_fl"}
    for said in beside.values():
        text = text.replace(said, "")
    for package, said in {"vllm_fl": text, **beside}.items():
        home = HOMES[package] / package
        named = re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", said)
        folders = {path.name for path in home.iterdir() if path.is_dir()}
        inside = [name for name in named if name.partition("/")[0] in folders | rooms]
        assert inside or package == "vllm_fl_verify"  # this package has no rooms
        assert not [name for name in inside if not (home / name).exists()]
    tests = re.findall(r"`(tests/\w+/\w*(?:\.py)?|tests/\w+\.py)`", text)
    places = (ROOT, SOURCES.parent)
    assert tests and not [t for t in tests if not any((place / t).exists() for place in places)]
    layers = re.search(r"^layers =\n((?: +[\w| ]+\n)+)", (ROOT / ".importlinter").read_text(), re.M)
    assert layers
    drawn = "".join(blocks(section(text, "The rooms of core"), "text"))
    order = [word for line in drawn.splitlines() if (word := line.strip().partition(" ")[0])]
    wanted = [room for room in layers[1].split() if room in rooms]
    assert [word for word in order if word in rooms] == wanted


@pytest.mark.parametrize("path", EVERY_PAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_sentence_has_twenty_words_at_most_on_average(path: Path) -> None:
    lengths = [len(sentence.split()) for sentence in words.sentences(path.read_text())]
    assert sum(lengths) <= 20 * len(lengths)


@pytest.mark.parametrize(
    ("sections", "most"),
    [(("Guides", "You operate vLLM"), 6000), (("You have kernels",), 5000)],
    ids=["operator", "vendor"],
)
def test_a_reader_is_led_to_few_words(sections: tuple[str, ...], most: int) -> None:
    led = [path for section in sections for path in words.readers()[section]]
    assert sum(len(path.read_text().split()) for path in led) <= most, (
        "python tools/words.py: move what few need to a page that is looked up"
    )


RUNS = {path.name: json.loads(path.read_text()) for path in support_matrix.RUNS.glob("*.json")}


def test_the_support_matrix_is_what_the_runs_say() -> None:
    assert RUNS
    assert support_matrix.page(RUNS) == support_matrix.PAGE.read_text(), (
        "run tools/support_matrix.py"
    )


def test_the_page_of_layers_is_what_the_releases_say() -> None:
    data = layer_table.releases()
    said, is_now = layer_table.PAGE.read_text(), layer_table.page(data)
    # A layer that an op has covered since then may wait until the page is regenerated.
    for old, new in zip(said.splitlines(), is_now.splitlines(), strict=True):
        reached = re.fullmatch(r"(.*\| )op `\w+` \|", new)
        assert old == new or (reached and old == f"{reached[1]}`layers()` |"), (
            "run tools/layer_table.py"
        )
    assert {"0.26", "0.27", "0.32", "0.33"} <= {release.rpartition(".")[0] for release in data}
    classes = {layer["cls"] for layer in data["0.32.0"]["layers"]}
    assert {cls for cls in layer_table.REMARKS if cls not in classes} == set()


def test_the_pages_of_the_ops_are_what_contracts_and_bindings_say() -> None:
    made = op_pages.pages()
    held = {path.name: path.read_text() for path in op_pages.FOLDER.glob("*.md")}
    # The page of a new op may wait until the pages are regenerated.
    listed = held.pop("README.md").splitlines()
    assert set(listed) <= set(made["README.md"].splitlines()), "run tools/op_pages.py"
    assert held and all(made.get(name) == page for name, page in held.items()), (
        "run tools/op_pages.py"
    )
