"""`vllm-fl bisect`: find the op that makes outputs less exact or startup fail.

Each trial is one engine in a separate process; they run one after the other.

Example: vllm-fl bisect --model DIR --prompts prompts.txt
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.types import BackendImplKind
from vllm_fl.settings.schema import CONFIG, Settings
from vllm_fl.settings.values import OP_CONFIG, PER_OP
from vllm_fl.text import clean

from ..engine.tuning_table import STOCK_NAME
from ..integration.workload import Visit
from ._bisect_outputs import BASELINE, EXACT, NEW_TOKENS, PLANNED, PROMPTS, Outputs
from ._bisect_search import Culprit
from ._bisect_startups import LEAST_LIMIT, TIMES, VLLM_FL, Startups
from ._engine import takes_model
from ._engines import (
    ANSWER_TIMEOUT,
    START_TIMEOUT,
    EngineProcess,
    check_model,
    has_weights,
    running_engine,
)
from ._options import positive_seconds
from ._parts import Changes, Parts, listed
from ._progress import doing, progress
from ._show import UsageError, print_answer, print_table, say
from ._watch import INTERRUPTED, ended_by_signal

REFERENCE = "reference"

PROMPT_TOKENS = 96
"""Tokens of each random prompt."""

ALIKE = {
    Settings.preflight.variable: "off",  # verification would disable the parts at fault
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its logits processors have another interface
}
"""Variables of every engine that compares outputs."""

STARTED = Visit("bisect", 4, 32, 8)
"""The prompts of a startup."""

BLOCKING = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "HIP_LAUNCH_BLOCKING": "1",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "MUSA_LAUNCH_BLOCKING": "1",
}
"""Variables that make the faulty call on a device raise the error, instead of a later call."""

HOW = {"ended": "ends the startup", "hung": "hangs", "wrong": "is incorrect"}

STATUS = {
    "stock": "vLLM also fails without vllm-fl",
    "unsteady": "The failure is intermittent: trials cannot find a part",
    "elsewhere": "It fails even with all parts disabled",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    takes_model(parser, "the model's folder; missing weights are random", required=True)
    parser.usage = "%(prog)s [options] --model DIR [vLLM's arguments]"
    parser.add_argument(
        "--startup",
        action="store_true",
        help="find the part that ends, hangs or corrupts the startup of an engine",
    )
    parser.add_argument(
        "--against",
        metavar="WHAT",
        default=STOCK_NAME,
        help="the baseline of the outputs: stock (default: vLLM without vllm-fl), reference (the "
        "reference backend), or a settings file",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt per line, or a JSON list of lists of token ids; default: random tokens",
    )
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=positive_seconds,
        help=f"time limit of a startup (default: {TIMES} times that of stock vLLM, at least "
        f"{LEAST_LIMIT:.0f})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if nothing is wrong, 130 after an interruption, otherwise 1."""
    check_model("bisect", arguments.model)
    if arguments.startup and (arguments.prompts or arguments.against != STOCK_NAME):
        raise UsageError("--against and --prompts compare outputs: use them without --startup")
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(ended_by_signal())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        parts = listed()
        stack.enter_context(progress(arguments.verb))  # after the fork
        search = _startups if arguments.startup else _outputs
        facts = search(arguments, parts, folder)
    if facts is None:
        return INTERRUPTED
    facts = {"model": arguments.model, **facts, "seconds": time.monotonic() - started}
    print_answer(facts, show, as_json=arguments.json)
    return 0 if facts["status"] == "right" else 1


def _finding(search: Startups | Outputs) -> dict[str, Any] | None:
    """Return the result of a search as JSON data; None after an interruption."""
    try:
        status, found = search.search()
    except KeyboardInterrupt:
        say(f"vllm-fl: interrupted after {search.count} engines", error=True)
        return None
    parts = [part for culprit in found for part in culprit.parts]
    return {
        "status": status,
        "culprits": [_culprit(culprit, search.what) for culprit in found if culprit.parts],
        "why": found[0].verdict.why if found and not parts else None,
        "settings": search.changes(parts).described(os.environ) if parts else [],
        "engines": search.count,
    }


def _culprit(culprit: Culprit, what: Mapping[str, str]) -> dict[str, Any]:
    verdict = culprit.verdict
    return {
        "parts": [*culprit.parts],
        "what": [what[part] for part in culprit.parts],
        "how": verdict.how,
        "why": clean(verdict.why),
        **verdict.facts,
    }


def show(facts: Mapping[str, Any]) -> None:
    if facts.get("errors"):
        _show_errors(facts)
    if facts["status"] == "right":
        why = (
            facts.get("plan")
            or "the engine starts, and its answers are similar to those of stock vLLM"
        )
        say(f"No fault found: {why}.")
    elif facts["why"]:
        say(f"{STATUS[facts['status']]}: {clean(facts['why'])}.")
    for culprit in facts["culprits"]:
        together = "only together" if len(culprit["what"]) > 1 else "on its own"
        names = " and ".join(culprit["what"])
        say(f"{names}: {HOW[culprit['how']]}, {together}: {culprit['why']}")
    if facts["settings"]:
        say("Settings that exclude it:")
        for line in facts["settings"]:
            say(f"  {line}")
    if facts["culprits"] and facts.get("blocking") is False:
        say("It fails only if launches do not block.")
    say(f"{facts['engines']} engines, {facts['seconds']:.0f} s.")


# Startups.


def _startups(arguments: argparse.Namespace, parts: Parts, folder: str) -> dict[str, Any] | None:
    def start(
        name: str, off: Collection[str], blocking: bool, limit: float | None
    ) -> dict[str, Any]:
        environment = parts.changes(off).applied(os.environ, folder)
        if VLLM_FL in off:
            environment[Settings.enabled.variable] = "0"
        if blocking:
            environment |= BLOCKING
        with running_engine(
            f"{search.count}: {name}",
            arguments.model,
            {},
            environment,
            steps_aside=True,  # the worker's plan is not needed
            arguments=arguments.more,
            limits=(limit or START_TIMEOUT, limit or ANSWER_TIMEOUT),
        ) as engine:
            tokens = max(2, min(STARTED.prompt_tokens, engine.length - STARTED.new_tokens))
            visit = replace(STARTED, prompt_tokens=tokens)
            (prompts,) = visit.batches(engine.vocabulary)
            return engine.ask("score", prompts=prompts, new_tokens=visit.new_tokens)

    search = Startups(parts, start, arguments.limit)
    finding = _finding(search)
    return finding and {**finding, "parts": len(parts.by_key), "blocking": search.blocking}


# Outputs.


def _outputs(arguments: argparse.Namespace, parts: Parts, folder: str) -> dict[str, Any] | None:
    model, against = arguments.model, arguments.against
    if arguments.more:
        more = " ".join(arguments.more)
        raise UsageError(f"unrecognized arguments: {more} (vLLM's arguments need --startup)")
    if not has_weights(model):
        raise UsageError(
            f"--model {model}: it has no weights, and random weights would differ in float32"
        )
    if against not in (STOCK_NAME, REFERENCE) and not Path(against).is_file():
        raise UsageError(f"--against {against}: expected stock, reference or a settings file")
    impls = get_default_manager().registry.snapshot().impls_by_op.values()
    plain = any(impl.kind is BackendImplKind.REFERENCE for of_op in impls for impl in of_op)
    if against == REFERENCE and not plain:
        raise UsageError("--against reference: no loaded plugin provides a reference backend")
    prompts = None if arguments.prompts is None else _prompts(model, arguments.prompts)
    if prompts is not None and len(prompts) < PROMPTS:
        few = f"with fewer than {PROMPTS} prompts, an error in a few elements may be missed"
        say(f"vllm-fl: --prompts {arguments.prompts}: {few}", error=True)
    length = PROMPT_TOKENS if prompts is None else max(map(len, prompts))

    def draw(vocabulary: int) -> list[list[int]]:
        if prompts is None:
            (drawn,) = Visit("bisect", PROMPTS, PROMPT_TOKENS, 1).batches(vocabulary)
            return drawn
        for token in (token for ids in prompts for token in ids):
            if not 0 <= token < vocabulary:
                raise UsageError(
                    f"--prompts: token {token} is not in the vocabulary of {vocabulary} tokens"
                )
        return prompts

    def start(kind: str, changes: Changes) -> AbstractContextManager[EngineProcess]:
        is_disabled = kind != PLANNED and (
            against == STOCK_NAME or (kind == EXACT and against != REFERENCE)
        )
        options = {
            "dtype": "float32" if kind == EXACT else "auto",
            "enforce_eager": True,
            "max_model_len": length + NEW_TOKENS,
            "max_num_seqs": 16,
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "logits_processors": ["vllm_fl_tools.integration.forcing:Forcing"],
        }
        if kind == PLANNED:
            environment = changes.applied(os.environ, folder)
        else:
            environment = _baseline(REFERENCE if is_disabled else against)
        if is_disabled:
            environment[Settings.enabled.variable] = "0"
        name = _name(kind, against, [*changes.orders, *changes.values])
        environment |= ALIKE
        return running_engine(name, model, options, environment, steps_aside=is_disabled)

    search = Outputs(start, draw, parts)
    finding = _finding(search)
    return finding and {
        **finding,
        "against": against,
        "ops": search.differing,
        "errors": search.errors,
        "plan": search.plan.why,
        **search.plan.facts,
        "new_tokens": NEW_TOKENS,
    }


def _prompts(model: str, path: str) -> list[list[int]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"--prompts {path}: cannot be read: {error}") from error
    try:
        ids = json.loads(text)
    except ValueError:
        ids = None
    if isinstance(ids, list | dict):
        if not ids or not all(isinstance(e, list) and {*map(type, e)} == {int} for e in ids):
            forms = "one prompt per line, or a JSON list of lists of token ids"
            raise UsageError(f"--prompts {path}: expected {forms}")
        return list(ids)
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not lines:
        raise UsageError(f"--prompts {path}: the file has no prompt")
    return _encoded(model, lines)


def _encoded(model: str, texts: list[str]) -> list[list[int]]:
    try:
        with doing("reading the model's tokenizer"):
            from vllm.tokenizers import get_tokenizer

            tokenizer = get_tokenizer(model)
            return [list(tokenizer.encode(text)) for text in texts]
    except Exception as error:  # a missing or broken tokenizer may raise anything
        why = clean(str(error)) or type(error).__name__
        raise UsageError(f"--model {model}: its tokenizer failed: {why}") from error


def _name(kind: str, against: str, left: Collection[str]) -> str:
    plan = f"of the plan, without {', '.join(left)}" if left else "of the plan"
    return {EXACT: "in float32", BASELINE: f"of the baseline ({against})"}.get(kind, plan)


def _baseline(against: str) -> dict[str, str]:
    """Return the environment of a plan without user orders."""
    orders = (CONFIG, PER_OP, OP_CONFIG, Settings.table.variable)
    environment = {name: value for name, value in os.environ.items() if name not in orders}
    if against == REFERENCE:
        environment[Settings.prefer.variable] = REFERENCE
    else:
        environment[CONFIG] = os.path.abspath(against)
    return environment


def _show_errors(facts: Mapping[str, Any]) -> None:
    print_table(
        ("log-probabilities, against float32", "prefill", "decode"),
        [
            (
                f"median error of the {kind}",
                *(f"{math.inf if v is None else v:.2e}" for v in phases.values()),
            )
            for kind, phases in facts["errors"].items()
        ],
    )
    differing = ", ".join(f"{op} ({impl})" for op, impl in facts["ops"].items())
    say(f"\nPlan and baseline differ in {differing or 'no op'}.")
