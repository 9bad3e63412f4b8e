"""What `vllm-fl rescue` leaves behind: a settings file, and a report for who wrote the culprit."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from vllm_fl.settings.schema import CONFIG
from vllm_fl.text import clean

from ._rescuing import Culprit, Finding
from ._suspects import OP, Part, Suspects

__all__ = ["report", "said", "settings_file"]

LONGEST = 160
"""Characters of a reason in a comment."""

HOW = {"ended": "ends the start", "hung": "hangs", "wrong": "makes the start wrong"}


def said(culprit: Culprit, parts: Mapping[str, Part]) -> str:
    """A culprit in one line, as `A and B: ends the start, only together: why`."""
    names = " and ".join(parts[key].what for key in culprit.parts)
    alone = "only together" if len(culprit.parts) > 1 else "by itself"
    return f"{names}: {HOW[culprit.how]}, {alone}: {clean(culprit.why)}"


def settings_file(finding: Finding, suspects: Suspects, model: str) -> str:
    """The settings without the culprits, with the reasons as comments."""
    import yaml

    file, _ = suspects.started_with(finding.rest)
    lines = [
        "# Written by `vllm-fl rescue`: with these settings the engine of this model started, and",
        "# answered as stock vLLM does:",
        f"#   {clean(model)}",
        f"# {CONFIG} names this file, which then replaces variables and platform files.",
        "# Left out, each with the reason:",
        *(f"#   {said(culprit, suspects.parts)}" for culprit in finding.culprits),
    ]
    if any(len(culprit.parts) > 1 for culprit in finding.culprits):
        lines.append("# Of those that fail only together all but one may come back.")
    if beside := suspects.beside(finding.rest):
        lines += ["# A file cannot say this; set it beside it:", *(f"#   {v}" for v in beside)]
    orders = {"op_backends": file.pop("op_backends")} if "op_backends" in file else {}
    body = yaml.safe_dump(file, sort_keys=False, allow_unicode=True) if file else ""
    if orders:
        body += yaml.safe_dump(orders, sort_keys=False, default_flow_style=None, width=1000)
    return "\n".join([*lines, "", *_commented(body.splitlines(), finding, suspects), ""])


def _commented(lines: Iterable[str], finding: Finding, suspects: Suspects) -> Iterable[str]:
    """The lines of a file, with the reasons of those by which something is left out."""
    whys = {key: culprit.why for culprit in finding.culprits for key in culprit.parts}
    top = ""
    for line in lines:
        if line[:1] not in ("-", " "):
            top = line.partition(":")[0]
        entry = line.strip(" -").partition(":")[0]
        why = whys.get(f"{OP if top == 'op_backends' else top} {entry}")
        yield line if why is None else f"{line}  # {clean(why)[:LONGEST]}"


def report(finding: Finding, suspects: Suspects, model: str, arguments: Sequence[str]) -> str:
    """Markdown that can be pasted into an issue of the backend's."""
    blocks = ["# What ends a start of vLLM", _facts(suspects)]
    for number, culprit in enumerate(finding.culprits, 1):
        parts = [suspects.parts[key] for key in culprit.parts]
        blocks += [
            f"## {number}. {' and '.join(part.what for part in parts)}",
            said(culprit, suspects.parts) + ".",
        ]
        if culprit.stack:
            blocks.append("\n".join(["```text", *map(clean, culprit.stack), "```"]))
        blocks += ["To reproduce:", _reproduction(parts, suspects, finding, model, arguments)]
    minutes = finding.seconds / 60
    blocks.append(
        f"Found by `vllm-fl rescue` among {len(suspects.parts)} parts with {finding.starts} engine "
        f"starts in {minutes:.1f} min. Stock vLLM starts with the same arguments, and so does "
        "vllm-fl without what is named here."
    )
    return "\n\n".join(blocks) + "\n"


def _facts(suspects: Suspects) -> str:
    facts = {name: value.removeprefix("None ") for name, value in suspects.environment.items()}
    rows = [f"| {clean(name)} | {clean(value)} |" for name, value in facts.items()]
    return "\n".join(["| environment | |", "|---|---|", *rows])


def _reproduction(
    parts: Sequence[Part],
    suspects: Suspects,
    finding: Finding,
    model: str,
    arguments: Sequence[str],
) -> str:
    """Commands by which the culprit alone is on."""
    variables = suspects.alone(parts)
    if finding.blocking:
        variables = {"CUDA_LAUNCH_BLOCKING": "1", **variables}
    command = ["vllm", "serve", model, *arguments]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(["```sh", *map(clean, lines), clean(shlex.join(command)), "```"])
