"""Engines with real weights; each run is made once and shared by tests."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prose
import pytest
from engine_run import BIND, STOCK, cores
from engines import IN_ONE_PROCESS, REFERENCE, VENDOR, Once, Result

import envs

PLUGINS = Path(__file__).parent / "plugins"

SMOLLM2, GEMMA, MINILM = "SmolLM2-135M-Instruct", "gemma-3-270m", "all-MiniLM-L6-v2"

PLANS: dict[str, dict[str, str]] = {
    "stock": STOCK,
    "shipped": {},
    "reference": REFERENCE,
    "vendor": VENDOR,
}
"""Name -> variables."""

LIMIT = 1500.0
"""Seconds for one engine: compiling, and vLLM's fp8 products on a CPU, take minutes."""

Model = Callable[[str], Path]
Scored = Callable[..., Result]
True_ = Callable[..., list[float]]
Record = Callable[[str, object], None]


@pytest.fixture(scope="session")
def model() -> Model:
    """`model(name)`: the folder of a real model, fetched and converted by `nox -s real`."""
    return envs.real_model


def own_core() -> int:
    """A core for the engines of this pytest-xdist worker; workers run at the same time."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return cores()[int(worker) % len(cores())]


@pytest.fixture(scope="session")
def scored(model: Model, once: Once) -> Scored:
    """`scored(name, plan, eager=True, dtype="bfloat16", …)`: that engine's result on the prose.
    `label` identifies other arguments: `folder` (a checkpoint), options of `prose.job`,
    VARIABLES."""

    def answer(
        name: str,
        plan: str,
        *,
        eager: bool = True,
        dtype: str = "bfloat16",
        label: str = "",
        folder: Path | None = None,
        **more: Any,
    ) -> Result:
        variables = {key: more.pop(key) for key in list(more) if key.isupper()}
        job = prose.job(folder or model(name), eager=eager, dtype=dtype, **more)
        mode = "eager" if eager else "compiled"
        variables = {**IN_ONE_PROCESS, BIND: str(own_core()), **PLANS[plan], **variables}
        kept = f"{name}-{plan}-{mode}-{dtype}-{label}"
        return once(kept, job, timeout=LIMIT, VLLM_FL_DISPATCH_DEBUG="1", **variables)

    return answer


@pytest.fixture(scope="session")
def true(model: Model, tmp_path_factory: pytest.TempPathFactory) -> True_:
    """`true(name)`: float32 log-probabilities of the same tokens from transformers; `true(name,
    label, change)`: after `change(model)`."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # common to all workers

    def computed(
        name: str, label: str = "", change: Callable[[Any], None] | None = None
    ) -> list[float]:
        file = folder / f"true-{name}-{label}.json"
        with envs.locked(file):
            if not file.exists():
                file.write_text(json.dumps(prose.truth(model(name), change)))
        found: list[float] = json.loads(file.read_text())
        return found

    return computed


def own_epsilon(epsilon: str) -> dict[str, str]:
    """Variables of a plan with norms that use this epsilon, without verification at startup."""
    return {
        "VLLM_FL_PLUGIN_MODULES": "own_epsilon",
        "PYTHONPATH": str(PLUGINS),
        "OWN_EPSILON": epsilon,
        "VLLM_FL_PER_OP": "rms_norm=vendor:ownepsilon",
        "VLLM_FL_PREFLIGHT": "off",  # it would be reported and disabled
    }


def record(to: Record, engine: str, plan: str, ours: Result, stock: Result, true: Any) -> None:
    """Record the rows of stock and this plan for the table at the end of a run."""
    for name, result in (("stock", stock), (plan, ours)):
        logps = prose.logps(result)
        same = sum(a == b for a, b in zip(result["tokens"], stock["tokens"], strict=True))
        parts = (
            f"{engine} {name}",
            f"perplexity {math.exp(-statistics.fmean(logps)):.3f}",
            f"to float32 truth: {prose.distance(logps, true)}",
            f"to stock: {prose.distance(logps, prose.logps(stock))}",
            f"{same} of {len(stock['tokens'])} answers are stock's",
        )
        to("seen", " | ".join(parts))


def assert_it_ran(ours: Result, *ops: str) -> None:
    """Nothing was disabled, and the plan's implementation computed each of these ops."""
    (report,) = ours["report"]
    assert report["demotions"] == {}
    for op in ops:
        assert report["calls"][op].get(report["ops"][op]["impl"]), (op, report["calls"])
