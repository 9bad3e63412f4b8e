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
    ("op", "args", "argument"),
    [
        ("silu_and_mul", (torch.ones(2, 7),), "x"),
        ("silu_and_mul", (3,), "x"),
        ("gelu_and_mul", (X.double(),), "x"),
        ("rms_norm", (torch.tensor(1.0), None, None, 1e-6), "x"),
        ("rms_norm", (X, None, X, 1e-6), "weight"),
        ("rms_norm", (X, None, W.half(), 1e-6), "weight"),
        ("rms_norm", (X, None, W, True), "epsilon"),
        ("rms_norm", (X, None, W, float("nan")), "epsilon"),
        ("rms_norm", (X, None, W, 0.0, True), "variance_size"),
        ("rotary_embedding", (Q, K.half(), T, T, P), "key"),
        ("rotary_embedding", (Q, K[0], T, T, P), "key"),
        ("rotary_embedding", (Q, K, T.half(), T, P), "cos"),
        ("rotary_embedding", (Q, K, T[:, :0], T, P), "cos"),
        ("rotary_embedding", (Q, K, T, T[:8], P), "sin"),
        ("rotary_embedding", (Q, K, T, T, P.to(torch.int16)), "position_ids"),
        ("rotary_embedding", (Q, K, T, T, P[None]), "position_ids"),
        ("rotary_embedding", (Q, K, T, T, P + 13), "position_ids"),
        ("rotary_embedding", (Q, K, T, T, P, "no"), "rotary_interleaved"),
    ],
)
def test_problem(op: str, args: tuple[Any, ...], argument: str) -> None:
    verdict = contracts()[op].check(*args)
    assert verdict is not None
    assert verdict[0] == argument
    assert verdict[1].startswith("must ")


def test_positions_of_a_meta_tensor_are_not_looked_at() -> None:
    args = (value.to("meta") for value in (Q, K, T, T, P))
    assert contracts()["rotary_embedding"].check(*args) is None
