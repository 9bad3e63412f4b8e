"""`vllm-fl plan`: show which implementations an engine would run, and compare plans.

Nothing is started or verified, so verification may still disable implementations.

Example: vllm-fl plan --model DIR --diff stock
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration.targets import without_layers
from vllm_fl.logs import quiet
from vllm_fl.plugins.reserved import ops_missing
from vllm_fl.settings.lock import MARK, Locked, read_lock
from vllm_fl.settings.schema import CONFIG, Settings

from ..engine.tuning_table import STOCK_NAME
from ..operate.described import Described
from ..operate.errors import LockError
from ._engine import asked_of, takes_engine
from ._lock import save
from ._show import INCOMPLETE, UsageError, print_answer, print_table, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    takes_engine(parser)
    parser.usage = "%(prog)s [options] [--model DIR [vLLM's arguments]]"
    parser.add_argument(
        "--diff",
        metavar="WHAT",
        help="show only the differences from `stock` (vLLM alone), a settings file instead of "
        f"{CONFIG}, a lock file, or earlier JSON output of this verb",
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="start the engine once, and write its lock file",
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if the engine would not start."""
    if arguments.save is not None:
        if arguments.diff is not None or arguments.mode is not None:
            raise UsageError("--save excludes --diff and --mode; it needs --model")
        return save(arguments)
    if arguments.model is None and arguments.mode is None:
        arguments.mode = "compiled"  # vLLM's default
    other = _given(arguments.diff) if arguments.diff is not None else None
    with quiet(logging.WARNING):  # `show` prints the warnings
        facts: dict[str, Any] = {"plan": _as_json(_engine(arguments), arguments)}
        if arguments.diff is not None:
            if other is None:
                other = _as_json(_engine(arguments, **{CONFIG: arguments.diff}), arguments)
            elif "lock" in other:
                locked = _engine(arguments, **{Settings.lock.variable: arguments.diff})
                other["differs"] = list(locked.differs)
                mine = facts["plan"]["ops"]  # a lock file may have ops that the model lacks
                lacks = mine.keys() - _in_model(mine).keys()
                other["ops"] = {op: each for op, each in other["ops"].items() if op not in lacks}
            facts["diff"] = {
                "with": arguments.diff,
                "ops": _differences(facts["plan"], other),
                "warnings": other["warnings"],
                "differs": other.get("differs", []),
            }
    print_answer(facts, show, as_json=arguments.json)
    return 1 if facts["plan"]["ends"] else 0


def _engine(arguments: argparse.Namespace, **variables: str) -> Described:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        (engine,) = asked_of(arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return engine


def _as_json(engine: Described, arguments: argparse.Namespace) -> dict[str, Any]:
    facts, settings = engine.facts, engine.facts.settings
    manager = get_default_manager()
    snapshot = manager.registry.snapshot()
    missing = without_layers(engine.plan, engine.layers)
    locked, table = settings.locked, settings.tuned
    unmet = () if locked is None or locked.warns else engine.differs
    lock = locked and {
        "file": locked.file,
        "mode": "warn" if locked.warns else "strict",
        "differs": list(engine.differs),
    }
    scheduler = engine.config.scheduler_config if engine.config and engine.has_model else None
    return {
        "model": arguments.model,
        "mode": facts.mode,
        "dtype": str(facts.dtype).removeprefix("torch.") if engine.has_model else None,
        "platform": settings.platform,
        "tokens": scheduler.max_num_batched_tokens if scheduler else None,
        "sequences": scheduler.max_num_seqs if scheduler else None,
        "verified": False,
        "aside": engine.aside,
        "unasked": engine.unasked,
        "absent": "" if snapshot.contracts else ops_missing(manager.registry.plugins),
        "ops": {
            op: {
                **entry.to_json(),
                "layers": dict(engine.layers.get(op, {})),
                "in_model": op not in missing,
            }
            for op, entry in engine.plan.entries.items()
        },
        "unchosen": {use.name: use.count for use in facts.kernels.get("", ())},
        "ends": [*engine.ends, *(f"{line} [{LockError.code}]" for line in unmet)],
        "lock": lock,
        "table": table and {"file": table.file, "acts": not table.unused, "reason": table.reason},
        "warnings": list(settings.warnings),
    }


def _given(what: str) -> dict[str, Any] | None:
    """Return the plan that `--diff` refers to; None for a settings file.

    Raises:
        UsageError: the file cannot be read.
    """
    if what == STOCK_NAME:
        return {"ops": {}, "aside": "", "warnings": []}
    try:
        text = Path(what).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not text"
        wrong = f"--diff {what}: not `{STOCK_NAME}`, and not a readable file: {why}"
        raise UsageError(wrong) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # for example, YAML
        document = None
    keys = {*document} if isinstance(document, dict) else set()
    is_lock = what.endswith(".lock") or MARK in keys
    if not is_lock and "plan" not in keys and not what.endswith(".json"):
        return None
    lock = read_lock(what, key="--diff") if is_lock else None
    try:
        if lock is not None:
            return {**_of_lock(lock, lock.facts["plan"]), "warnings": []}
        ops = {op: _outcome(each) for op, each in _in_model(document["plan"]["ops"]).items()}
    except INCOMPLETE as error:
        wrong = f"--diff {what}: not the output of `vllm-fl plan --json` or `plan --save`"
        raise UsageError(wrong) from error
    return {"ops": ops, "aside": "", "warnings": []}


def _of_lock(lock: Locked, ops: Mapping[str, Any]) -> dict[str, Any]:
    known = {
        op: {**_of_label(label), "reason": "locked", "layers": {}} for op, label in ops.items()
    }
    return {"lock": lock.file, "ops": known, "aside": ""}


def _of_label(label: str) -> dict[str, Any]:
    """Parse an op's `_label`."""
    *rows, rest = label.split("|")
    found = [row.removesuffix(")").partition("(<=") for row in rows]
    return {"impl": rest, "rows": [{"up_to": int(n), "impl": impl} for impl, _, n in found]}


def show_lock(lock: Locked) -> None:
    _show_ops(_of_lock(lock, lock.result["ops"])["ops"])
    say(f"This is the plan of the lock file {lock.file}, verified on {lock.facts['device']}.")


def _differences(now: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return op -> what runs now and what would run, for ops that differ."""

    def of(plan: Mapping[str, Any], op: str) -> Any:
        return plan["ops"].get(op, {"impl": STOCK_NAME, "reason": plan["aside"]})

    ops = dict.fromkeys((*_in_model(now["ops"]), *_in_model(other["ops"])))
    pairs = {op: (of(now, op), of(other, op)) for op in ops}
    return {
        op: {"now": _outcome(mine), "then": _outcome(then)}
        for op, (mine, then) in pairs.items()
        if _runs(mine) != _runs(then)
    }


def _in_model(ops: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ops that the model has; all of them for a plan of an older release."""
    return {op: entry for op, entry in ops.items() if entry.get("in_model", True)}


def _outcome(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**_runs(entry), "reason": str(entry["reason"])}


def _runs(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an entry that decides what runs."""
    rows = [{"up_to": row["up_to"], "impl": row["impl"]} for row in entry.get("rows", ())]
    return {"impl": entry["impl"], **({"rows": rows} if rows else {})}


def show(facts: Mapping[str, Any]) -> None:
    plan = facts["plan"]
    remarks = [plan["mode"], plan["dtype"], plan["platform"]]
    if plan["tokens"] is not None:
        remarks.append(f"up to {plan['tokens']} tokens of {plan['sequences']} sequences at once")
    say(f"{plan['model'] or 'Any model'}: {', '.join(filter(None, remarks))}")
    if plan["unasked"]:
        say(f"{plan['unasked']}: this plan considers only settings and plugins.")
    if plan.get("absent"):
        say(f"No op has a contract: {plan['absent']}.")
    if plan["aside"]:
        say(f"vLLM runs without vllm-fl: {plan['aside']}.")
    if "diff" in facts:
        _show_diff(plan, facts["diff"])
    else:
        _show_ops(plan["ops"])
    if others := plan.get("unchosen"):
        named = _layers(others)
        say(f"Linear layers and experts that no order can choose a class for: {named}.")
    if table := plan["table"]:
        say(f"Tuning table: {table['file']}" if table["acts"] else f"{table['reason']}.")
    for warning in dict.fromkeys((*plan["warnings"], *facts.get("diff", {}).get("warnings", ()))):
        say(f"Warning: {warning}")
    for line in facts.get("diff", {}).get("differs", ()):
        say(f"Differs from the lock file: {line}.")
    lock = plan["lock"] or {"differs": []}
    for line in lock["differs"] if lock.get("mode") == "warn" else ():
        say(f"Differs from the lock file {lock['file']}: {line}.")
    for why in plan["ends"]:
        say(f"Startup would fail: {why}.")
    if not plan["aside"]:
        say("Not verified yet: startup may still disable an implementation, and logs a warning.")


def _show_ops(ops: Mapping[str, Any]) -> None:
    rows = [
        (op, _label(entry), _why(entry), _layers(entry["layers"]))
        for op, entry in _in_model(ops).items()
    ]
    if rows:
        print_table(["op", "implementation", "reason", "layers"], rows)
    if any(each[3] for each in rows) and not all(each[3] for each in rows):
        say("Ops without layers are called by other code of vLLM.")
    if further := sorted(ops.keys() - _in_model(ops).keys()):
        say(f"Not in this model: {', '.join(further)}.")


def _show_diff(plan: Mapping[str, Any], diff: Mapping[str, Any]) -> None:
    same = len(_in_model(plan["ops"]).keys() - diff["ops"].keys())
    rows = [
        (op, _label(each["now"]), _label(each["then"]), _why(each["then"]) or _why(each["now"]))
        for op, each in diff["ops"].items()
    ]
    if rows:
        print_table(["op", "now", f"with {diff['with']}", "reason"], rows)
    say(f"{len(rows)} op{'s differ' if len(rows) != 1 else ' differs'}, {same} do not.")


def _why(entry: Mapping[str, Any]) -> str:
    """Return why it runs. `explain` and --json have the reasons against other candidates."""
    return str(entry["reason"]).partition(" (")[0]


def _label(entry: Mapping[str, Any]) -> str:
    """Return the implementation that runs; by size, `vendor.cpu(<=16)|stock`."""
    rows = (f"{row['impl']}(<={row['up_to']})" for row in entry.get("rows", ()))
    return "|".join([*rows, entry["impl"]])


def _layers(layers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {cls}" for cls, count in layers.items())
