"""Linear attention and its states, which vLLM's CPU build computes by kernels of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_run import STOCK, Job, largest_difference
from engines import IN_ONE_PROCESS, batches, run
from tiny_model import make

from vllm_fl.contracts import contracts

RULES = {"chunk_gated_delta_rule", "gdn_gating", "recurrent_gated_delta_rule"}
"""The ops that every CPU reaches: those of AVX512-BF16 convolve with weights that vLLM packed."""

OTHERS = ";".join(f"{op}=stock" for op in contracts() if op not in RULES)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token takes all experts: none is chosen otherwise for a difference in rounding."""
    return make(tmp_path_factory.mktemp("models"), "qwen3_next", num_experts_per_tok=8)


def served(hybrid: Path, **variables: str) -> dict[str, Any]:
    job = Job(str(hybrid), batches())
    return run(job, **IN_ONE_PROCESS, VLLM_FL_DISPATCH_DEBUG="1", **variables)


@pytest.mark.slow
def test_the_reference_serves_linear_attention_as_vllms_kernels_do(hybrid: Path) -> None:
    stock = served(hybrid, **STOCK)
    per_op = ";".join(f"{op}=reference" for op in sorted(RULES))
    ours = served(hybrid, VLLM_FL_PER_OP=f"{OTHERS};{per_op}")
    (report,) = ours["report"]
    assert {report["ops"][op]["impl"] for op in RULES} == {"reference.torch"}
    assert all(report["calls"][op]["reference.torch"] for op in RULES)
    assert not report["fallbacks"] and not report["demotions"]
    # vLLM's kernels round q and k to bfloat16 once they are normed, and the reference does not.
    worst, magnitude = largest_difference(stock, ours)
    assert 0 < worst < 0.05 * magnitude
