"""Problems that `check` names beyond the contracts' own bad inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_fl.contracts import contracts

X = torch.ones(4, 8)
W = torch.ones(8)
Q = torch.ones(4, 2, 8)
K = torch.ones(4, 1, 8)
T = torch.ones(16, 4)
P = torch.arange(4)


@pytest.mark.parametrize(
    ("op", "args", "argument", "problem"),
    [
        ("silu_and_mul", (torch.ones(2, 7),), "x", "must have an even last dimension, got 7"),
        ("silu_and_mul", (3,), "x", "must be a torch.Tensor, got int"),
        (
            "gelu_and_mul",
            (X.double(),),
            "x",
            "must be float32, float16 or bfloat16, got torch.float64",
        ),
        ("rms_norm", (torch.tensor(1.0), None, None, 1e-6), "x", "at least one dimension"),
        ("rms_norm", (X, None, X, 1e-6), "weight", "the shape (hidden,) = (8,), got (4, 8)"),
        ("rms_norm", (X, None, W.half(), 1e-6), "weight", "x's dtype torch.float32 or float32"),
        ("rms_norm", (X, None, W, True), "epsilon", "must be a number, got bool"),
        ("rms_norm", (X, None, W, float("nan")), "epsilon", "must be finite"),
        ("rms_norm", (X, None, W, 0.0, True), "variance_size", "must be an int or None, got bool"),
        ("rotary_embedding", (Q, K.half(), T, T, P), "key", "query's dtype torch.float32"),
        ("rotary_embedding", (Q, K[0], T, T, P), "key", "(4, kv_heads, 8) like query, got (1, 8)"),
        ("rotary_embedding", (Q, K, T.half(), T, P), "cos", "query's dtype torch.float32"),
        ("rotary_embedding", (Q, K, T[:, :0], T, P), "cos", "from 1 to half of query's head_size"),
        ("rotary_embedding", (Q, K, T, T[:8], P), "sin", "cos's shape (16, 4), got (8, 4)"),
        ("rotary_embedding", (Q, K, T, T, P.to(torch.int16)), "position_ids", "int64 or int32"),
        ("rotary_embedding", (Q, K, T, T, P[None]), "position_ids", "(tokens,) = (4,), got (1, 4)"),
        ("rotary_embedding", (Q, K, T, T, P + 13), "position_ids", "0 to 15, got 13 to 16"),
        ("rotary_embedding", (Q, K, T, T, P, "no"), "rotary_interleaved", "True or False, got str"),
    ],
)
def test_problem(op: str, args: tuple[Any, ...], argument: str, problem: str) -> None:
    verdict = contracts()[op].check(*args)
    assert verdict is not None
    assert verdict[0] == argument
    assert problem in verdict[1]


def test_positions_of_a_meta_tensor_are_not_looked_at() -> None:
    args = (value.to("meta") for value in (Q, K, T, T, P))
    assert contracts()["rotary_embedding"].check(*args) is None
