"""Attributes a step's time to code, from a profile and an engine's reports.

It does not import torch or vLLM; `integration/profiling.py` makes the profiles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine.tuning_table import STOCK_NAME

OP_LABEL, LAYER_LABEL = "vllm-fl/op/", "vllm-fl/layer/"

OWN_FORMS = ("stock.vllm", "foreign.oot")  # includes another plugin's code
"""Ids of vLLM's implementation, and of a class that a plugin of vLLM has registered."""

ATTENTION_OP = "attention_backend"

ATTENDS = re.compile(r"vllm::unified_(?:mla_)?(?:attention|kv_cache)|vllm::mla_attention")
"""vLLM's operators for attention and for writes to its cache."""

ATTENTION_LAYER = re.compile(r"(?:Attention|MLAAttention)$")

INDUCTOR = re.compile(r"triton_(?:poi|red|per|tem|mix|unk|for)_fused_|graph_\d+_cpp_fused_")
"""Kernels that Inductor generated."""

OPERATOR = re.compile(r"\w+::[\w.]+")
"""Names of torch's operators, unlike the C++ signatures that are names of kernels."""

MOVES = re.compile(r"Mem(?:cpy|set)\b")

PRODUCT = re.compile(r"mm|linear|matmul")
"""Operators that compute the matrix product of a layer."""

YES, PARTLY, NO, UNKNOWN = "yes", "partly", "no", "?"
"""Whether an implementation of the plan runs; `partly` if its kernel also has code from vLLM."""

RUN, COULD, ELSEWHERE, UNCOVERED = "runs", "could run", "not here", "no contract"
"""Coverage of code, in this order: an implementation runs; settings or options of vLLM select stock
code; a contract covers the code only in other modes, platforms or layers; no contract covers it.
"""


@dataclass(frozen=True)
class CodeOwner:
    """The owner of the code in a row of a profile.

    Args:
        op: the op with a contract, or several if they are fused; empty without a contract.
        impl: the implementation's id; `stock` for vLLM's code.
        name: the operator or layer, for code without an op.
        reached: `yes` if an implementation of the plan runs, `no` for vLLM's code, `partly` for a
            mixture, or `?` if unknown.
    """

    op: str
    impl: str
    name: str
    reached: str


KERNELS = 5
"""Maximum number of kernels that a row lists."""


@dataclass(frozen=True)
class OwnerFinder:
    """Finds the owners of names in a profile.

    Args:
        places: the result of `vllm_fl_places`.
        report: the result of `vllm_fl_report`.
        tokens: number of tokens of the step, for ops with an order by size.
    """

    places: Mapping[str, Any]
    report: Mapping[str, Any]
    tokens: int

    def of(self, path: Sequence[str]) -> CodeOwner:
        """Return the owner of the last name of a path; the names before it are its callers."""
        inner = [*reversed(path)]
        for name in inner:  # an implementation owns everything that it calls
            if name.startswith(OP_LABEL):
                op, _, impl = name.removeprefix(OP_LABEL).partition("/")
                return self._stock(op) if impl in OWN_FORMS else CodeOwner(op, impl, "", YES)
        for name in inner:
            if name in self.places["ours"]:
                op, impl = self.places["ours"][name]
                return CodeOwner(op, impl, "", YES)
            if name in self.places["kernels"] or INDUCTOR.match(name):
                return self._fused(name)
            if name in self.places["operators"]:
                return self._stock(self.places["operators"][name])
            if ATTENDS.match(name) or ATTENTION_LAYER.search(_layer(name)):
                return self._attention()
            if _layer(name) in self.places["layers"]:
                return self._stock(self.places["layers"][_layer(name)])
            if _layer(name):
                break
        return self._uncovered(path)

    def coverage(self, owner: CodeOwner) -> tuple[str, str]:
        """Return (coverage, why no implementation runs, in the words of `vllm-fl explain`)."""
        if owner.reached != NO:
            return (UNKNOWN if owner.reached == UNKNOWN else RUN), ""
        if not owner.op:
            return UNCOVERED, ""
        ops = owner.op.removeprefix("fused: ").split(", ")
        plan, gaps = self.report["ops"], self.places.get("not_covered", {})
        if decided := [op for op in ops if op in plan and self._planned(op) == STOCK_NAME]:
            why = (str(plan[op]["reason"]).partition(" (")[0] for op in decided)
            return COULD, "; ".join(dict.fromkeys(why))
        reasons = dict.fromkeys(gap for op in ops for gap in gaps.get(op, ()))
        listed = "not covered: " + "; ".join(reasons)
        return ELSEWHERE, listed if reasons else "no target covers this code"

    def _stock(self, op: str) -> CodeOwner:
        return CodeOwner(op, STOCK_NAME, "", NO)

    def _planned(self, op: str) -> str:
        entry = self.report["ops"].get(op, {"impl": STOCK_NAME})
        rows = [row for row in entry.get("rows", ()) if self.tokens <= row["up_to"]]
        impl: str = (rows[0] if rows else entry)["impl"]
        return STOCK_NAME if impl == "foreign" else impl

    def _attention(self) -> CodeOwner:
        impl, backend = self._planned(ATTENTION_OP), ", ".join(self.places["attention"])
        return CodeOwner(ATTENTION_OP, impl, backend, NO if impl == STOCK_NAME else YES)

    def _fused(self, kernel: str) -> CodeOwner:
        """Return the owner of a compiler's kernel, from the ops and implementations in it."""
        parts: Sequence[str] = self.places["kernels"].get(kernel, ())
        impls: dict[str, str] = {}
        others: dict[str, None] = {}
        for part in parts:
            op, _, impl = part.partition("/")
            if impl:
                impls[op] = STOCK_NAME if impl in OWN_FORMS else impl
            elif part in self.places["layers"]:
                op = self.places["layers"][part]
                impls[op] = STOCK_NAME if part in self.places["left"] else self._planned(op)
            else:
                others[part] = None
        if not impls:
            name = f"fused: {', '.join(others)}" if others else "fused by the compiler"
            return CodeOwner("", STOCK_NAME, name, NO if parts else UNKNOWN)
        stock = sorted(op for op, impl in impls.items() if impl == STOCK_NAME)
        reached = YES if not stock else NO if len(stock) == len(impls) else PARTLY
        ops = sorted(impls)
        run_by = ", ".join(dict.fromkeys(impls[op] for op in ops))
        name = f"with {', '.join(others)}" if others else ""
        return CodeOwner(f"fused: {', '.join(ops)}", run_by, name, reached)

    def _uncovered(self, path: Sequence[str]) -> CodeOwner:
        """Return an owner by name: the outermost operator in the innermost layer.

        The owner has an op if the operator is the matrix product of a layer.
        """
        last = max((n for n, name in enumerate(path) if _layer(name)), default=-1)
        called = [name for name in path[last + 1 :] if OPERATOR.fullmatch(name)]
        where = f"in {_layer(path[last])}" if last >= 0 else "outside of layers"
        if called:
            product = self.places.get("products", {}).get(_layer(path[last]) if last >= 0 else "")
            op = product if product and PRODUCT.search(called[0]) else ""
            return CodeOwner(op, STOCK_NAME, f"{called[0]} {where}", NO)
        if path and MOVES.match(path[-1]):
            return CodeOwner("", STOCK_NAME, path[-1].partition(" (")[0], NO)
        return CodeOwner("", STOCK_NAME, f"kernels {where}", NO)


def _layer(name: str) -> str:
    return name.removeprefix(LAYER_LABEL) if name.startswith(LAYER_LABEL) else ""


def attribute(finder: OwnerFinder, seen: Mapping[str, Any], *, on_host: bool) -> dict[str, Any]:
    """Return the owners of the time of one kind of step, as JSON data.

    Args:
        finder: finds the owner of a kernel.
        seen: the profile of labelled steps.
        on_host: whether the device is the host. If so, operators are listed instead of kernels.

    Returns:
        A dictionary with these keys:

        - `of`: operators or kernels; `steps`: number of profiled steps
        - `rows`, longest first: the fields of a `CodeOwner`, `us` and `calls` per step, the `share`
          of all rows, the longest `kernels` {name: µs per step}, and `coverage` and `why` from
          `OwnerFinder.coverage`
        - `total_us`: sum of the rows per step
        - `busy_us`: time with at least one kernel on the device; on a CPU, `total_us`
        - `reached`: share by `CodeOwner.reached`; `coverage`: share by coverage
        - `problem`: reason for an empty result
    """
    problem = seen["problem"]
    steps = 0 if problem else seen["steps"]
    rows: dict[CodeOwner, dict[str, Any]] = {}
    if steps:
        found = _on_host(finder, seen) if on_host else _on_device(finder, seen)
        for owner, name, us, calls in found:
            row = rows.setdefault(owner, {"us": 0.0, "calls": 0.0, "kernels": Counter()})
            row["us"] += us / steps
            row["calls"] += calls / steps
            row["kernels"][name] += us / steps
    total = sum(row["us"] for row in rows.values())
    if not steps:
        problem = problem or "the engine ran no such step"
    elif not total:
        what = "operator" if on_host else "kernel of the device"
        problem = f"PyTorch's profiler recorded no {what}; it may lack support for that device"
    table: list[dict[str, Any]] = []
    reached, coverage = Counter[str](), Counter[str]()
    for owner, row in sorted(rows.items(), key=lambda row: -row[1]["us"]):
        if row["us"]:
            share, longest = row["us"] / total, dict(row["kernels"].most_common(KERNELS))
            covered, why = finder.coverage(owner)
            row |= {"share": share, "kernels": longest, "coverage": covered, "why": why}
            table.append({**asdict(owner), **row})
            reached[owner.reached] += share
            coverage[covered] += share
    return {
        "of": "operators" if on_host else "kernels",
        "steps": steps,
        "rows": table,
        "total_us": total,
        "busy_us": total if on_host or not steps else seen["busy"] / steps,
        "reached": dict(reached),
        "coverage": dict(coverage),
        "problem": problem,
    }


CodeTimes = Iterator[tuple[CodeOwner, str, float, float]]
"""(owner, kernel or operator, µs, calls) in all profiled steps."""


def _on_host(finder: OwnerFinder, seen: Mapping[str, Any]) -> CodeTimes:
    """Yield the times of operators, without layers' labels and the compiler's wrappers.

    Times exclude callees. A call is counted only if its caller has another owner.
    """
    known = finder.places["kernels"]
    for number, us, calls in seen["host"]:
        path = seen["paths"][number]
        name, owner = path[-1], finder.of(path)
        is_new = len(path) == 1 or finder.of(path[:-1]) != owner
        is_code = "::" in name or name in known or bool(INDUCTOR.match(name))
        is_code = is_code or name.startswith(OP_LABEL)
        yield owner, name, us if is_code else 0.0, calls if is_new else 0


def _on_device(finder: OwnerFinder, seen: Mapping[str, Any]) -> CodeTimes:
    """Yield the times of kernels.

    A launch without a known owner gets the owner of the kernel's other launches, if there is only
    one.
    """
    owners: dict[str, dict[CodeOwner, None]] = {}
    unknown = []
    for number, name, us, calls in seen["kernels"]:
        path = [] if number is None else seen["paths"][number]
        if not any(map(_tells, path)):
            unknown.append((name, us, calls))
            continue
        owner = finder.of([*path, name])
        owners.setdefault(name, {})[owner] = None
        yield owner, name, us, calls
    for name, us, calls in unknown:
        known = [*owners.get(name, ())]
        yield known[0] if len(known) == 1 else _by_name(finder, name), name, us, calls


def _tells(name: str) -> bool:
    """Return whether this name of a caller identifies an owner: vllm-fl's label, or an operator."""
    return name.startswith((OP_LABEL, LAYER_LABEL)) or bool(OPERATOR.fullmatch(name))


def _by_name(finder: OwnerFinder, kernel: str) -> CodeOwner:
    if kernel in finder.places["kernels"] or INDUCTOR.match(kernel) or MOVES.match(kernel):
        return finder.of([kernel])
    return CodeOwner("", "", "unattributed", UNKNOWN)


def row_label(row: Mapping[str, Any]) -> str:
    op, name = row["op"], row["name"]
    return f"{op} ({name})" if op and name else op or name


def answers(phase: Mapping[str, Any]) -> list[str]:
    """Return the lines above the table of a phase; none for a file of an earlier release."""
    shares = phase.get("coverage")
    if not shares:
        return []
    by_why: dict[tuple[str, str], dict[str, float]] = {}
    for row in phase["rows"]:
        ops = by_why.setdefault((row["coverage"], row["why"]), {})
        ops[row["op"]] = ops.get(row["op"], 0.0) + row["share"]
    run, could = shares.get(RUN, 0.0), shares.get(COULD, 0.0)
    rest = shares.get(ELSEWHERE, 0.0) + shares.get(UNCOVERED, 0.0)
    lines = [
        f"Implementations run {run:.1%} of the {phase['of']}' time and could run {could:.1%} more; "
        f"in this engine, vLLM's code always runs {rest:.1%}" + _unless(shares, phase["reached"])
    ]
    for (covered, why), ops in by_why.items():
        if covered in (COULD, ELSEWHERE):
            named_ops = ", ".join(f"{op} {share:.1%}" for op, share in ops.items())
            lines.append(f"{covered.capitalize()}: {named_ops}: {why}.")
    if UNCOVERED in shares:
        lines.append(f"No contract: {shares[UNCOVERED]:.1%}, in the rows without an op.")
    return lines


def _unless(shares: Mapping[str, float], reached: Mapping[str, float]) -> str:
    """Return the end of the first line above the table: shares of mixed and unknown code."""
    partly, unknown = reached.get(PARTLY, 0.0), shares.get(UNKNOWN, 0.0)
    more = [f"{partly:.1%} run in kernels that also have vLLM's code"] * bool(partly)
    more += [f"{unknown:.1%} are unknown"] * bool(unknown)
    return f" ({'; '.join(more)})." if more else "."


def sums(phase: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table of a phase, which compare its sum with the step's time."""
    step, busy, total = phase["step_us"], phase["busy_us"], phase["total_us"]
    of = phase["of"]
    calls = sum(row["calls"] for row in phase["rows"])
    overlap = f", {total - busy:.1f} of them in parallel" if total - busy > 0.01 * total else ""
    lines = [f"All {of}: {total:.1f} µs per step in {calls:.0f} calls{overlap}."]
    lines.append(f"The step without the profiler: {step:.1f} µs.")
    left = phase["remainder_us"]
    if left >= 0:
        what = "Python, scheduling and sampling on the host"
        what += "" if of == "operators" else ", and launches, while the device is idle"
        lines.append(f"The remainder: {left:.1f} µs ({left / step:.1%}): {what}.")
    else:
        lines.append(
            f"The {of} take {-left:.1f} µs ({-left / step:.1%}) more than the step without the "
            "profiler, which slows each of them: compare the shares, not the times."
        )
    return lines
