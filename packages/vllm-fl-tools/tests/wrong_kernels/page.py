"""The pages of docs/wrong-kernels, and the tables of docs/trust.md and docs/trust-limits.md: made
from the corpus, and from what was seen of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch

from vllm_fl.contracts import OpSpec
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_tools.testing.families import FAMILIES
from vllm_fl_verify.batches import FIXED_COUNTS

from .corpus import KINDS, LATENT, MIXED, Wrong, corpus

__all__ = ["COLUMNS", "FOLDER", "keep", "pages", "seen", "write"]

DOCS = Path(__file__).parents[4] / "docs"

FOLDER = DOCS / "wrong-kernels"

SEEN = Path(__file__).with_name("seen.json")

COLUMNS = ("start", "live", "graph", "kit", "shadow")
"""Who may name a kernel, in the order of the tables."""

WHO = MappingProxyType(
    {
        "start": "startup verification, on generated inputs",
        "live": "the same startup, on the tensors of the loaded model",
        "graph": "a startup that captures graphs",
        "kit": "the conformance kit",
        "shadow": "a shadow check of the calls of a serving engine",
    }
)
"""Column -> who that is."""

MARK = "<!-- {}: written by `python -m wrong_kernels --write` -->"

NOT_RUN = "·"

MODELS = tuple(replace(sizes, tokens=(3,)) for sizes in (MIXED, LATENT))
"""Those whose calls contracts are asked for."""


@cache
def seen() -> dict[str, dict[str, str]]:
    """Kernel -> column -> what was seen when all of them were run, but for start and the kit, of
    which the corpus speaks; what cannot be run is left out."""
    found: dict[str, dict[str, str]] = json.loads(SEEN.read_text())
    return found


def keep(rows: Mapping[str, Mapping[str, str]]) -> None:
    """Put what was seen of these kernels in the place of what had been."""
    both = {**(seen() if SEEN.exists() else {}), **rows}
    lines = [f"{json.dumps(name)}: {json.dumps(both.get(name, {}))}" for name in corpus()]
    SEEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    seen.cache_clear()


def write() -> None:
    """Make the pages what they should be."""
    for page, text in pages().items():
        page.write_text(text)


def pages() -> dict[Path, str]:
    """Each page -> its text as it should be.

    Raises:
        ValueError: a page has lost a mark between which a table stands.
    """
    tables = {page: _written(page) for page in TABLES}
    return tables | {FOLDER / f"{kind}.md": _of_kind(kind) for kind in KINDS}


def _written(page: Path) -> str:
    """The page with its tables as they should be.

    Raises:
        ValueError: the page has lost a mark between which a table stands.
    """
    text = page.read_text()
    for name, table in TABLES[page].items():
        begin, end = MARK.format(name), f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.S)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"{page.name} needs {begin!r} and {end!r}, once")
        block = f"{begin}\n\n{table()}\n\n{end}"
        text = pattern.sub(lambda _, block=block: block, text)
    return text


def _outcome(wrong: Wrong, column: str) -> str:
    """What a column says of a kernel: `named`, `passes` or another; empty where it was not run."""
    if column in ("start", "kit"):
        return "named" if getattr(wrong, column) else "passes"
    return seen().get(wrong.name, {}).get(column, "")


def _named_by(wrong: Wrong) -> list[str]:
    return [column for column in COLUMNS if _outcome(wrong, column) == "named"]


def _serves_wrong_tokens(wrong: Wrong) -> bool:
    return _outcome(wrong, "served").startswith("wrong")


def _is_silent(wrong: Wrong) -> bool:
    """Whether it serves wrong tokens, and an engine that starts as usual does not name it."""
    return _serves_wrong_tokens(wrong) and not {"start", "live"} & {*_named_by(wrong)}


def _counts() -> str:
    heads = ["kind of fault", "kernels", *COLUMNS, "no check", "wrong tokens", "undetected"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    every = list(corpus().values())
    for kind in KINDS:
        of_kind = [wrong for wrong in every if wrong.kind == kind]
        lines.append(f"| [{kind}]({FOLDER.name}/{kind}.md): {KINDS[kind]} | {_numbers(of_kind)} |")
    return "\n".join([*lines, f"| all | {_numbers(every)} |"])


def _numbers(some: list[Wrong]) -> str:
    by = {wrong.name: _named_by(wrong) for wrong in some}
    counts = [str(len(some)), *(_count(some, c, lambda w, c=c: c in by[w.name]) for c in COLUMNS)]
    counts.append(str(list(by.values()).count([])))
    counts += [_count(some, "served", is_) for is_ in (_serves_wrong_tokens, _is_silent)]
    return " | ".join(counts)


def _count(some: list[Wrong], column: str, holds: Callable[[Wrong], bool]) -> str:
    """Of how many this holds, or that none was run."""
    was_run = any(_outcome(wrong, column) for wrong in some)
    return str(sum(map(holds, some))) if was_run else NOT_RUN


def _silent() -> str:
    if not any("served" in columns for columns in seen().values()):
        return "No engine has been run yet."
    lines = []
    for wrong in filter(_is_silent, corpus().values()):
        who = [column for column in ("kit", "shadow") if column in _named_by(wrong)]
        tokens = _outcome(wrong, "served").removeprefix("wrong: ")
        by = f"found by the {' and by the '.join(who)}" if who else "found by no check"
        lines.append(f"- `{wrong.op}`: {wrong.fault}. {tokens}; {by}.")
    return "\n".join(lines) or "None."


def _totals() -> str:
    every = list(corpus().values())
    by = [_named_by(wrong) for wrong in every]
    lines = ["| kernels | count |", "|---|---|", f"| all | {len(every)} |"]
    lines += [f"| found by: {who} | {sum(c in names for names in by)} |" for c, who in WHO.items()]
    return "\n".join([*lines, f"| found by no check | {by.count([])} |"])


def _of_kind(kind: str) -> str:
    heads = ["op", "fault", "found by", "not found by", "served", "why not"]
    lines = [
        "<!-- written by `python -m wrong_kernels --write` -->",
        f"# Wrong kernels: {kind}",
        "",
        f"They are incorrect {KINDS[kind]}. "
        "[Wrong kernels](../wrong-kernels.md) explains the columns.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    rows = [_row(wrong) for wrong in corpus().values() if wrong.kind == kind]
    return "\n".join([*lines, *rows]) + "\n"


def _row(wrong: Wrong) -> str:
    by, others = [], []
    for column in COLUMNS:
        match _outcome(wrong, column):
            case "named":
                by.append(f"kit (`{wrong.kit}`)" if column == "kit" else column)
            case "passes":
                others.append(column)
            case "":
                pass
            case otherwise:
                others.append(f"{column} ({otherwise})")
    cells = [wrong.fault, ", ".join(by) or "**no check**", ", ".join(others) or NOT_RUN]
    served = _outcome(wrong, "served") or NOT_RUN
    return f"| `{wrong.op}` | {' | '.join(cells)} | {served} | {wrong.why} |"


def _untried() -> str:
    """What no call of a served model's sizes has, by op: such calls at all, an argument, or the
    model's own size."""
    lines = []
    for op, spec in sorted(known_contracts().contracts.items()):
        device, dtype = torch.device("meta"), _dtype(spec)
        counts = FIXED_COUNTS if spec.fixed_batch else (1,)
        models = {f.name: replace(f.sizes, tokens=counts, max_position=64) for f in FAMILIES}
        public = {name: [*spec.served(sizes, dtype, device)] for name, sizes in models.items()}
        calls = [call for sizes in MODELS for call in spec.served(sizes, dtype, device)]
        calls += chain.from_iterable(public.values())
        if not calls:
            lines.append(f"- `{op}`: no call; only its contract's samples are tried.")
            continue
        given = [dict(zip(spec.parameters, call.args, strict=True)) for call in calls]
        never = [name for name in spec.parameters if all(args[name] is None for args in given)]
        if never:
            lines.append(f"- `{op}`: no call has {_listed(never)}.")
        for name, made in public.items():
            if some := [*dict.fromkeys(call.smaller for call in made if call.smaller)]:
                lines.append(f"- `{op}`: {'; '.join(some)} (of {name.partition('/')[2]}).")
                break
    return "\n".join(lines) or "None."


def _dtype(spec: OpSpec) -> torch.dtype:
    name = "bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0]
    found: torch.dtype = getattr(torch, name)
    return found


def _listed(names: list[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)


TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        DOCS / "trust.md": {"totals": _totals},
        DOCS / "trust-limits.md": {"untried": _untried},
        DOCS / "wrong-kernels.md": {"counts": _counts, "silent": _silent},
    }
)
"""Page -> the names of its tables, and who makes them."""
