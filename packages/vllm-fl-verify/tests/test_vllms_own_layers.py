"""Startup that requires batch invariance, with model layers that no plan replaces."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import small_workers
from children import run_each
from small_workers import HEAD, MODEL

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

START = """
from vllm.model_executor.layers.layernorm import RMSNorm

right_norm = RMSNorm.forward


def by_batch_size(self, x, residual=None):
    found = right_norm(self, x, residual)
    if len(x) >= 256:  # a bit of each row, as of a kernel that adds up in another order there
        first = found if residual is None else found[0]
        first.view(torch.int16).bitwise_xor_(1)
    return found


class Model(Model):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(512, dtype=torch.bfloat16)


if "VARIES" in os.environ:
    RMSNorm.forward = by_batch_size
engines.exchange = lambda what, mine, failure="": [mine]
worker = planned_worker(
    {"VLLM_FL_PREFLIGHT": "verify", "VLLM_FL_REQUIRE": os.environ["REQUIRE"]})
worker.init_device()
worker.load_model()
print(json.dumps(worker.vllm_fl_report()["remarks"]))
worker.shutdown()
"""


def test_vllms_own_norm_with_other_bits_in_large_batches_is_reported() -> None:
    tests = str(Path(small_workers.__file__).parent)
    env = {"CONFIGS": tests, "VLLM_PLUGINS": "fl", "VLLM_FL_PLUGINS": "vllm-fl-ops", "EAGER": "1"}
    cases = [{"REQUIRE": "batch_invariant", "VARIES": "1"}, {"REQUIRE": "batch_invariant"}]
    cases.append({"REQUIRE": "none", "VARIES": "1"})
    bodies = {str(number): (MODEL + START, case) for number, case in enumerate(cases)}
    logs = [*run_each(HEAD, bodies, {**os.environ, **env}).values()]
    varies, right, free = (
        [remark for remark in json.loads(log.splitlines()[-1]) if "batch" in remark] for log in logs
    )
    (found,) = [remark for remark in varies if remark not in right]
    assert found.startswith("rms_norm: vLLM's layers are not batch-invariant: ")
    assert "different bits in batches of 256 and 251" in found
    assert len(right) == 1 and not free
    (line,) = [line for line in logs[0].splitlines() if "WARNING" in line and found in line]
    assert "VLLM_FL_REQUIRE=batch_invariant is set, but " in line
