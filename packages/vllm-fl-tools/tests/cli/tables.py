"""Tables with made-up figures, in the format of `vllm-fl tune`."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_fl.plugins.registry import known_contracts
from vllm_fl_tools.engine.tuning_table import KEEP_DEFAULT, Figure, Row, Tuned, TunedOp

TOKENS = tuple(2**n for n in range(14))
IMPLS = ("flagos", "stock", "vendor.cuda", "vendor.liger")
WRONG = "wrong: element (3, 517) is 0.7421, the oracle says 0.7382: 3.1 times the tolerance"
HOLDS = {
    "vllm": "0.26.0",
    "device": "NVIDIA H200",
    "distributions": {"torch": "2.11.0+cu130", "triton": "3.6.0", "vllm-fl-cuda": "0.1.0"},
}


def tuned(
    random_: random.Random, tokens: Sequence[int] = TOKENS, impls: Sequence[str] = IMPLS
) -> TunedOp:
    """One op: launch time plus time by bytes; rows by the promotion rule."""
    default, bytes_per_token = impls[1], random_.choice((4096, 16384, 49152))
    traits = {impl: (random_.uniform(2.5, 9), random_.uniform(0.35, 0.9)) for impl in impls}
    figures, rows = [], []
    for size in tokens:
        times = {}
        for impl, (launch, share) in traits.items():
            moved = size * bytes_per_token / 4.0e6  # µs at 4 TB/s
            times[impl] = max(launch, moved / share) * random_.uniform(0.99, 1.01)
        winner, best = KEEP_DEFAULT, 1.02
        for impl, us in times.items():
            if impl == impls[-1] and size == 16:
                figures.append(Figure(size, impl, rejected=WRONG))
                continue
            ratio = times[default] / us
            spread = random_.uniform(0.005, 0.08)
            low, high = us * (1 - spread), us * (1 + spread)
            compared = {} if impl == default else {"ratio": ratio, "ratio_low": ratio * 0.99}
            figures.append(Figure(size, impl, us, low, high, 40, **compared))
            if impl != default and ratio >= best and ratio * 0.99 > 1:
                winner, best = impl, ratio
        if rows and rows[-1].impl == winner:
            rows.pop()
        rows.append(Row(size, winner))
    return TunedOp(default, tuple(rows), tuple(figures))


def table(
    ops: Iterable[str] | Mapping[str, TunedOp] | None = None, seed: int = 1, **fields: Any
) -> Tuned:
    """A table of these ops; figures are made up for plain names. Default: all with a contract."""
    source = random.Random(seed)
    names = known_contracts().contracts if ops is None else ops
    whole = Tuned(
        holds=HOLDS,
        mode="compiled",
        dtype="bfloat16",
        sizes={"hidden": 4096, "intermediate": 12288, "heads": 32, "kv_heads": 8},
        model="Qwen/Qwen3-8B",
        date="2026-11-22T12:00:00+00:00",
        seconds=612.5,
        ops=ops if isinstance(ops, Mapping) else {name: tuned(source) for name in names},
    )
    return dataclasses.replace(whole, **fields)


def printed(what: Tuned) -> dict[str, Any]:
    """The output of `vllm-fl tune --json` for it."""
    return {"schema": 1, "table": dataclasses.asdict(what)}


def written(path: Path, what: Tuned) -> str:
    path.write_text(json.dumps(printed(what)), encoding="utf-8")
    return str(path)
