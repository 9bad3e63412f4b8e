"""Mistakes that kernels for mixtures of experts make: the contract's samples tell each one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_fl.contracts import contracts
from vllm_fl_ops.contracts import fused_experts as module

SPEC = contracts()["fused_experts"]
Call = dict[str, Any]


def with_other(**others: Callable[[Call], Any]) -> Callable[..., torch.Tensor]:
    """The op on other arguments: parameter -> what it gets instead."""

    def mutant(*args: Any) -> torch.Tensor:
        call = dict(zip(SPEC.parameters, args, strict=True))
        return SPEC.oracle(**call | {name: other(call) for name, other in others.items()})

    return mutant


def rows(name: str) -> Callable[[Call], Any]:
    """A tensor read as if its rows had no gaps."""

    def packed(call: Call) -> torch.Tensor:
        x: torch.Tensor = call[name]
        return torch.as_strided(x, x.shape, (x.shape[1], 1))

    return packed


def swapped_halves(call: Call) -> torch.Tensor:
    return torch.cat(call["w13"].chunk(2, dim=1)[::-1], dim=1)


def halves_for_pairs(call: Call) -> torch.Tensor:
    w13 = call["w13"]
    pairs = call["activation"] == "swigluoai"
    return torch.cat((w13[:, ::2], w13[:, 1::2]), dim=1) if pairs else w13


def another(name: str, instead: str) -> Callable[[Call], str]:
    return lambda call: instead if call["activation"] == name else call["activation"]


def late_weights(*args: Any) -> torch.Tensor:
    call = dict(zip(SPEC.parameters, args, strict=True))
    return SPEC.oracle(**call | {"apply_router_weight_on_input": False})


def whole_bias(*args: Any) -> torch.Tensor:
    call = dict(zip(SPEC.parameters, args, strict=True))
    bias = call["w2_bias"]
    if bias is None:
        return SPEC.oracle(*args)
    return SPEC.oracle(**call | {"w2_bias": None}) + bias[call["topk_ids"].long()].double().sum(1)


MUTANTS = {
    "swapped halves of w13": with_other(w13=swapped_halves),
    "halves where pairs are": with_other(w13=halves_for_pairs),
    "no weights": with_other(topk_weights=lambda c: torch.ones_like(c["topk_weights"])),
    "weights of sum 1": with_other(
        topk_weights=lambda c: c["topk_weights"] / c["topk_weights"].sum(-1, keepdim=True)
    ),
    "weights of other slots": with_other(topk_weights=lambda c: c["topk_weights"].flip(-1)),
    "weights on the result, not on the input": late_weights,
    "the first expert alone": with_other(
        topk_weights=lambda c: c["topk_weights"] * (torch.arange(c["topk_ids"].shape[1]) < 1)
    ),
    "the last row of w2 lost": with_other(
        w2=lambda c: torch.cat((c["w2"][:, :-1], 0 * c["w2"][:, -1:]), dim=1)
    ),
    "w2 transposed, where that fits": with_other(
        w2=lambda c: c["w2"].mT if c["w2"].shape[1] == c["w2"].shape[2] else c["w2"]
    ),
    "silu for gelu": with_other(activation=another("gelu", "silu")),
    "tanh for erf": with_other(activation=another("gelu", "gelu_tanh")),
    "erf for tanh": with_other(activation=another("gelu_tanh", "gelu")),
    "silu for swigluoai": with_other(activation=another("swigluoai", "silu")),
    "no map of experts": with_other(
        expert_map=lambda c: None, topk_ids=lambda c: c["topk_ids"] % len(c["w13"])
    ),
    "experts of other ranks by row 0": with_other(
        expert_map=lambda c: None if c["expert_map"] is None else c["expert_map"].clamp(min=0)
    ),
    "no bias of w13": with_other(w13_bias=lambda c: None),
    "no bias of w2": with_other(w2_bias=lambda c: None),
    "a bias of w2 that no weight multiplies": whole_bias,
    "strides of hidden_states": with_other(hidden_states=rows("hidden_states")),
    "strides of topk_weights": with_other(topk_weights=rows("topk_weights")),
    "strides of topk_ids": with_other(topk_ids=rows("topk_ids")),
}


def is_told(mutant: Callable[..., torch.Tensor], dtype: torch.dtype) -> bool:
    bound = SPEC.tolerance(dtype)
    for sample in SPEC.samples(dtype, torch.device("cpu")):
        got, want = mutant(*sample.args).to(dtype).double(), SPEC.oracle(*sample.args)
        if ((got - want).abs() > bound.atol * sample.scale + bound.rtol * want.abs()).any():
            return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_mistake_is_told_and_the_op_itself_is_not(dtype: torch.dtype) -> None:
    assert not is_told(SPEC.oracle, dtype)
    assert [name for name, mutant in MUTANTS.items() if not is_told(mutant, dtype)] == []


@pytest.mark.parametrize(("number", "wrong"), [("LIMIT", 100.0), ("ALPHA", 1.0)])
def test_other_numbers_of_swigluoai_are_told(
    monkeypatch: pytest.MonkeyPatch, number: str, wrong: float
) -> None:
    oracle = SPEC.oracle

    def other(*args: Any) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(module, number, wrong)
            return oracle(*args)

    assert is_told(other, torch.bfloat16)
