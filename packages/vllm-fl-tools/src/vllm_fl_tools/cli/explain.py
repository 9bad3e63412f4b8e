"""`vllm-fl explain`: explain why an implementation runs, or what an error code means.

Example: vllm-fl explain rms_norm --mode eager
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from vllm_fl.contracts import OpSpec
from vllm_fl.contracts.binding import Binding
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.resolver import STOCK, Candidate, Stock, Trace
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.integration.targets import all_bindings
from vllm_fl.plugins.plugin import Owner
from vllm_fl.plugins.snapshot import RegistrySnapshot
from vllm_fl.plugins.types import ATTENTION, COMMUNICATOR, KERNEL_OPS, NAMED_CLASSES, VLLM_IDS, Impl
from vllm_fl.settings.names import unmatched_orders
from vllm_fl.settings.policy import DEFAULT_ORDER, Mode, OpOrder, Rows
from vllm_fl.settings.schema import Settings
from vllm_fl.settings.values import ORDER_PREFIX
from vllm_fl.text import closest

from ..operate.described import Described
from ._engine import any_engines, asked_of, plan_entry, takes_engine
from ._show import UsageError, print_answer, print_table, say

PAGES = files("vllm_fl") / "codes"
"""One Markdown file for each code, which the documentation site also uses."""

NAMED = {
    ATTENTION: "the class that vLLM's attention layers use",
    COMMUNICATOR: "the class through which the ranks of an engine exchange tensors",
    **dict.fromkeys(KERNEL_OPS, "the class that computes quantised layers of this scheme"),
}


WHERE = {
    "script": "called by a script (call_op)",
    "eager": "in an engine, eager mode",
    "compiled": "in an engine, compiled mode",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "op",
        metavar="OP",
        help="an op of `vllm-fl plan`, or the code of an error or finding (FL102)",
    )
    takes_engine(parser)
    parser.add_argument(
        "--script",
        dest="mode",
        action="store_const",
        const="script",
        help="explain a call from a script (call_op), outside an engine",
    )
    parser.add_argument(
        "--contract",
        action="store_true",
        help="print the op's contract: what it computes, shapes, dtypes, errors, tolerances",
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if no implementation can run."""
    if re.fullmatch(r"FL\d{3}", arguments.op, re.IGNORECASE):  # no op has such a name
        return _show_code(arguments.op.upper(), as_json=arguments.json)
    if arguments.contract:
        return _show_contract(arguments.op, as_json=arguments.json)
    engines = asked_of(arguments)
    facts = _facts(arguments.op, engines, arguments.mode)
    print_answer(facts, _show, as_json=arguments.json)
    views = [each for view in facts["modes"] for each in (view, *view["rows"])]
    return 0 if all(view["selected"] or view.get("note") for view in views) else 1


def _facts(op: str, engines: Sequence[Described], mode: str | None) -> dict[str, Any]:
    manager = get_default_manager()
    snapshot = manager.registry.snapshot()
    engines = _engines_of(manager, op, engines, mode)
    settings = engines[0].facts.settings if engines else manager.settings
    assert settings is not None  # the default manager always loads settings
    # A script may have its own policy.
    rows = () if engines else manager.rows(op, without_layer=True)
    is_script = not engines and mode == "script"
    binding = Binding() if is_script else all_bindings(snapshot).get(op, Binding())
    foreign = engines[0].facts.foreign.get(op, {}) if engines else {}
    return {
        "op": op,
        "signature": signature_of(snapshot.contracts.get(op)),
        "modes": [_engine_view(manager, op, engine) for engine in engines]
        or [{"mode": "script", "note": "", **_view(manager, op, rows, settings, "eager")}],
        "layers": dict(engines[0].layers.get(op, {})) if engines else {},
        "kernels": _kernels(engines[0].facts, op) if engines else [],
        "unmatched": [
            said for of, said in unmatched_orders(settings, snapshot.impls_by_op) if of == op
        ],
        "places": targets_of(binding),
        "bypasses": list(binding.not_reached),
        "replaced": {
            "layers": [{"layer": layer, "owner": owner} for layer, owner in foreign.items()],
            "error": (engines[0].unasked or None) if engines else None,
        },
        "table": _unused_table(engines),
        "devices": {
            "here": engines[0].facts.device or None if engines else None,
            "orders": [str(order) for order in settings.by_device.get(op, ())],
        },
    }


def _kernels(facts: EngineFacts, op: str) -> list[dict[str, Any]]:
    """Return the classes of a model's quantised layers, with vLLM's reasons against the others."""
    if op not in facts.kernels:
        return []
    from vllm_fl.integration.patchers.kernel_classes import kernel_row  # imports torch

    return [*map(kernel_row, facts.kernels[op])]


def _unused_table(engines: Sequence[Described]) -> str | None:
    """Return why the configured tuning table has no effect; None if some engine uses it."""
    tables = [table for each in engines if (table := each.facts.settings.tuned) is not None]
    return tables[0].reason if tables and all(table.unused for table in tables) else None


def _engines_of(
    manager: OpManager, op: str, engines: Sequence[Described], mode: str | None
) -> Sequence[Described]:
    """Return the engines that may have the op; empty for scripts and for ops of scripts only."""
    snapshot = manager.registry.snapshot()
    if op in NAMED_CLASSES or op in snapshot.layers:  # a class for vLLM, not for scripts
        return engines or any_engines()
    why = _for_scripts_alone(op, snapshot)
    if why and mode != "script":
        manager.trace(op)  # raises UnknownOpError for an unknown op
        if mode:
            raise UsageError(f"{op}: {why}, so no engine runs it.")
        return ()
    return engines


def _for_scripts_alone(op: str, snapshot: RegistrySnapshot) -> str:
    """Return why the op cannot run in an engine, with any vLLM; empty if it can."""
    if op not in snapshot.contracts:
        return "it has no contract"
    binding = snapshot.bindings.get(op)
    return "" if binding is not None and binding.targets else "it has no target in vLLM"


def _engine_view(manager: OpManager, op: str, engine: Described) -> dict[str, Any]:
    entry, facts = plan_entry(engine, op), engine.facts.ordered
    note = entry.note if entry else "not in this engine's plan"
    view = _view(manager, op, entry.rows if entry else (), facts.settings, facts.mode)
    if engine.aside:
        note, view["selected"] = f"vLLM runs without vllm-fl: {engine.aside}", STOCK.impl_id
    elif entry and note:
        view |= {"selected": entry.fallback.impl_id, "rows": []}
    return {"mode": facts.mode, "note": note, **view}


def _view(
    manager: OpManager, op: str, rows: Rows[Trace], settings: Settings, mode: Mode
) -> dict[str, Any]:
    owners = manager.registry.snapshot().owners

    def describe(trace: Trace) -> dict[str, Any]:
        return {
            "order": [str(selector) for selector in trace.order],
            "selected": trace.selected.impl_id if trace.selected else None,
            "candidates": [
                _candidate(each, owners.get((op, each.impl.impl_id), Owner("vllm")))
                for each in trace.candidates
            ],
        }

    *smaller, (_, rest) = rows or ((None, Trace(op, mode, (), ())),)
    return {
        "origin": _origin(settings, op, mode),
        **describe(rest),
        "rows": [{"up_to": ceiling, **describe(row)} for ceiling, row in smaller],
    }


def _origin(settings: Settings, op: str, mode: Mode) -> str:
    """Return the origin of the order: a list for the op, or the preference."""
    for name in (op, DEFAULT_ORDER):
        listed = settings.get(f"{ORDER_PREFIX}{name}")
        order = listed and listed.value
        if listed and isinstance(order, OpOrder) and order.rows(mode):
            return f"{listed.key}, {listed.origin}"
    prefer = settings["prefer"]
    return f"prefer={prefer.value}, {prefer.origin}"


def _candidate(candidate: Candidate, owner: Owner) -> dict[str, Any]:
    impl = candidate.impl
    return {
        "impl_id": impl.impl_id,
        "kind": _kind(impl),
        "vendor": impl.vendor,
        "priority": impl.priority,
        "distribution": owner.distribution,
        "version": owner.version,
        "status": candidate.status,
        "reason": candidate.reason,
    }


def _kind(impl: Impl | Stock) -> str:
    if impl.impl_id.startswith(VLLM_IDS):  # a class of vLLM, which an order selects
        return STOCK.selector
    return impl.selector if isinstance(impl, Stock) else impl.kind.value


def codes() -> list[str]:
    names = (path.name for path in PAGES.iterdir() if path.name.endswith(".md"))
    return sorted(name.removesuffix(".md") for name in names)


def code_page(code: str) -> str | None:
    return (PAGES / f"{code}.md").read_text("utf-8") if code in codes() else None


def title(text: str) -> str:
    """Return the heading of a page, without the code."""
    return text.splitlines()[0].partition(": ")[2]


def _show_code(code: str, *, as_json: bool) -> int:
    """Show the page of a code. No plugins and settings are loaded, because they may be at fault."""
    text = code_page(code)
    if text is None:
        raise UsageError(f"{code}: unknown code. Known: {', '.join(codes())}")
    facts = {"code": code, "title": title(text), "page": text}
    print_answer(facts, lambda shown: say(shown["page"].rstrip()), as_json=as_json)
    return 0


def targets_of(binding: Binding) -> list[str]:
    """Return the targets of the op, one phrase each, without the releases that have them."""
    return list(dict.fromkeys(target.describe() for target in binding.targets))


def signature_of(spec: OpSpec | None, width: int = 0) -> str | None:
    """Return the contract's signature; None for an op without a contract.

    Parameters get their own lines if the signature is longer than `width`; 0 is no limit.
    """
    if spec is None:
        return None
    parameters = [*map(_parameter, spec.signature.parameters.values())]
    returns = _annotation(spec.signature.return_annotation)
    line = f"{spec.name}({', '.join(parameters)}) -> {returns}"
    if not width or len(line) <= width:
        return line
    return "\n".join([f"{spec.name}(", *(f"    {p}," for p in parameters), f") -> {returns}"])


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name}: {_annotation(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def _annotation(annotation: object) -> str:
    return str(annotation).replace("torch.Tensor", "Tensor")


def _show(facts: Mapping[str, Any]) -> None:
    _show_heading(facts["op"])
    for view in facts["modes"]:
        _show_view(view)
    for use in facts["kernels"]:
        say(f"\nvLLM's choice for {use['layers']} layers: {use['class']}")
        print_table(["other class", "vLLM's reason"], [*use["others"].items()])
    if facts["table"]:
        say(f"\n{facts['table']}.")
    if facts["devices"]["orders"]:
        here = facts["devices"]["here"] or "an unknown device"
        say(
            "\n  ".join(
                [f"\nIts order depends on the device, here {here}:", *facts["devices"]["orders"]]
            )
        )
    if facts["places"]:
        say(f"\nTargets in vLLM: {'; '.join(facts['places'])}.")
    if facts["bypasses"]:
        say("\n  - ".join(["Not covered (vLLM's code always runs here):", *facts["bypasses"]]))
    for said in facts["unmatched"]:
        say(f"\nWarning: {said}")
    if error := facts["replaced"]["error"]:
        say(f"\n{error}: this considers only settings and plugins.")


def _show_heading(op: str) -> None:
    snapshot = get_default_manager().registry.snapshot()
    if op in NAMED_CLASSES or op in snapshot.layers:
        what = NAMED.get(op, "a whole layer class of vLLM, which is not verified")
        say(f"{op}: {what}.")
        return
    why = _for_scripts_alone(op, snapshot)
    if (spec := snapshot.contracts.get(op)) is None:
        say(op)
    else:
        say(signature_of(spec, width=1) or "")
        say(documentation_of(spec).split("\n\n")[0])
        say(f"vllm-fl explain {op} --contract prints shapes, dtypes, errors and tolerances.")
    if why:
        meant = "" if spec else closest(op, snapshot.contracts, 0.8)
        say(f"Only scripts can call it, because {why}.{meant}")


def _show_view(view: Mapping[str, Any]) -> None:
    """Print a mode's selected implementation and candidates, by size if they differ."""
    where = WHERE[view["mode"]].capitalize()
    if view["rows"]:
        say(f"\n{where}, by number of tokens  ({view['origin']}):")
        for row in view["rows"]:
            _show_order(f"at most {row['up_to']} tokens", row)
        _show_order("more tokens", view)
    else:
        _show_order(f"\n{where}", view, view["note"], f"  ({view['origin']})")


def _show_order(what: str, view: Mapping[str, Any], note: str = "", origin: str = "") -> None:
    """Print the selected implementation and the candidates in a mode, or at one size."""
    say(f"{what}: {view['selected'] or 'none'}")
    if note:
        say(note)
    elif view["selected"] is None:
        say("None can run. Install a backend (pip install vllm-fl-reference), or allow one.")
    if view["order"]:
        say(f"order {' | '.join(view['order'])}{origin}")
    if view["candidates"]:
        rows = [
            (
                each["impl_id"],
                each["kind"],
                each["priority"],
                f"{each['distribution']} {each['version']}" if each["distribution"] else None,
                each["status"],
                each["reason"],
            )
            for each in view["candidates"]
        ]
        print_table(
            ["implementation", "kind", "priority", "distribution", "status", "reason"], rows
        )


def _show_contract(op: str, *, as_json: bool) -> int:
    """Show the contract of an op, for its callers and for authors of implementations."""
    manager = get_default_manager()
    spec = manager.registry.snapshot().contracts.get(op)
    if spec is None:
        manager.trace(op)  # raises UnknownOpError for an unknown op
        raise UsageError(f"{op}: it has no contract.")
    named = [("results", spec.tolerances)] if spec.tolerances else []
    for number, output in enumerate(spec.outputs):
        name = f"result {number}, {type(output).__name__}"
        named.append((name, getattr(output, "tolerances", {})))
    facts = {
        "op": op,
        "signature": signature_of(spec),
        "documentation": documentation_of(spec),
        "dtypes": list(spec.dtypes),
        "tolerances": {
            name: {dtype: asdict(bound) for dtype, bound in table.items()} for name, table in named
        },
        "consumable": sorted(spec.consumable),
        "from_layer": list(spec.from_layer),
    }

    def show(facts: Mapping[str, Any]) -> None:
        say(signature_of(spec, width=1) or "")
        say(facts["documentation"])
        say(f"\nDtypes of its samples: {', '.join(facts['dtypes'])}.")
        if facts["consumable"]:
            consumable = ", ".join(facts["consumable"])
            say(f"An implementation may declare that it overwrites {consumable}.")
        if facts["from_layer"]:
            say(f"In vLLM, the layer provides {', '.join(facts['from_layer'])}.")
        for name, table in facts["tolerances"].items():
            if table:
                say(f"\nTolerance of {name}, compared with the float64 reference result:")
            else:
                say(f"\n{name}: compared as described in docs/contracts.md.")
            for dtype, bound in table.items():
                share = f"relative {bound['rtol']:g}, absolute {bound['atol']:g}"
                say(f"  {dtype}: {share}; {bound['reason']}")

    print_answer(facts, show, as_json=as_json)
    return 0


def documentation_of(spec: OpSpec) -> str:
    """Return the contract's description of the op."""
    return inspect.getdoc(spec.oracle) or ""
