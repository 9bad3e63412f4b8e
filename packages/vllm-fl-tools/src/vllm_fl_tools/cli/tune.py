"""`vllm-fl tune`: measure the fastest implementations, or profile a model.

Only this verb measures: an engine reads a tuning table, but never makes one.

Example: vllm-fl tune --model DIR --out table.yaml
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding
from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration.targets import all_bindings

from ..engine.tuning_table import KEEP_DEFAULT, STOCK_NAME, Figure, Tuned, TunedOp
from ..integration.model_ops import absent_ops
from . import _accept, _profile
from ._engine import engine_of, takes_model
from ._options import check_known, counts, device_of, draft_of, takes_timeout
from ._show import UsageError, print_answer, print_table, say
from ._tuning import TuningSubject, Work
from ._watch import INTERRUPTED, ended_by_signal

if TYPE_CHECKING:
    import torch

DEFAULT_FILE = "vllm-fl-table.yaml"

TIMEOUT = 300.0
"""Time limit of one call in seconds, including its compilation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    takes_model(parser, "the model's folder; its weights are read only for --profile and --accept")
    parser.add_argument("--op", action="append", metavar="OP", help="may be repeated")
    parser.add_argument(
        "--impl",
        action="append",
        metavar="ID",
        help="measure only these and the default (stock: vLLM's code); may be repeated",
    )
    parser.add_argument("--device", help="torch's device name; default: cuda or npu, else cpu")
    parser.add_argument(
        "--tokens",
        metavar="N,…",
        help="numbers of tokens; default: powers of two up to the largest batch, and the largest "
        "captured graph",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"output file, overwritten if it exists; default: {DEFAULT_FILE}, never overwritten",
    )
    takes_timeout(parser, "call", TIMEOUT)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="instead, start an engine, and print the shares of its step time that implementations "
        "take and could take; accepts only --model, --batch, --json and vLLM's arguments",
    )
    parser.add_argument(
        "--batch",
        metavar="N,…",
        help="for --profile: numbers of sequences that decode together; default: 1",
    )
    _accept.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if the table cannot be written or is not accepted, or nothing was measured."""
    if arguments.profile:
        return _profile.profile_model(arguments)
    if arguments.accept is not None:
        return _accept.accept_table(arguments)
    if arguments.rounds is not None:
        raise UsageError("--rounds is for --accept")
    if arguments.batch is not None:
        raise UsageError("--batch is for --profile")
    out = _out(arguments.out)
    asked = () if arguments.tokens is None else tuple(sorted(counts("--tokens", arguments.tokens)))
    manager = get_default_manager()
    manager.ensure_initialized()
    snapshot = manager.registry.snapshot()
    check_known("op", arguments.op, {*snapshot.contracts})
    installed = {impl.impl_id for impls in snapshot.impls_by_op.values() for impl in impls}
    check_known("impl", arguments.impl, {*installed, STOCK_NAME})
    bindings = all_bindings(snapshot)
    device = device_of(arguments.device)
    subject = _subject(arguments, asked, bindings, device)
    with ExitStack() as stack:
        stack.enter_context(_host_threads(device))
        stack.enter_context(ended_by_signal())
        work = Work(manager, subject, bindings, ops=arguments.op, impls=arguments.impl)
        try:
            with redirect_stdout(sys.stderr):  # output of a kernel is not a result
                work.run(arguments.timeout)
            table = work.table()
            with draft_of(str(out), "--out") as file:
                file.put(table.text.encode(), lasting=True)
        except KeyboardInterrupt:
            progress = f"after {work.done} of {work.units} measurements; no table was written"
            say(f"vllm-fl: interrupted {progress}", error=True)
            return INTERRUPTED
        except OSError as error:
            why = f"cannot write {error.filename or out}: {error.strerror or error}"
            say(f"vllm-fl: {why}", error=True)
            return 1
    remarks = [*work.remarks]
    if of_device := [op for op in subject.ordered if op in table.ops]:
        remarks.append(
            f"Without a table, engines on this device use orders that are shipped for it, for "
            f"{', '.join(of_device)}. The default and the ratios here exclude these orders."
        )
    facts = {"path": str(out), "remarks": remarks, "measurements": work.done}
    print_answer(
        {**facts, "table": asdict(table)},
        lambda _: show(str(out), table, [*remarks, f"{work.done} measurements."]),
        as_json=arguments.json,
    )
    return 0 if table.ops else 1


def _out(path: str | None) -> Path:
    """Return the table's path, after checking that it can be written."""
    if path is None and os.path.lexists(DEFAULT_FILE):
        raise UsageError(
            f"{DEFAULT_FILE} exists: --out {DEFAULT_FILE} overwrites it, or choose another name "
            "with --out"
        )
    with draft_of(path or DEFAULT_FILE, "--out") as file:
        return file.path


def _subject(
    arguments: argparse.Namespace,
    asked: tuple[int, ...],
    bindings: Mapping[str, Binding],
    device: torch.device,
) -> TuningSubject:
    """Return the model in a folder, with the engine that would serve it."""
    if arguments.model is None:
        raise UsageError("tune needs --model DIR")
    # `offline` has a larger default for the largest batch, so the sizes cover both ways of serving.
    engine = engine_of(arguments.model, arguments.more, offline=True)
    if engine.aside:
        raise UsageError(f"vLLM runs without vllm-fl: {engine.aside}")
    from vllm_fl.integration.planning import plan_for

    # The default excludes a tuning table and the orders that are shipped for the device.
    facts = engine.facts
    facts = replace(facts, settings=facts.settings.without_table("it is measured"))
    ordered = (*facts.ordered.settings.held_by_device,)
    facts = replace(facts, device="")
    assert facts.sizes is not None and facts.dtype is not None  # it has a model
    captured = max(facts.captured, default=0) if facts.mode == "compiled" else 0
    tokens = asked or _sizes(facts.sizes.tokens[-1], captured)
    return TuningSubject(
        arguments.model,
        replace(facts.sizes, tokens=(1, max(tokens))),
        tokens,
        facts.mode,
        facts.dtype,
        device,
        facts.absent | absent_ops(engine, bindings),
        captured,
        plan_for(facts),
        ordered=ordered,
    )


def _host_threads(device: torch.device) -> AbstractContextManager[None]:
    """Limit the host's threads during the block, unless the device is a CPU."""
    import torch

    from vllm_fl_verify.preflight import host_threads

    if device.type == "cpu":
        threads = torch.get_num_threads()
        say(f"vllm-fl: using {threads} threads; OMP_NUM_THREADS changes that", error=True)
    return host_threads(device)


def _sizes(largest: int, captured: int) -> tuple[int, ...]:
    """Return the powers of two up to the largest batch, this batch, and the captured size."""
    powers = {1 << n for n in range(largest.bit_length())}
    return tuple(sorted(powers | {largest} | ({captured} & {*range(1, largest)})))


def show(path: str, table: Tuned, remarks: Iterable[str] = ()) -> None:
    say(path)
    if table.ops:
        say(f"{table.mode}, {table.dtype}, {table.holds['device']}; {table.seconds:.0f} s")
        headings = ("op", "default", "up to", "choice", "µs", "quartiles", "default's µs", "ratio")
        print_table(headings, [row for op in table.ops.items() for row in _rows(*op)])
    else:
        say("No op was measured.")
    for remark in remarks:
        say(remark)
    for op, tuned in table.ops.items():
        for figure in tuned.figures:
            if figure.rejected:
                say(f"{op}, {figure.tokens} tokens, {figure.impl}: {figure.rejected}")


def _rows(op: str, tuned: TunedOp) -> Iterator[tuple[str, ...]]:
    figures = {(figure.tokens, figure.impl): figure for figure in tuned.figures}
    for row in tuned.rows:
        default = figures.get((row.up_to, tuned.default))
        chosen = default if row.impl == KEEP_DEFAULT else figures.get((row.up_to, row.impl))
        yield (
            op,
            tuned.default,
            str(row.up_to),
            row.impl,
            _us(chosen),
            "-" if chosen is None or chosen.low is None else f"{chosen.low:.1f}-{chosen.high:.1f}",
            _us(default),
            "-" if chosen is None or chosen.ratio is None else f"{chosen.ratio:.2f}",
        )


def _us(figure: Figure | None) -> str:
    return "-" if figure is None or figure.us is None else f"{figure.us:.1f}"
