"""The backend keeps every contract; where no GPU is, on_interpreter.py can stand in for it."""

from __future__ import annotations

import os

import pytest
import torch

from vllm_fl.dispatch.contracts import ModelSizes, contracts
from vllm_fl.dispatch.verification import compare
from vllm_fl.testing import OpConformance
from vllm_fl_flaggems import kernels
from vllm_fl_flaggems.impl import activation, normalization, rotary
from vllm_fl_flaggems.plugin import register_ops

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))

SMALL = ModelSizes(64, 96, 2, 1, 32, 32, tokens=(1, 7, 20))
"""The interpreter takes seconds for what a GPU does in microseconds."""


class TestFlagGems(OpConformance):
    backend = "default.flagos"
    sizes = SMALL if INTERPRETED else OpConformance.sizes


@pytest.mark.skipif(not INTERPRETED, reason="another release or vendor may have other kernels")
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_the_kernels_above_were_launched_directly(name: str) -> None:
    assert kernels.launchable(name) is not None


@pytest.mark.parametrize("op", sorted(contracts()))
def test_public_functions_keep_the_contract_too(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another vendor's GPU runs, and every GPU under a release with other kernels."""
    for module in (activation, normalization, rotary):
        monkeypatch.setattr(module, "launchable", lambda name: None)
    (impl,) = (impl for impl in register_ops() if impl.op_name == op)
    device = torch.device("cpu" if INTERPRETED else "cuda")
    found = [
        compare(impl, contracts()[op], sample, torch.bfloat16)
        for sample in contracts()[op].samples(torch.bfloat16, device)
    ]
    wrong = [one for one in found if one.status not in ("ok", "refused")]
    assert not wrong, wrong
    assert any(one.status == "ok" for one in found)
