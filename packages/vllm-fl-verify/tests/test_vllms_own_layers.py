"""Startup that requires batch invariance, with model layers that no plan replaces."""

from __future__ import annotations

import pytest
from small_workers import answers

pytest.importorskip("vllm", reason="vLLM is not installed")

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
    cases = {
        "varies": {"REQUIRE": "batch_invariant", "VARIES": "1"},
        "right": {"REQUIRE": "batch_invariant"},
        "free": {"REQUIRE": "none", "VARIES": "1"},
    }
    answered = answers(START, cases, EAGER="1")
    varies, right, free = (
        [remark for remark in answered[case][0] if "batch" in remark] for case in cases
    )
    (found,) = [remark for remark in varies if remark not in right]
    assert found.startswith("rms_norm: vLLM's layers are not batch-invariant: ")
    assert "different bits in batches of 256 and 251" in found
    assert len(right) == 1 and not free
    log = answered["varies"][1].splitlines()
    (line,) = [line for line in log if "WARNING" in line and found in line]
    assert "VLLM_FL_REQUIRE=batch_invariant is set, but " in line
