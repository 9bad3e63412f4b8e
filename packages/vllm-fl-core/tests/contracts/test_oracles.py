"""The oracles against an independent form of the same op, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm_fl.contracts import contracts

CPU = torch.device("cpu")
EXACT = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}


def test_silu_and_mul() -> None:
    spec = contracts()["silu_and_mul"]
    for sample in spec.samples(torch.float32, CPU):
        gate, up = sample.args[0].double().chunk(2, dim=-1)
        torch.testing.assert_close(spec.oracle(*sample.args), F.silu(gate) * up, **EXACT)


def test_gelu_and_mul() -> None:
    spec = contracts()["gelu_and_mul"]
    for sample in spec.samples(torch.float32, CPU):
        x, approximate = sample.args
        gate, up = x.double().chunk(2, dim=-1)
        want = F.gelu(gate, approximate=approximate) * up
        torch.testing.assert_close(spec.oracle(x, approximate), want, **EXACT)
    with pytest.raises(ValueError, match="sigmoid"):
        spec.oracle(torch.ones(2, 2), "sigmoid")


def test_rms_norm() -> None:
    spec = contracts()["rms_norm"]
    for sample in spec.samples(torch.float32, CPU):
        x, residual, weight, epsilon, variance_size = sample.args
        y = x.double() if residual is None else x.double() + residual.double()
        seen = y.shape[-1] if variance_size is None else variance_size
        mean = (y[..., :seen] ** 2).sum(-1, keepdim=True) / seen
        want = y / (mean + epsilon) ** 0.5 * (1.0 if weight is None else weight.double())
        got = spec.oracle(*sample.args)
        if residual is not None:
            got, summed = got
            torch.testing.assert_close(summed, y, **EXACT)
        torch.testing.assert_close(got, want, **EXACT)
        if variance_size is None:
            wide = None if weight is None else weight.double()
            torch.testing.assert_close(got, F.rms_norm(y, y.shape[-1:], wide, epsilon), **EXACT)


def test_rotary_embedding_is_a_product_of_complex_numbers() -> None:
    spec = contracts()["rotary_embedding"]
    for sample in spec.samples(torch.float32, CPU):
        query, key, cos, sin, position_ids, interleaved = sample.args
        half = cos.shape[-1]
        factor = torch.complex(cos.double(), sin.double())[position_ids.long()].unsqueeze(1)
        for x, got in zip((query, key), spec.oracle(*sample.args), strict=True):
            if x is None:
                assert got is None
                continue
            pairs = x[..., : 2 * half].double().unflatten(-1, (half, 2) if interleaved else (2, -1))
            pairs = pairs if interleaved else pairs.transpose(-1, -2)
            product = torch.complex(*pairs.unbind(-1)) * factor
            turned = torch.stack((product.real, product.imag), dim=-1)
            turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
            want = torch.cat((turned, x[..., 2 * half :].double()), dim=-1)
            torch.testing.assert_close(got, want, **EXACT)


def test_oracles_leave_their_inputs_alone_in_fp64_too() -> None:
    for spec in contracts().values():
        for sample in spec.samples(torch.float64, CPU):
            before = [a.clone() if isinstance(a, torch.Tensor) else a for a in sample.args]
            results = spec.oracle(*sample.args)
            for result in results if isinstance(results, tuple) else (results,):
                if result is not None:
                    result.fill_(7.0)
            for old, new in zip(before, sample.args, strict=True):
                if isinstance(old, torch.Tensor):
                    torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
