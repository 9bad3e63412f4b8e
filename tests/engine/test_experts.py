"""A mixture of experts with weights that vLLM's CPU build packs for its kernel only."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_model
from engine_run import STOCK, Job
from engines import (
    IN_ONE_PROCESS,
    Model,
    Result,
    assert_near_transformers,
    assert_same_bits,
    batches,
    difference,
    run,
)

from vllm_fl.plugins.registry import known_contracts

pytestmark = pytest.mark.slow

OTHERS = ";".join(f"{op}=stock" for op in known_contracts().contracts if op != "fused_experts")


def served(mixture: Path, *, eager: bool = True, **variables: str) -> Result:
    """An engine in float32, so its logits are close to other torch models."""
    job = Job(str(mixture), batches(), eager=eager, options={"dtype": "float32"})
    return run(job, **IN_ONE_PROCESS, VLLM_FL_DISPATCH_DEBUG="1", **variables)


def served_by(tokens: str, mixture: Path, *, eager: bool = True) -> Result:
    """An engine with this order for the experts and stock for every other op."""
    return served(mixture, eager=eager, VLLM_FL_PER_OP=f"{OTHERS};fused_experts={tokens}")


def test_a_vendor_that_calls_the_kernel_leaves_it_and_its_weights_to_vllm(model: Model) -> None:
    mixture = model("qwen3_moe")
    stock = served(mixture, **STOCK)
    ours = served_by("vendor:cpu|reference", mixture)
    assert_same_bits(stock, ours)
    assert_near_transformers(mixture, stock)  # control for the test below
    (report,) = ours["report"]
    operators = ("_C::cpu_fused_moe", "_C::prepack_moe_weight")
    left = {operator: {"left": "vendor.cpu calls it itself"} for operator in operators}
    assert left.items() <= report["operators"]["fused_experts"].items()


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_experts_in_torch_get_weights_that_are_not_packed(model: Model, eager: bool) -> None:
    mixture = model("qwen3_moe")
    ours = served_by("reference", mixture, eager=eager)
    (report,) = ours["report"]
    assert report["ops"]["fused_experts"]["impl"] == "reference.torch"
    assert report["calls"]["fused_experts"]["reference.torch"] >= 2 * ours["steps"]
    assert not report["fallbacks"] and not report["demotions"]
    assert_near_transformers(mixture, ours)


RULES = {"chunk_gated_delta_rule", "gdn_gating", "recurrent_gated_delta_rule"}
"""Ops covered on every CPU. Convolution is not: on AVX512-BF16 its weights are packed by vLLM."""


def test_the_reference_serves_linear_attention_as_vllms_kernels_do(tmp_path: Path) -> None:
    """Every token uses all experts, so a rounding difference cannot select others."""
    job = Job(str(tiny_model.make(tmp_path, "qwen3_next", num_experts_per_tok=8)), batches())
    orders = {op: "reference" if op in RULES else "stock" for op in known_contracts().contracts}
    per_op = {"VLLM_FL_PER_OP": ";".join(f"{op}={order}" for op, order in orders.items())}
    variables = {**IN_ONE_PROCESS, "VLLM_FL_DISPATCH_DEBUG": "1"}
    stock, ours = run(job, **variables, **STOCK), run(job, **variables, **per_op)
    (report,) = ours["report"]
    assert {report["ops"][op]["impl"] for op in RULES} == {"reference.torch"}
    assert all(report["calls"][op]["reference.torch"] for op in RULES)
    assert not report["fallbacks"] and not report["demotions"]
    # vLLM's kernels round q and k to bfloat16 after normalisation; the reference does not.
    assert 0 < difference(stock, ours) < 0.05
