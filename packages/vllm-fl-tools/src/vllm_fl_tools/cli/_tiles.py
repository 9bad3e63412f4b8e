"""`vllm-fl tune --tiles`: tiles for vLLM's Triton kernel of experts, in vLLM's own format."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fl.cli.common import UsageError, print_table, say

if TYPE_CHECKING:
    from vllm_fl.contracts import OpSpec

    from ..engine.tiles import Chosen
    from ..integration.experts import Experts
    from ._tuning import Subject

__all__ = ["experts_of", "search", "shown", "told", "write"]

SECONDS = 110.0
"""After which no further tiles are tried."""


def experts_of(subject: Subject) -> Experts:
    """The experts that tiles are searched for.

    Raises:
        UsageError: the model has none that vLLM's Triton kernel serves here.
    """
    from ..integration.experts import OP, Experts

    found = Experts.of(subject.sizes, subject.dtype)
    if subject.device.type != "cuda":
        raise UsageError("--tiles: they are of vLLM's Triton kernel, which serves no CPU")
    if subject.plan is None or subject.quantised:
        raise UsageError("--tiles: it is for experts of a --model that are not quantised")
    if found is None or OP in subject.absent:
        raise UsageError("--tiles: the model has no routed experts")
    return found


def search(
    experts: Experts,
    subject: Subject,
    contract: OpSpec,
    over: Callable[[str], AbstractContextManager[None]],
    clock: Callable[[], float],
) -> dict[int, Chosen]:
    """What vLLM shall take, by the number of tokens; says how it goes.

    Args:
        experts: the model's.
        subject: what is tuned for.
        contract: of the op.
        over: who limits how long a call may take.
        clock: what calls are timed with, seconds.
    """
    from ..engine.tiles import OWN, Search, Tiles, label
    from ..engine.timing import Measured
    from ..engine.tuning import Contender, OpTuning

    largest = subject.largest
    tuning = OpTuning(
        experts.spec(contract, subject.device),
        (),
        OWN,
        subject.mode,
        subject.dtype,
        subject.device,
        experts.sizes(largest),
        seed=random.SystemRandom().randrange(1 << 32),
        clock=clock,
        over=over,
        traced=frozenset(),
        thorough=False,
    )

    def measure(tokens: int, tiles: Sequence[Tiles]) -> Measured:
        own = Contender(OWN, (experts.form(experts.own(tokens)),), bare=True)
        others = [Contender(label(one), (experts.form(one),), bare=True) for one in tiles]
        tuning.contenders = [own, *others]
        began = time.monotonic()
        found = tuning.measure(tokens)
        if not found.is_settled:
            tuning.measure_again(found)
        tuning.forget_calls()
        ratio = found.ratio(found.winner)
        told = f"{found.winner}, {ratio:.2f} times as fast" if ratio else "vLLM's own stay"
        told = f"tiles for {tokens} tokens: {told}, of {len(tiles)}"
        say(f"        {told}; {time.monotonic() - began:.0f} s", error=True)
        return found

    found = Search(experts.own, measure, SECONDS).run(largest)
    tuning.forget()
    spent = sorted(tuning.phases.seconds.items(), key=lambda phase: -phase[1])
    told = ", ".join(f"{name} {seconds:.0f}" for name, seconds in spent if seconds >= 0.5)
    say(f"        seconds for tiles: {told or 'none'}", error=True)
    return found


def write(experts: Experts, folder: str, found: Mapping[int, Chosen]) -> Path:
    """Write vLLM's file; where it is. Raises OSError."""
    return experts.write(Path(folder), {tokens: one.tiles for tokens, one in found.items()})


def shown(path: Path, found: Mapping[int, Chosen]) -> None:
    """Print what was found, and how an engine is given it."""
    from ..engine.tiles import label

    headings = ("tokens", "tiles", "µs", "vLLM's µs", "ratio", "tried")
    rows: Iterator[tuple[str, ...]] = (
        (str(n), label(one.tiles), _us(one.us), _us(one.own_us), _us(one.ratio, 2), str(one.tried))
        for n, one in found.items()
    )
    print_table(headings, [*rows])
    entries = found.items()
    if idle := [str(n) for n, one in entries if not (one.tried or one.cut_short)]:
        say(f"Not measured at {', '.join(idle)} tokens: no others won at the sizes beside them.")
    if cut := [str(n) for n, one in entries if one.cut_short]:
        say(f"Not all was tried at {', '.join(cut)} tokens: the time was over.")
    say(f"Any vLLM takes {path} with VLLM_TUNED_CONFIG_FOLDER={path.parent}.")


def told(path: Path, found: Mapping[int, Chosen]) -> dict[str, Any]:
    """The same for programs."""
    entries = {
        str(tokens): {
            "tiles": dict(one.tiles),
            "us": one.us,
            "own_us": one.own_us,
            "ratio": one.ratio,
            "tried": one.tried,
            "cut_short": one.cut_short,
        }
        for tokens, one in found.items()
    }
    return {"path": str(path), "entries": entries}


def _us(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
