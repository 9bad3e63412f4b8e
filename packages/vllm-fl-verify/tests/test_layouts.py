"""Activations in other memory layouts: the calls made from a sample, and their callers."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.contracts import OpSpec
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_verify.layouts import relaid
from vllm_fl_verify.verification import tried

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.mark.parametrize("spec", known_contracts().contracts.values(), ids=lambda spec: spec.name)
def test_each_activation_of_each_op_is_laid_out_otherwise(spec: OpSpec) -> None:
    dtype = getattr(torch, spec.dtypes[-1])
    own = {sample.name: sample for sample in spec.samples(dtype, CPU)}
    laid = list(relaid(spec, own.values()))
    assert laid and not own.keys() & {sample.name for sample in laid}
    seen: dict[str, set[str]] = {}
    for sample in laid:
        named = dict(zip(spec.parameters, sample.args, strict=True))
        source = own[max((n for n in own if sample.name.startswith(f"{n}, ")), key=len)]
        moved = [
            name
            for name, before in zip(spec.parameters, source.args, strict=True)
            if before is not named[name]
        ]
        (name,) = moved
        before = source.args[spec.parameters.index(name)]
        laid_out, plain = (of.double().nan_to_num() for of in (named[name], before))
        assert torch.equal(laid_out, plain), sample.name
        assert named[name].stride() != before.stride() and spec.check(*sample.args) is None
        seen.setdefault(name, set()).add(sample.name.rpartition(f"{name} ")[2])
    assert seen.keys() == spec.by_token
    assert all("numbers apart" in hows for hows in seen.values())


def test_a_start_leaves_out_what_the_kit_alone_asks() -> None:
    spec = known_contracts().contracts["merge_attn_states"]
    alone = {sample.name for sample in spec.samples(BF16, CPU) if sample.kit_only}
    assert alone and not alone & {sample.name for sample in tried(spec, BF16, CPU)}
