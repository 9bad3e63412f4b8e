"""`vllm-fl bisect` on a real model names a wrong kernel; a correct plan is reported as noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prose
import pytest
from engine_run import BIND
from engines import command, path_of
from real_engines import PLUGINS, SMOLLM2, Model, own_core

pytestmark = pytest.mark.slow

PROMPTS = 16
BIT_EXACT = {"VLLM_FL_PLUGIN_MODULES": "bit_exact", "VLLM_FL_PREFER": "stock"}
ONE_ELEMENT = {
    "VLLM_FL_PLUGIN_MODULES": "one_element",
    "VLLM_FL_PER_OP": "rms_norm=vendor:oneelement",
}


@pytest.fixture
def bisect(model: Model, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`bisect(VARIABLE=…)`: the command's result for the plan of these variables."""
    texts = prose.job(model(SMOLLM2)).scored
    each = len(texts) * prose.TEXT_TOKENS // PROMPTS
    pieces = [text[i : i + each] for text in texts for i in range(0, len(text), each)]
    prompts = tmp_path / "prompts"
    prompts.write_text(json.dumps(pieces))

    def run(**variables: str) -> dict[str, Any]:
        variables |= {**path_of(PLUGINS), BIND: str(own_core())}
        words = ("bisect", "--model", model(SMOLLM2), "--prompts", prompts, "--json")
        done = command(*words, cwd=tmp_path, **variables)
        assert done.returncode in (0, 1), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (found["status"] != "right")
        return found

    return run


@pytest.mark.parametrize(
    "plan", [{}, {"VLLM_FL_PREFER": "vendor"}, BIT_EXACT], ids=["shipped", "vendor", "bit-exact"]
)
def test_a_right_plan_is_noise(plan: dict[str, str], bisect: Callable[..., dict[str, Any]]) -> None:
    found = bisect(**plan)
    assert found["status"] == "right", found
    assert 0 < found["times"] <= 1.5 and found["engines"] == 3


def test_a_norm_that_is_wrong_in_few_elements_is_named(
    bisect: Callable[..., dict[str, Any]],
) -> None:
    found = bisect(**ONE_ELEMENT)
    (culprit,) = found["culprits"]
    assert culprit["what"] == ["rms_norm (vendor.oneelement)"] and found["status"] == "found"
    assert culprit["times"] < 1.6, "the median hardly changes"
