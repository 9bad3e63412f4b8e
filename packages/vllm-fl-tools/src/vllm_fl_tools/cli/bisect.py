"""`vllm-fl bisect`: name the op, and its layer, that makes a plan less exact than another.

Nothing of the engine that serves is changed: each question is asked of an engine of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.types import BackendImplKind
from vllm_fl.settings.schema import CONFIG, Settings
from vllm_fl.settings.values import OP_CONFIG, ORDER_PREFIX, PER_OP
from vllm_fl.text import clean

from ._bisecting import (
    BASELINE,
    EXACT,
    LIMIT,
    NEW_TOKENS,
    PLAN,
    PROMPTS,
    Bisection,
    Finding,
    Start,
)
from ._engines import Engine, check_model, has_weights, planned, running
from ._progress import doing
from ._show import UsageError, answer, print_table, say
from ._watch import INTERRUPTED, ended_by_signal

STOCK, REFERENCE = "stock", "reference"

PROMPT_TOKENS = 96
"""Of each random prompt."""

IDS = re.compile(r"\[[\[\]\d\s,.-]*")
"""A line of token ids, though perhaps a wrong one; `[INST] Say …` is text."""

ALIKE = {
    Settings.preflight.variable: "off",  # what it would take out of the plan is what is looked for
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its logits processors have another form
}
"""Variables of every engine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, what its plan is compared with, and on what."""
    parser.add_argument(
        "--model", metavar="DIR", required=True, help="the model's folder, with its weights"
    )
    parser.add_argument(
        "--against",
        metavar="WHAT",
        default=STOCK,
        help="what the plan of the settings is compared with: stock (default), which is vLLM "
        "without vllm-fl; reference, the plain PyTorch forms; or a policy file, as VLLM_FL_CONFIG",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="one prompt a line, as text or as a JSON list of token ids; default: random tokens",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when something is named, or an engine fails."""
    model, against = arguments.model, arguments.against
    check_model(model)
    if not has_weights(model):
        raise UsageError(
            f"--model {model}: it has no weights, and random ones would not be the same in float32"
        )
    if against not in (STOCK, REFERENCE) and not Path(against).is_file():
        raise UsageError(f"--against {against}: expected stock, reference or a policy file")
    planned()
    impls = get_default_manager().registry.snapshot().impls_by_op.values()
    plain = any(impl.kind is BackendImplKind.REFERENCE for of_op in impls for impl in of_op)
    if against == REFERENCE and not plain:
        raise UsageError("--against reference: no plugin that is loaded brings plain forms of ops")
    text = None if arguments.prompts is None else _read(arguments.prompts, "--prompts")
    prompts = None if text is None else _prompts(model, text)
    if prompts is not None and len(prompts) < PROMPTS:
        told = f"by fewer than {PROMPTS} prompts a right plan may be named"
        say(f"vllm-fl: --prompts {arguments.prompts}: {told}", error=True)
    length = PROMPT_TOKENS if prompts is None else max(map(len, prompts))

    def draw(vocabulary: int) -> list[list[int]]:
        return _random(vocabulary) if prompts is None else _known(prompts, vocabulary)

    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(ended_by_signal())
        engines = stack.enter_context(_engines(model, against, length + NEW_TOKENS))
        bisection = Bisection(engines, draw)
        try:
            finding = bisection.run()
        except KeyboardInterrupt:
            say(f"vllm-fl: interrupted after {bisection.engines} engines", error=True)
            return INTERRUPTED
    facts = {"model": model, "against": against, **_facts(finding)}
    answer({**facts, "seconds": time.monotonic() - started}, _show, as_json=arguments.json)
    return 1 if finding.culprits or finding.elsewhere else 0


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{option} {path}: cannot be read: {error}") from error


def _random(vocabulary: int) -> list[list[int]]:
    """Prompts of random tokens, always the same. The first three ids often have a meaning."""
    pick = random.Random("bisect")
    return [[pick.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def _prompts(model: str, text: str) -> list[list[int]]:
    """The prompts of a file."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise UsageError("--prompts: the file has no prompt in it")
    words = [line for line in lines if not IDS.fullmatch(line)]
    encoded = iter(_encoded(model, words) if words else ())
    return [_ids(line) if IDS.fullmatch(line) else next(encoded) for line in lines]


def _known(prompts: list[list[int]], vocabulary: int) -> list[list[int]]:
    """`prompts`, if their ids are the model's."""
    for token in (token for ids in prompts for token in ids):
        if not 0 <= token < vocabulary:
            raise UsageError(f"--prompts: {token} is no token of the model, which has {vocabulary}")
    return prompts


def _ids(line: str) -> list[int]:
    try:
        ids = json.loads(line)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise UsageError(f"--prompts: {clean(line[:60])} is no JSON list of token ids")
    return ids


def _encoded(model: str, texts: list[str]) -> list[list[int]]:
    try:
        with doing("reading the model's tokenizer"):
            from ..integration.tokens import encoded

            return encoded(model, texts)
    except Exception as error:  # whatever a tokenizer raises that is not there, or not whole
        why = clean(str(error)) or type(error).__name__
        raise UsageError(f"--model {model}: its tokenizer cannot be used: {why}") from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextmanager
def _engines(model: str, against: str, length: int) -> Iterator[Start]:
    """What starts the engines, of which none takes more than `length` tokens."""
    with tempfile.TemporaryDirectory() as folder:

        @contextmanager
        def start(kind: str, left: Mapping[str, str]) -> Iterator[Engine]:
            steps_aside = kind != PLAN and (
                against == STOCK or (kind == EXACT and against != REFERENCE)
            )
            options = {
                "dtype": "float32" if kind == EXACT else "auto",
                "enforce_eager": True,
                "max_model_len": length,
                "max_num_seqs": 16,
                "enable_prefix_caching": False,
                "async_scheduling": False,
                "logits_processors": ["vllm_fl_tools.integration.forcing:Forcing"],
            }
            if kind == PLAN:
                environment = _mixed(left, folder)
                options["worker_extension_cls"] = "vllm_fl_tools.integration.leaving.Leaving"
            else:
                environment = _baseline(REFERENCE if steps_aside else against)
            if steps_aside:
                environment[Settings.enabled.variable] = "0"
            name = _name(kind, against, left)
            with running(
                name, model, options, {**environment, **ALIKE}, steps_aside=steps_aside
            ) as engine:
                yield engine

        yield start


def _name(kind: str, against: str, left: Mapping[str, str]) -> str:
    if kind == EXACT:
        return "in float32"
    if kind == BASELINE:
        return f"of the baseline ({against})"
    return f"of the plan, without its {', '.join(left)}" if left else "of the plan"


def _baseline(against: str) -> dict[str, str]:
    """The environment of a plan that owes nothing to the lists of the user's settings."""
    lists = (CONFIG, PER_OP, OP_CONFIG, Settings.table.variable)
    environment = {name: value for name, value in os.environ.items() if name not in lists}
    if against == REFERENCE:
        environment[Settings.prefer.variable] = REFERENCE
    else:
        environment[CONFIG] = os.path.abspath(against)
    return environment


def _mixed(left: Mapping[str, str], folder: str) -> dict[str, str]:
    """The user's environment, with lists of one token for the ops that are `left`."""
    environment = dict(os.environ)
    if not left:
        return environment
    lists = {op: [token] for op, token in left.items()}
    variable = CONFIG if environment.get(CONFIG, "").strip() else OP_CONFIG
    named = environment.get(variable, "").strip()
    content: dict[str, Any] = {}
    if named:
        import yaml

        content = yaml.safe_load(_read(named, variable)) or {}  # JSON is YAML, too
    if variable == CONFIG:  # a complete override: the variables beside it have no effect
        key = ORDER_PREFIX.rstrip(".")
        content[key] = {**(content.get(key) or {}), **lists}
    else:
        content |= lists
    text = json.dumps(content)
    mixed = Path(folder) / f"{_digest(text)}.yaml"
    mixed.write_text(text, encoding="utf-8")
    return {**environment, variable: str(mixed)}


def _facts(finding: Finding) -> dict[str, Any]:
    """The finding as JSON data, which has null for what is not finite."""
    told = asdict(finding)
    for each in (told, *told["culprits"]):
        excess = each.pop("excess")
        each |= {"times": _finite(excess["times"]), "far": excess["far"]}
        each["far_allowed"] = excess["allowed"]
    for of_kind in told["errors"].values():
        of_kind |= {phase: _finite(value) for phase, value in of_kind.items()}
    return {**told, "limit": LIMIT, "new_tokens": NEW_TOKENS}


def _show(facts: Mapping[str, Any]) -> None:
    print_table(
        ("log-probabilities, against float32", "prefill", "decode"),
        [
            (f"median error of the {kind}", *(f"{_shown(value):.2e}" for value in phases.values()))
            for kind, phases in facts["errors"].items()
        ],
    )
    differing = ", ".join(f"{op} ({impl})" for op, impl in facts["ops"].items())
    say(f"\nPlan and baseline differ in {differing or 'no op'}.")
    told = (
        f"the plan's median error is {_shown(facts['times']):.2f} times the baseline's "
        f"({facts['limit']} are allowed), and {_far(facts)}"
    )
    took = f"{facts['engines']} engines, {facts['seconds']:.0f} s."
    if not facts["culprits"] and not facts["elsewhere"]:
        say(f"Noise: {told}. {took}")
        return
    say(f"The difference is no noise: {told}.")
    for culprit in facts["culprits"]:
        ops = " and ".join(f"{op} ({impl})" for op, impl in culprit["ops"].items())
        alone = "only together" if len(culprit["ops"]) > 1 else "by itself"
        say(f"{ops}: {_shown(culprit['times']):.2f} times, {_far(culprit)}, {alone}")
        for layers in culprit["layers"] or ():
            say(f"  {_of_layers(layers, culprit['shared'])}")
        if culprit["remark"]:
            say(f"  {culprit['remark']}")
    if facts["elsewhere"]:
        say("The plan is that far off even with every op left that the two differ in: it is no op.")
    say(took)


def _far(told: Mapping[str, Any]) -> str:
    tokens = "1 token is" if told["far"] == 1 else f"{told['far']} tokens are"
    return f"{tokens} far off ({told['far_allowed']} may be)"


def _shown(value: float | None) -> float:
    return math.inf if value is None else value


def _of_layers(layers: tuple[str, ...], shared: Mapping[str, int]) -> str:
    if not layers:
        return "in calls that no layer of the model makes"
    told = (f"{n} (which {shared[n]} places share)" if shared[n] > 1 else n for n in layers)
    return f"in layer {' and '.join(told)}" + ("" if len(layers) == 1 else ", only together")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
