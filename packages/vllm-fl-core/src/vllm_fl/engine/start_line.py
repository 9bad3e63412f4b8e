"""A plan as text: the line that is logged at startup, and remarks for the report."""

from __future__ import annotations

from collections.abc import Collection

from ..dispatch.resolver import FOREIGN
from .plan import Plan

LONGEST, NAMED = 200, 5


def line(plan: Plan, *facts: str, not_reached: Collection[str] = ()) -> str:
    """Return the plan in one line of at most `LONGEST` characters.

    It contains the number of ops that vLLM does not compute, and the first of them: classes, then
    functions, then ops of another vLLM plugin. `facts` are phrases that follow the mode. Ops in
    `not_reached` are not counted, because this model does not use them.
    """
    ops = sorted(plan.entries, key=lambda op: op in plan.contracts)
    ours = [op for op in ops if any(impls for _, impls in plan.entries[op].candidates)]
    others = [op for op in ops if plan.entries[op].label == FOREIGN.selector]
    served = [op for op in (*ours, *others) if op not in not_reached]
    named, left = "", len(served)
    head = f"vllm-fl: {left} op{'s' * (left != 1)} planned"
    tail = f" ({'; '.join([plan.mode, *facts])})"
    for op in served[:NAMED]:
        longer = f"{named} {op}={plan.entries[op].label}"
        if len(f"{head}:{longer} and {left} more{tail}") <= LONGEST:
            named, left = longer, left - 1
    more = f" and {left} more" if named and left else ""
    if not served:
        named = " all is vLLM's own code"
    return f"{head}{named and ':'}{named}{more}{tail}"


def notes(plan: Plan, not_reached: Collection[str] = ()) -> list[str]:
    """Return remarks on ops kept for vLLM or another plugin, unverified layers, and unused ops."""
    found = [
        f"{op}: {entry.reason}"
        for op, entry in plan.entries.items()
        if entry.note or entry.label == FOREIGN.selector
    ]
    if plan.layers:
        found.append(f"whole layers, not verified: {' '.join(plan.layers)}")
    if unseen := sorted(op for op in not_reached if op in plan.entries):
        found.append(f"unused by this model: {', '.join(unseen)}")
    return found
