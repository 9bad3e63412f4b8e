"""A mixture of experts with weights that vLLM's CPU build packs for its kernel only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import STOCK, Job, largest_difference
from engines import (
    IN_ONE_PROCESS,
    assert_near_transformers,
    assert_same_bits,
    batches,
    run,
)

from vllm_fl.plugins.registry import known_contracts

pytestmark = pytest.mark.slow

LAYERS = 2

OTHERS = ";".join(f"{op}=stock" for op in known_contracts().contracts if op != "fused_experts")

KERNEL, PACKING = "_C::cpu_fused_moe", "_C::prepack_moe_weight"


@pytest.fixture(scope="module")
def mixture(model: Callable[[str], Path]) -> Path:
    return model("qwen3_moe")


def served(mixture: Path, *, eager: bool = True, **variables: str) -> dict[str, Any]:
    """An engine in float32, so its logits are close to other torch models."""
    job = Job(str(mixture), batches(), eager=eager, options={"dtype": "float32"})
    return run(job, **IN_ONE_PROCESS, VLLM_FL_DISPATCH_DEBUG="1", **variables)


def served_by(tokens: str, mixture: Path, *, eager: bool = True) -> dict[str, Any]:
    """An engine with this order for the experts and stock for every other op."""
    return served(mixture, eager=eager, VLLM_FL_PER_OP=f"{OTHERS};fused_experts={tokens}")


@pytest.fixture(scope="module")
def stock(mixture: Path) -> dict[str, Any]:
    return served(mixture, **STOCK)


def test_a_vendor_that_calls_the_kernel_leaves_it_and_its_weights_to_vllm(
    mixture: Path, stock: dict[str, Any]
) -> None:
    ours = served_by("vendor:cpu|reference", mixture)
    assert_same_bits(stock, ours)
    assert_near_transformers(mixture, stock)  # control for the test below
    (report,) = ours["report"]
    left = {"left": "vendor.cpu calls it itself"}
    assert {KERNEL: left, PACKING: left}.items() <= report["operators"]["fused_experts"].items()


@pytest.mark.parametrize(
    "eager",
    [pytest.param(True, id="eager"), pytest.param(False, id="compiled")],
)
def test_experts_in_torch_get_weights_that_are_not_packed(mixture: Path, eager: bool) -> None:
    ours = served_by("reference", mixture, eager=eager)
    (report,) = ours["report"]
    assert report["ops"]["fused_experts"]["impl"] == "reference.torch"
    assert report["calls"]["fused_experts"]["reference.torch"] >= LAYERS * ours["steps"]
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
    worst, magnitude = largest_difference(stock, ours)
    assert 0 < worst < 0.05 * magnitude
