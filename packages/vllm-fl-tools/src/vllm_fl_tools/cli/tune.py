"""`vllm-fl tune`: measure which implementation of each op is the fastest, and write a table.

Nothing else measures: an engine reads a table, and never makes one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import ModelSizes
from vllm_fl.contracts.binding import Binding
from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration.targets import all_bindings
from vllm_fl.text import closest, quote
from vllm_fl_ops.contracts.rules import RULES

from ..engine.tuned import DEFAULT, STOCK, Figure, Tuned, TunedOp
from ..integration.parts import without
from ..integration.threads import worker_threads
from . import _accept, _profile
from ._engine import asked_of, takes_vllms
from ._options import ReportFile, check_known, counts, device_of, positive_seconds
from ._show import UsageError, print_json, print_table, say
from ._tuning import Subject, Work
from ._watch import INTERRUPTED, ended_by_signal

if TYPE_CHECKING:
    import torch

DEFAULT_FILE = "vllm-fl-table.yaml"

LARGEST = 8192
"""The largest batch, in tokens, where no model's configuration tells it."""

TIMEOUT = 300.0
"""Seconds that one call may take, with what is compiled for it."""

MORE_SIZES = ("max_position",)
"""What `--sizes` takes beside the names of rules."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For which model, what of it, where, and where the table goes."""
    takes_vllms(parser)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model", metavar="DIR", help="the model's folder, read as vLLM does; weights are not"
    )
    model.add_argument(
        "--sizes",
        metavar="NAME=N,…",
        help="a model's sizes on one rank in its place (hidden=1024,heads=16); an op whose sizes "
        "are not all told is left out",
    )
    parser.add_argument("--op", action="append", metavar="OP", help="may be repeated")
    parser.add_argument(
        "--impl",
        action="append",
        metavar="ID",
        help="only these beside the default, stock for vLLM's own form; may be repeated",
    )
    parser.add_argument(
        "--mode",
        choices=("eager", "compiled"),
        default="compiled",
        help="how the engine will run the model; default: compiled, as vLLM's is",
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="default: the model's, else bfloat16")
    parser.add_argument("--device", help="as torch names it; default: cuda or npu, else cpu")
    parser.add_argument(
        "--tokens",
        metavar="N,…",
        help="rows of a call, these alone; default: some up to the largest batch "
        f"({LARGEST} where no model tells it), then between those whose winners differ",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"the table; a file there is replaced. Default: {DEFAULT_FILE}, which is not",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=positive_seconds,
        default=TIMEOUT,
        help=f"give up a call that takes longer; default: {TIMEOUT:.0f}",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="measure no op: profile the steps of an engine with vLLM's arguments, and print which "
        "op takes which share of them; of the other options it takes --model, --batch and --json",
    )
    parser.add_argument(
        "--batch",
        metavar="N,…",
        help="of --profile: how many sequences decode together, one table each; default: 1",
    )
    _accept.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Exit 1 when the table cannot be written, nothing was measured, or it is not accepted."""
    if arguments.profile:
        return _profile.run(arguments)
    if arguments.accept is not None:
        return _accept.run(arguments)
    if arguments.more and arguments.model is None:
        more = " ".join(arguments.more)
        raise UsageError(f"unrecognized arguments: {more} (vLLM's are for measuring a --model)")
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
    check_known("impl", arguments.impl, {*installed, STOCK})
    bindings = all_bindings(snapshot)
    sizes = _sizes(arguments.sizes, bindings.values()) if arguments.sizes else None
    device = device_of(arguments.device)
    subject = _subject(arguments, sizes, asked, bindings, device)
    with ExitStack() as stack:
        stack.enter_context(_threads_of_a_worker(device))
        stack.enter_context(ended_by_signal())
        work = Work(manager, subject, bindings, ops=arguments.op, impls=arguments.impl)
        try:
            with redirect_stdout(sys.stderr):  # a kernel's own output is no result
                work.run(arguments.timeout)
            table = work.table()
            with ReportFile(str(out), "--out") as file:
                file.write(table.text)
        except KeyboardInterrupt:
            told = f"after {work.done} of {work.units} measurements; no table was written"
            say(f"vllm-fl: interrupted {told}", error=True)
            return INTERRUPTED
        except OSError as error:
            why = f"{error.filename or out} cannot be written: {error.strerror or error}"
            say(f"vllm-fl: {why}", error=True)
            return 1
    if arguments.json:
        print_json(
            path=str(out),
            remarks=[*work.remarks, *_of_device(work.subject, table)],
            measurements=work.done,
            table=asdict(table),
        )
    else:
        done = f"{work.done} measurements."
        show(str(out), table, [*work.remarks, *_of_device(work.subject, table), done])
    return 0 if table.ops else 1


def _out(path: str | None) -> Path:
    """Where the table goes; known to be writable before the work starts."""
    if path is None and os.path.lexists(DEFAULT_FILE):
        raise UsageError(
            f"{DEFAULT_FILE} is there already; --out {DEFAULT_FILE} replaces it, and --out with "
            "another name leaves it"
        )
    with ReportFile(path or DEFAULT_FILE, "--out") as file:
        return file.path


def _sizes(text: str, bindings: Iterable[Binding]) -> ModelSizes:
    """The sizes of `--sizes`; those that it does not name are not told."""
    own = {field.name for field in fields(ModelSizes)}
    rules = {rule.name for rule in (*RULES, *(r for binding in bindings for r in binding.sizes))}
    known = {*rules, *MORE_SIZES}
    told: dict[str, float] = {}
    for item in text.split(","):
        name, equals, value = (word.strip() for word in item.partition("="))
        if not equals or name not in known:
            listed = ", ".join(sorted(known))
            raise UsageError(
                f"--sizes: {item.strip()!r} is no NAME=NUMBER of a size.{closest(name, known)} "
                f"Known: {listed}."
            )
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        whole = number.is_integer()
        if not 0 < number < 2**40 or not (whole or name == "epsilon" or name not in own):
            raise UsageError(f"--sizes {name}={value}: expected a positive number")
        told[name] = int(number) if whole else number
    mine: dict[str, Any] = {name: value for name, value in told.items() if name in own}
    return ModelSizes(**mine, more={n: told.get(n) for n in sorted(rules - own)})


def _subject(
    arguments: argparse.Namespace,
    sizes: ModelSizes | None,
    asked: tuple[int, ...],
    bindings: Mapping[str, Binding],
    device: torch.device,
) -> Subject:
    """The model, from its folder or its sizes."""
    import torch

    named = _dtype(arguments.dtype)
    if sizes is not None:
        tokens = asked or _powers(LARGEST)
        dtype = named or torch.bfloat16
        absent = frozenset(op for op, binding in bindings.items() if _is_left_out(binding, sizes))
        captured, plan = None, None
        ordered: tuple[str, ...] = ()
    else:
        if arguments.dtype is not None:
            arguments.more += ["--dtype", arguments.dtype]
        # Its sizes reach what either way of serving takes at once.
        (engine,) = asked_of(arguments, offline=True)
        if engine.aside:
            raise UsageError(f"vLLM runs without vllm-fl: {engine.aside}")
        from vllm_fl.integration.planning import plan_for

        # The default is without a table, and without what is measured for such devices already.
        facts = engine.facts
        facts = replace(facts, settings=facts.settings.without_table("it is measured"))
        ordered = (*facts.ordered.settings.held_by_device,)
        facts = replace(facts, device="")
        plan = plan_for(facts)
        assert facts.sizes is not None and facts.dtype is not None  # it has a model
        sizes, dtype = facts.sizes, facts.dtype
        absent = facts.absent | without(engine, bindings)
        batches = facts.captured if arguments.mode == "compiled" else ()
        tokens = asked or tuple(sorted({*_powers(sizes.tokens[-1]), *batches}))
        captured = max(batches, default=0)
    return Subject(
        arguments.model or arguments.sizes,
        replace(sizes, tokens=(1, max(tokens))),
        tokens,
        arguments.mode,
        dtype,
        device,
        absent,
        captured,
        plan,
        first=None if asked else _first(tokens, captured or 0),
        ordered=ordered,
    )


def _of_device(subject: Subject, table: Tuned) -> Iterator[str]:
    """What the reader must know of a default that an engine on this device does not have."""
    if ops := [op for op in subject.ordered if op in table.ops]:
        yield (
            f"Without a table, engines on this device run orders that are shipped for it, of "
            f"{', '.join(ops)}. The default here is without these, and so is what a table saves."
        )


def _is_left_out(binding: Binding, sizes: ModelSizes) -> bool:
    """Whether `--sizes` tells no size of an op's own, of those that call others' operators: they
    would keep these from being ordered by range of sizes."""
    every = {field.name for field in fields(ModelSizes)}
    own = [rule.name for rule in binding.sizes if rule.name not in every]
    return binding.calls_operators and not any(sizes.more.get(name) for name in own)


@contextmanager
def _threads_of_a_worker(device: torch.device) -> Iterator[None]:
    """In the block, a CPU computes with as many threads as in an engine, and says how many; the
    host of another device with few.

    Raises:
        UsageError: vLLM cannot tell, since an engine would not start with these variables.
    """
    import torch

    from vllm_fl_verify.preflight import host_threads

    if device.type != "cpu":
        with host_threads(device):
            yield
        return
    own, why = torch.get_num_threads(), "as torch's default: vLLM binds no threads here"
    try:
        number = worker_threads()
    except ImportError as error:
        number, why = None, f"as torch's default: vLLM does not tell ({quote(error)})"
    except Exception as error:
        raise UsageError(
            f"vLLM cannot tell how many threads its worker has: {quote(error)}. Set "
            "VLLM_CPU_OMP_THREADS_BIND as for the engine; nothing was measured"
        ) from error
    if number is not None:
        why = "as vLLM's worker does"
    threads = number or own
    say(f"vllm-fl: computes with {threads} thread{'s' * (threads > 1)}, {why}", error=True)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(own)


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"--dtype {name}: expected bfloat16, float16 or float32")
    return found


def _first(tokens: Sequence[int], captured: int) -> tuple[int, ...]:
    """Of these sizes those that differ in kind: every third power of two, the largest batch of
    which a graph is captured, and the largest."""
    eighths = {n for n in tokens if n.bit_count() == 1 and n.bit_length() % 3 == 1}
    return tuple(sorted({*eighths, *({captured} & {*tokens}), tokens[-1]}))


def _powers(largest: int) -> tuple[int, ...]:
    """The powers of two up to the largest batch, and that."""
    return tuple(sorted({1 << n for n in range(largest.bit_length())} | {largest}))


def show(path: str, table: Tuned, remarks: Iterable[str] = ()) -> None:
    """Print the result of a run."""
    say(path)
    if table.ops:
        say(f"{table.mode}, {table.dtype}, {table.holds['device']}; {table.seconds:.0f} s")
        headings = ("op", "default", "up to", "choice", "µs", "quartiles", "default's µs", "ratio")
        print_table(headings, [row for op in table.ops.items() for row in _rows(*op)])
    else:
        say("Nothing was measured.")
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
        chosen = default if row.impl == DEFAULT else figures.get((row.up_to, row.impl))
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
