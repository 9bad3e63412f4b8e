"""A mixture of experts, whose weights vLLM's CPU build packs for its own kernel alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_run import STOCK, Job
from engines import IN_ONE_PROCESS, assert_same_bits, batches, run

from vllm_fl.contracts import contracts

LAYERS = 2

OTHERS = ";".join(f"{op}=stock" for op in contracts() if op != "fused_experts")

KERNEL, PACKING = "_C::cpu_fused_moe", "_C::prepack_moe_weight"


@pytest.fixture(scope="module")
def mixture(model: Callable[[str], Path]) -> Path:
    return model("qwen3_moe")


def served(mixture: Path, *, eager: bool = True, **variables: str) -> dict[str, Any]:
    """An engine in float32, so that what another model of torch's says is near."""
    job = Job(str(mixture), batches(), eager=eager, options={"dtype": "float32"})
    return run(job, **IN_ONE_PROCESS, VLLM_FL_DISPATCH_DEBUG="1", **variables)


def served_by(tokens: str, mixture: Path, *, eager: bool = True) -> dict[str, Any]:
    """One whose experts have this order, while all else is vLLM's own."""
    return served(mixture, eager=eager, VLLM_FL_PER_OP=f"{OTHERS};fused_experts={tokens}")


@pytest.fixture(scope="module")
def stock(mixture: Path) -> dict[str, Any]:
    return served(mixture, **STOCK)


def assert_near_transformers(mixture: Path, answer: dict[str, Any]) -> None:
    """Every logit of the engine is that of Hugging Face's model in float32 on its tokens."""
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    prompts = [prompt for batch in batches() for prompt in batch]
    for prompt, tokens, rows in zip(prompts, answer["tokens"], answer["logits"], strict=True):
        got = torch.tensor(rows)
        with torch.inference_mode():
            want = model(torch.tensor([prompt + tokens])).logits[0]
        # The engine gives none for the first token, which nothing comes before.
        want = want[len(prompt) + len(tokens) - 1 - len(got) : -1]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.slow
def test_a_vendor_that_calls_the_kernel_leaves_it_and_its_weights_to_vllm(
    mixture: Path, stock: dict[str, Any]
) -> None:
    ours = served_by("vendor:cpu|reference", mixture)
    assert_same_bits(stock, ours)
    assert_near_transformers(mixture, stock)  # the control of the test below
    (report,) = ours["report"]
    left = {"left": "vendor.cpu calls it itself"}
    assert {KERNEL: left, PACKING: left}.items() <= report["operators"]["fused_experts"].items()


@pytest.mark.parametrize(
    "eager",
    [pytest.param(True, id="eager"), pytest.param(False, id="compiled", marks=pytest.mark.slow)],
)
def test_experts_in_torch_get_weights_that_are_not_packed(mixture: Path, eager: bool) -> None:
    ours = served_by("reference", mixture, eager=eager)
    (report,) = ours["report"]
    assert report["ops"]["fused_experts"]["impl"] == "reference.torch"
    assert report["calls"]["fused_experts"]["reference.torch"] >= LAYERS * ours["steps"]
    assert not report["fallbacks"] and not report["demotions"]
    assert_near_transformers(mixture, ours)
