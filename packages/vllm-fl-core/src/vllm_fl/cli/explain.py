"""`vllm-fl explain`: every candidate of one op and why it was chosen; or an error's code."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import asdict
from typing import Any

from ..contracts import OpSpec
from ..contracts.binding import (
    AttentionPlace,
    Binding,
    FunctionPlace,
    FusionPlace,
    GraphPlace,
    IrPlace,
    LayerPlace,
    OperatorPlace,
)
from ..dispatch import get_default_manager
from ..dispatch.manager import OpManager
from ..dispatch.resolver import UNORDERED
from ..integration.places import all_bindings
from ..plugins.attention import ATTENTION
from ..plugins.communicator import COMMUNICATOR, NAMED_CLASSES
from ..settings.policy import Mode, OpOrder
from ..settings.schema import Settings
from ..settings.unmatched import unmatched
from ..settings.values import ORDER_PREFIX
from . import _table
from ._candidates import as_rows
from ._codes import codes, is_code, page, title
from ._replaced import replaced_layers
from ._show import UsageError, print_json, print_table, say
from .policy import merged_from

__all__ = ["add_arguments", "documentation_of", "places_of", "run", "signature_of"]

WHERE = {
    "script": "called by a script (call_op)",
    "eager": "in an engine, eager mode",
    "compiled": "in an engine, compiled mode",
}

FILTERS = (
    "enabled",
    "strict",
    "allow_vendors",
    "deny_vendors",
    "require",
)
"""The settings beside the order that bear on every op, and beside those that plugins reject by."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The op, and the engine's mode."""
    parser.add_argument(
        "op",
        metavar="OP",
        help="the op, as `vllm-fl ops` names it; or the code of an error or a finding (FL102)",
    )
    parser.add_argument(
        "--mode",
        choices=tuple(WHERE),
        help="only this one: a script (call_op), or an engine in eager or compiled mode, where "
        "vLLM's own path (stock) is a candidate too",
    )
    parser.add_argument(
        "--contract",
        action="store_true",
        help="the op's contract instead: what it computes, shapes, dtypes, errors, tolerances",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when nothing may run."""
    if is_code(arguments.op):
        return _show_code(arguments.op.upper(), as_json=arguments.json)
    manager = get_default_manager()
    op, snapshot = arguments.op, manager.registry.snapshot()
    spec = snapshot.contracts.get(op)
    if arguments.contract:
        return _show_contract(op, spec, as_json=arguments.json)
    binding = all_bindings(snapshot).get(op, Binding())
    modes = [arguments.mode] if arguments.mode else [*WHERE]
    is_class = op in NAMED_CLASSES or op in snapshot.layers
    if is_class and not arguments.mode:
        modes.remove("script")  # it names a class for vLLM: no script calls it
    elif spec is None and not is_class and arguments.mode != "script":
        manager.trace(op)  # one that nobody knows is another mistake
        if arguments.mode:
            raise UsageError(f"{op}: no contract names it, so that no engine runs it.")
        modes = ["script"]
    settings = manager.settings
    assert settings is not None
    table = _table.as_json(settings, snapshot, op) if modes != ["script"] else None
    tabled = settings.with_table() if table and not table["obstacle"] else settings
    views = [
        _view(manager, op, mode, tabled if table and mode == table["mode"] else settings)
        for mode in modes
    ]
    replaced = replaced_layers(op) if modes != ["script"] else {"layers": [], "error": None}
    listed = settings.get(f"{ORDER_PREFIX}{op}")
    merged = merged_from(listed) if listed and listed.merged else None
    slips = [said for name, said in unmatched(settings, snapshot.impls_by_op) if name == op]
    rejecting = [
        spec.key
        for plugin in manager.registry.plugins
        if "rejections" in plugin.hooks
        for spec in plugin.settings
        if spec.names or isinstance(spec.default, bool)
    ]
    bearing = [
        {"key": key, "value": settings[key].value, "origin": settings[key].origin}
        for key in (*FILTERS, *rejecting)
        if settings[key].origin != "default"
    ]
    if arguments.json:
        print_json(
            op=op,
            signature=signature_of(spec),
            modes=views,
            settings=bearing,
            merged=merged,
            unmatched=slips,
            places=places_of(binding),
            bypasses=list(binding.not_reached),
            replaced=replaced,
            table=table,
        )
    else:
        _show(op, spec, views, bearing, is_layer=op in snapshot.layers)
        if table and settings.pinned is not None:
            _table.say_figures(table, settings.pinned)
        if modes != ["script"] and (places := places_of(binding)):
            say(f"\nInside vLLM it runs in: {'; '.join(places)}.")
        if modes != ["script"] and binding.not_reached:
            say("This is not reached, whatever the policy says:")
            for bypass in binding.not_reached:
                say(f"  - {bypass}")
        if merged and listed:
            say("\nThe order is made of the policy files of several backends:")
            for value, origin in listed.merged:
                say(f"  {origin}: {value}")
            for sentence in listed.disagreements:
                say(f"  They disagree: {sentence}. VLLM_FL_PER_OP='{op}=…' decides it.")
        for said in slips:
            say(f"\nWarning: {said}")
        for layer in replaced["layers"]:
            say(
                f"\nInside vLLM layer {layer['layer']} is {layer['owner']}, not vllm-fl's: what is "
                "said above does not hold there."
            )
        if replaced["error"]:
            say(f"\nWhether another plugin replaces a layer is not known: {replaced['error']}")
    selected = [each["selected"] for view in views for each in (view, *view["rows"])]
    return 0 if all(selected) else 1


def _show_code(code: str, *, as_json: bool) -> int:
    """The page of a code. It needs no plugin and no settings, which may be what is wrong."""
    text = page(code)
    if text is None:
        raise UsageError(f"{code}: there is no such code. Known: {', '.join(codes())}")
    if as_json:
        print_json(code=code, title=title(text), page=text)
    else:
        say(text.rstrip())
    return 0


def _view(manager: OpManager, op: str, mode: str, settings: Settings) -> dict[str, Any]:
    """One mode's trace as JSON data."""
    engine = mode != "script"
    side: Mode = "compiled" if mode == "compiled" else "eager"
    own = settings if engine else None  # a script may have a policy of its own in force

    *rows, (_, trace) = manager.rows(
        op, mode=side, engine=engine, settings=own, without_layer=not engine
    )
    return {
        "mode": mode,
        "order": [str(token) for token in trace.order],
        "origin": _origin(settings, op, side),
        "selected": trace.selected.impl_id if trace.selected else None,
        "candidates": as_rows(manager, trace),
        "rows": [
            {
                "up_to": ceiling,
                "order": [str(token) for token in row.order],
                "selected": row.selected.impl_id if row.selected else None,
                "candidates": as_rows(manager, row),
            }
            for ceiling, row in rows
        ],
    }


def _origin(settings: Settings, op: str, mode: Mode) -> str:
    """Where the order comes from: the op's own list, or the preference."""
    listed = settings.get(f"{ORDER_PREFIX}{op}")
    order = listed and listed.value
    if listed and isinstance(order, OpOrder) and order.rows(mode):
        return f"{listed.key}, {listed.origin}"
    prefer = settings["prefer"]
    return f"prefer={prefer.value}, {prefer.origin}"


def places_of(binding: Binding) -> list[str]:
    """Where vLLM runs the op and the plan reaches it, one phrase each; not of which release."""
    told = []
    for place in binding.places:
        match place:
            case LayerPlace():
                more = ", and vLLM's subclasses of it that inherit its forwards"
                told.append(f"layer {place.cls}{more * place.subclasses}")
            case OperatorPlace():
                told.append(f"operator {place.name}")
            case FunctionPlace():
                told.append(f"function {place.name.removeprefix('vllm.')}")
            case IrPlace():
                told.append(f"vllm.ir.{place.name}, in the releases that have it")
            case AttentionPlace():
                told.append("the attention layers, by class path")
            case GraphPlace():
                told.append(f"{', '.join(place.operators)} of PyTorch's, in compiled graphs")
            case FusionPlace():
                ours = ", or one of ours on a plugin's device" * (place.own is not None)
                told.append(f"where vLLM's pass {place.path.rpartition('.')[2]} finds it{ours}")
    return list(dict.fromkeys(told))


def signature_of(spec: OpSpec | None, width: int = 0) -> str | None:
    """The contract's parameters; None for an op without a contract.

    Args:
        spec: the contract.
        width: how long a line may be before each parameter has one of its own; 0: any.
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


def _show(
    op: str,
    spec: OpSpec | None,
    views: list[dict[str, Any]],
    bearing: list[dict[str, Any]],
    *,
    is_layer: bool,
) -> None:
    if op == ATTENTION:
        say(f"{op}: the class that vLLM's attention layers use; an engine also asks each candidate")
        say("whether it supports the served model, and says so in its start line.")
    elif op == COMMUNICATOR:
        say(f"{op}: the class through which the ranks of an engine exchange tensors; an engine of")
        say("several ranks also asks each candidate whether it supports them, and says so in its")
        say("start line.")
    elif is_layer:
        say(f"{op}: a whole layer of vLLM's, by its class; an engine also asks each candidate")
        say("whether it supports the engine, and says so in its start line. It is not verified.")
    elif spec is None:
        say(f"{op} (no contract names it: scripts call it, and no engine runs it)")
    else:
        say(signature_of(spec, width=1) or "")
        say(documentation_of(spec).split("\n\n")[0])
        say(f"vllm-fl explain {op} --contract prints shapes, dtypes, errors and tolerances.")
    for setting in bearing:
        say(f"{setting['key']}={setting['value']} ({setting['origin']})")
        if setting["key"] == "require" and setting["value"] == "batch_invariant":
            say("An engine measures each candidate when it starts, and rejects those whose rows")
            say("have other bits in another batch. Its log says so. A script measures nothing.")
    for view in views:
        where = WHERE[view["mode"]].capitalize()
        if view["rows"]:
            say(f"\n{where}, by the size of a call  ({view['origin']}):")
        for row in view["rows"]:
            _show_order(f"at most {row['up_to']} tokens", row)
        if view["rows"]:
            _show_order("more tokens", view)
            if view["mode"] == "compiled":
                say(
                    "The compiler takes it whole, as one operator that looks its row up when it "
                    "runs: nothing is fused into it. Where vLLM compiles by range of sizes, as on "
                    "GPUs, what can be traced is inlined in its range: the start line says where."
                )
        else:
            _show_order(f"\n{where}", view, origin=f"  ({view['origin']})")
        if any(c["reason"] == UNORDERED for c in view["candidates"]):
            say(
                "No list orders this op, so that vLLM's own code (stock) stands before reference. "
                "VLLM_FL_PREFER=reference, or a list, puts reference first."
            )


def _show_order(what: str, view: dict[str, Any], origin: str = "") -> None:
    """What is selected, and every candidate, of a mode or of one row of it."""
    say(f"{what}: {view['selected'] or 'nothing may run'}")
    say(f"order {' | '.join(view['order'])}{origin}")
    if view["candidates"]:
        print_table(
            ["implementation", "kind", "priority", "distribution", "status", "reason"],
            [_row(candidate) for candidate in view["candidates"]],
        )
    if view["selected"] is None:
        say(
            "Nothing may run. Install a backend (pip install vllm-fl-reference), or admit "
            "one of the rejected ones."
        )


def _show_contract(op: str, spec: OpSpec | None, *, as_json: bool) -> int:
    """What a caller and the author of an implementation must know of one op."""
    if spec is None:
        get_default_manager().trace(op)  # one that nobody knows is another mistake
        raise UsageError(f"{op}: no contract names it.")
    named = [("results", spec.tolerances)] if spec.tolerances else []
    for number, output in enumerate(spec.outputs):
        name = f"result {number}, {type(output).__name__}"
        named.append((name, getattr(output, "tolerances", {})))
    if as_json:
        print_json(
            op=op,
            signature=signature_of(spec),
            documentation=documentation_of(spec),
            dtypes=list(spec.dtypes),
            tolerances={
                name: {dtype: asdict(bound) for dtype, bound in table.items()}
                for name, table in named
            },
            consumable=sorted(spec.consumable),
            from_layer=list(spec.from_layer),
        )
        return 0
    say(signature_of(spec, width=1) or "")
    say(documentation_of(spec))
    say(f"\nIts samples are made in {', '.join(spec.dtypes)}.")
    if spec.consumable:
        consumable = ", ".join(sorted(spec.consumable))
        say(f"An implementation may declare that it overwrites {consumable}.")
    if spec.from_layer:
        say(f"In vLLM the layer provides {', '.join(spec.from_layer)}.")
    for name, table in named:
        if table:
            say(f"\nHow far {name} may lie from the oracle in fp64:")
            for dtype, bound in table.items():
                say(f"  {dtype}: {bound.rtol:g} of it and {bound.atol:g}; {bound.reason}")
        else:
            say(f"\n{name}: compared as docs/plugins.md says.")
    return 0


def documentation_of(spec: OpSpec) -> str:
    """What the contract says of the op, in its own words."""
    return inspect.getdoc(spec.oracle) or ""


def _row(candidate: dict[str, Any]) -> tuple[object, ...]:
    brought_by = candidate["distribution"]
    return (
        candidate["impl_id"],
        candidate["kind"],
        candidate["priority"],
        f"{brought_by} {candidate['version']}" if brought_by else None,
        candidate["status"],
        candidate["reason"],
    )
