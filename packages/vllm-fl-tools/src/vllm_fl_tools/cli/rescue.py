"""`vllm-fl rescue`: find what ends, hangs or corrupts a start, and write settings without it.

Each start is an engine in a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vllm_fl.settings.schema import CONFIG, Settings

from ._engines import ANSWER_TIMEOUT, START_TIMEOUT, check_model, running, takes_model
from ._options import ReportFile, positive_seconds
from ._rescued import report, said, settings_file
from ._rescuing import AS_ASKED, LEAST_LIMIT, STOCK, TIMES, Finding, Rescue, Status
from ._show import UsageError, answer, say
from ._suspects import Suspects, listed
from ._watch import INTERRUPTED, ended_by_signal

OUT = "vllm-fl-rescue.yaml"

BLOCKING = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "HIP_LAUNCH_BLOCKING": "1",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "MUSA_LAUNCH_BLOCKING": "1",
}
"""Variables under which a device's fault is raised by the call that brings it about, and not by a
later one."""

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 32, 8
"""What each engine is asked: so many prompts, of so many tokens, and so many after each."""

STATUS: Mapping[Status, int] = {
    "right": 0,
    "found": 1,
    "stock": 3,
    "unsteady": 4,
    "elsewhere": 5,
}
"""The exit status."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and where the settings go. What else is there goes to vLLM."""
    takes_model(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        default=OUT,
        help="where the settings without the culprits are written, and beside them a report with "
        f"the ending .md (default: {OUT})",
    )
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=positive_seconds,
        help=f"how long a start may take (default: {TIMES} times what stock takes, and at least "
        f"{LEAST_LIMIT:.0f})",
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 0 nothing fails, 1 found, 2 usage, 3 stock fails, 4 it comes and goes, 5 it
    is none of the parts."""
    model, out = arguments.model, Path(arguments.out)
    check_model(model)
    beside = out.with_suffix(".md")
    if beside == out:
        raise UsageError(f"--out {out}: the report has this name; name a .yaml file")
    for path in (out, beside):
        if os.path.lexists(path):
            raise UsageError(f"--out {out}: {path} exists; name another file, or remove it")
    with ExitStack() as stack:
        stack.enter_context(ended_by_signal())
        file = stack.enter_context(ReportFile(str(out), "--out"))
        told = stack.enter_context(ReportFile(str(beside), "--out"))
        suspects = listed(os.environ)
        rescue = _Rescue(arguments, suspects)
        try:
            finding = rescue.run()
        except KeyboardInterrupt:
            say(f"vllm-fl: interrupted after {rescue.starts} starts", error=True)
            return INTERRUPTED
        if finding.status == "found":
            file.write(settings_file(finding, suspects, model))
            told.write(report(finding, suspects, model, arguments.more))
    facts = _facts(finding, suspects, out, beside)
    answer(facts, _show, as_json=arguments.json)
    return STATUS[finding.status]


class _Rescue(Rescue):
    """One whose engines are those of a command.

    Args:
        arguments: the command's.
        suspects: the parts.
    """

    def __init__(self, arguments: argparse.Namespace, suspects: Suspects) -> None:
        super().__init__(suspects, self._started, arguments.limit)
        self._model, self._more = arguments.model, arguments.more
        self._about = math.ceil(math.log2(len(suspects.parts) + 1)) + 4

    def _started(
        self, kind: str, on: frozenset[str], blocking: bool, limit: float | None
    ) -> dict[str, Any]:
        """The score of an engine with these parts."""
        with tempfile.TemporaryDirectory() as folder:
            environment = dict(os.environ)
            if kind == STOCK:
                environment[Settings.enabled.variable] = "0"
            elif not kind.startswith(AS_ASKED):
                content, environment = self._suspects.started_with(on)
                environment[CONFIG] = _written(content, folder)
            if blocking:
                environment |= BLOCKING
            with running(
                self._name(kind, on),
                self._model,
                {},
                environment,
                steps_aside=True,  # nothing is asked of the worker that its plan has
                arguments=self._more,
                limits=(limit or START_TIMEOUT, limit or ANSWER_TIMEOUT),
            ) as engine:
                prompts = _prompts(engine.vocabulary, engine.length)
                return engine.ask("score", prompts=prompts, new_tokens=NEW_TOKENS)

    def _name(self, kind: str, on: frozenset[str]) -> str:
        number = self.starts + 1
        about = max(self._about, number)
        name = f"{number} of about {about}: {kind if kind == STOCK or on else 'no part'}"
        if self.starts:
            minutes = (about - self.starts) * self.seconds / self.starts / 60
            name += f" (about {math.ceil(minutes)} min to go)"
        return name


def _written(content: Mapping[str, Any], folder: str) -> str:
    import yaml

    path = Path(folder) / "settings.yaml"
    path.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
    return str(path)


def _prompts(vocabulary: int, length: int) -> list[list[int]]:
    """Prompts of random tokens, always the same. The first three ids often have a meaning."""
    pick = random.Random("rescue")
    tokens = max(2, min(PROMPT_TOKENS, length - NEW_TOKENS))
    return [[pick.randrange(3, vocabulary) for _ in range(tokens)] for _ in range(PROMPTS)]


def _facts(finding: Finding, suspects: Suspects, out: Path, beside: Path) -> dict[str, Any]:
    asked = finding.asked
    is_found = finding.status == "found"
    return {
        "status": finding.status,
        "how": asked and asked.how,
        "why": asked and asked.why,
        "culprits": [
            {
                "parts": list(culprit.parts),
                "how": culprit.how,
                "why": culprit.why,
                "said": said(culprit, suspects.parts),
            }
            for culprit in finding.culprits
        ],
        "blocking": finding.blocking,
        "parts": len(suspects.parts),
        "starts": finding.starts,
        "seconds": finding.seconds,
        "file": str(out) if is_found else None,
        "report": str(beside) if is_found else None,
        "beside": suspects.beside(finding.rest) if is_found else [],
    }


def _show(facts: Mapping[str, Any]) -> None:
    status, why = facts["status"], facts["why"]
    if status == "right":
        say("Nothing fails: the start as asked comes up and answers as stock does.")
    elif status == "stock":
        say(f"Stock vLLM fails by itself, without vllm-fl: {why}")
    elif status == "unsteady":
        say(f"The failure comes and goes, so that nothing can be named by starts: {why}")
    elif status == "elsewhere":
        say(f"It fails with every part left out, too: {why}. Please report it to vllm-fl.")
    for culprit in facts["culprits"]:
        say(culprit["said"])
    if facts["file"]:
        say(f"Settings with which it started: {CONFIG}={facts['file']}")
        for told in facts["beside"]:
            say(f"Beside the file: {told}")
        say(f"A report for who wrote it: {facts['report']}")
    found = "" if facts["blocking"] else " It fails only where launches do not block."
    starts, minutes = facts["starts"], facts["seconds"] / 60
    say(f"{starts} engine starts, {minutes:.1f} min.{found if facts['culprits'] else ''}")
