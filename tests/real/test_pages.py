"""The commands of README and the guides print what the pages show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from engines import command
from real_engines import SMOLLM2, Model
from servers import serving

ROOT = Path(__file__).parents[2]

BARE = "op_backends:\n  group:norms: [vendor, stock]\n"
STOCK = "extends: platform\nop_backends:\n  group:norms: stock\n"

Type = Callable[..., None]
"""`type_(page, number, **variables)`: run a command of a page and compare its output."""


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in this language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.M | re.S)
    return fence.findall((ROOT / page).read_text())


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a page, and the output that the page shows."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            typed, *lines = part.splitlines()
            while typed.endswith("\\"):
                typed = typed[:-1] + lines.pop(0).strip()
            yield typed, lines


def missing(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Return the shown lines that are not printed in this order. Numbers and digests may differ."""
    rest, found = iter(printed), []
    for line in shown:
        words = (re.sub(r"[0-9a-f]{16}|\d[\d.]*", "¤", word) for word in line.split())
        pattern = r"\s+".join(re.escape(word).replace("¤", "[0-9a-f.]+") for word in words)
        wanted = re.compile(pattern.replace("…", ".*"))
        if not line.startswith(("…", "─")) and not any(map(wanted.search, rest)):
            found.append(line)
            rest = iter(printed)
    return found


@pytest.fixture
def type_(model: Model, tmp_path: Path) -> Type:
    (tmp_path / SMOLLM2).symlink_to(model(SMOLLM2))

    def type_(page: str, number: int, *, url: str = "", **variables: str) -> None:
        typed, shown = list(commands(page))[number]
        for there, here in (
            ("build/models/", ""),
            ('"MODEL"', f'"{SMOLLM2}"'),
            ("/var/lib/node_exporter", str(tmp_path)),
            ("http://127.0.0.1:8000", url),
        ):
            typed = typed.replace(there, here)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {
            **os.environ,
            "PATH": path,
            "COLUMNS": "200",
            "HF_HUB_OFFLINE": "1",
            **variables,
        }
        shell = ["bash", "-c", f"{typed} 2>&1"]
        done = subprocess.run(
            shell, check=False, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        printed = done.stdout.splitlines()
        assert not missing(shown, printed), f"{page}: {typed}\n{done.stdout}"

    return type_


def test_plans(type_: Type, tmp_path: Path) -> None:
    (tmp_path / "norms.yaml").write_text(blocks("docs/guides/norms.md", "yaml")[0])
    (tmp_path / "bare.yaml").write_text(BARE)
    for page in ("README.md", "docs/guides/operate.md", "docs/guides/which-kernel.md"):
        type_(page, 0)
    for number in (0, 1):
        type_("docs/guides/norms.md", number)
    type_("docs/guides/compare.md", 0)


def test_a_roll_out(type_: Type, tmp_path: Path) -> None:
    (tmp_path / "norms.yaml").write_text(STOCK)
    type_("docs/guides/rollout.md", 0)
    words = ("plan", "--model", SMOLLM2, "--enforce-eager", "--save", "vllm-fl.lock")
    done = command(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    new = {"VLLM_FL_CONFIG": "norms.yaml", "VLLM_FL_LOCK": "warn:vllm-fl.lock"}
    type_("docs/guides/rollout.md", 1, **new)
    type_("docs/guides/rollout.md", 2, **new | {"VLLM_FL_LOCK": "vllm-fl.lock"})


def test_a_server(type_: Type, model: Model, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--enforce-eager", "--served-model-name", SMOLLM2)
    variables = {"VLLM_FL_METRICS": str(tmp_path / "chat.prom")}
    with serving(model(SMOLLM2), log, *options, **variables) as server:
        for number in (1, 2):
            type_("docs/guides/operate.md", number, url=server.url)
        type_("docs/guides/which-kernel.md", 1)
    (start,) = re.findall(
        r"^```text\n(.*)\n```", (ROOT / "docs/guides/operate.md").read_text(), re.M
    )
    assert not missing([start], log.read_text().splitlines())
    assert "rank 0 has ended" in log.read_text()
