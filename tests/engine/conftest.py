"""Real engines on tiny models. A run is made once and shared by the tests that look at it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import STOCK, Job, run

PLUGINS = Path(__file__).parent / "plugins"

OPS = ("gelu_and_mul", "rms_norm", "rotary_embedding", "silu_and_mul")

VARIANTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "stock": (STOCK, {}),
    "stock-native": (STOCK, {"compilation_config": {"custom_ops": ["none"]}}),
    "reference": ({"VLLM_FL_PER_OP": ";".join(f"{op}=reference" for op in OPS)}, {}),
    "vendor": ({"VLLM_FL_PER_OP": ";".join(f"{op}=vendor|reference" for op in OPS)}, {}),
}
"""Name -> environment variables and arguments of vllm.LLM."""

Result = dict[str, Any]
Runner = Callable[..., Result]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model(family)`: the folder of a tiny model with random weights."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: tiny_model.make(folder, family))


@pytest.fixture(scope="session")
def engine(model: Callable[[str], Path]) -> Runner:
    """`engine(family, variant, eager=True)`: what that engine answered, planned and counted.

    It serves a prompt alone and then eight together, greedily, with all logits.
    """

    @cache
    def start(family: str, variant: str, eager: bool = True) -> Result:
        variables, options = VARIANTS[variant]
        job = Job(str(model(family)), batches(), eager=eager, options=options)
        return run(job, VLLM_FL_DISPATCH_DEBUG="1", **variables)

    return start


@pytest.fixture
def plugin() -> Callable[..., dict[str, str]]:
    """`plugin(name)`: the variables under which a module of tests/engine/plugins is loaded."""

    def variables(*names: str) -> dict[str, str]:
        return {"VLLM_FL_PLUGIN_MODULES": ",".join(names), "PYTHONPATH": str(PLUGINS)}

    return variables


def batches() -> list[list[list[int]]]:
    """One prompt alone, then eight of different lengths; none longer than a tiny model's window."""
    prompts = [[(11 * i + 5 * j) % 500 + 3 for j in range(9 + 3 * i)] for i in range(9)]
    return [prompts[:1], prompts[1:]]
