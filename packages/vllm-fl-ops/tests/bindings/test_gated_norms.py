"""vLLM's layers that run `rms_norm_gated`, against their native forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_fl.plugins.registry import known_contracts

pytest.importorskip("vllm", reason="the layers are vLLM's own")

from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.mamba.mamba_mixer2 import Mixer2RMSNormGated
from vllm.third_party.flash_linear_attention.ops.kda import FusedRMSNormGated

SPEC = known_contracts().contracts["rms_norm_gated"]
TARGETS = {target.cls: target for target in known_contracts().bindings["rms_norm_gated"].targets}


def layer_of(cls: type, **attributes: Any) -> Any:
    """A layer without its constructor, which needs vLLM's configuration and its ranks."""
    layer: Any = object.__new__(cls)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    layer.weight = torch.nn.Parameter(torch.linspace(0.5, 2.0, 24), requires_grad=False)
    return layer


def mamba2(**attributes: Any) -> Any:
    defaults = {"use_rms_norm": True, "n_groups": 4, "tp_size": 1, "tp_rank": 0, "group_size": 6}
    return layer_of(Mixer2RMSNormGated, variance_epsilon=1e-2, **defaults | attributes)


LAYERS = {
    "one gate for all features": layer_of(
        RMSNormGated, eps=1e-2, group_size=None, norm_before_gate=True, activation="swish"
    ),
    "a sigmoid first, in groups": layer_of(
        RMSNormGated, eps=1e-2, group_size=8, norm_before_gate=False, activation="sigmoid"
    ),
    "Mamba 2's": mamba2(),
    "Mamba 2's of one group": mamba2(n_groups=1, group_size=24),
    "Kimi's": layer_of(FusedRMSNormGated, eps=1e-2, activation="sigmoid"),
    "Kimi's with swish": layer_of(FusedRMSNormGated, eps=1e-2, activation="swish"),
}


def ours(layer: Any, calls: list[str], *, native: bool = False) -> Any:
    """The forward that its binding makes for the layer, with the contract's oracle as the op."""
    target = TARGETS[type(layer).__name__]
    provider = target.stand_in(layer) if target.stand_in else layer

    def op(x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        calls.append("ours")
        provided = [read(provider) for read in SPEC.from_layer.values()]
        computed = target.native if native else SPEC.oracle
        return computed(x, z, *provided).to(x.dtype)

    return target.adapt(layer, op) if target.adapt else op


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_layer_computes_what_its_native_form_does_traced_too(layer: Any) -> None:
    x, z = torch.randn(5, 24), torch.randn(5, 24)
    calls: list[str] = []
    found = ours(layer, calls)(x, z)
    assert calls == ["ours"]
    torch.testing.assert_close(found, type(layer).forward_native(layer, x, z))
    traced = torch.compile(ours(layer, [], native=True), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(x, z), type(layer).forward_native(layer, x, z))


def test_mamba2_without_a_norm_is_vllms_own() -> None:
    layer, calls = mamba2(use_rms_norm=False), list[str]()
    x, z = torch.randn(5, 24), torch.randn(5, 24)
    found = ours(layer, calls)(x, z)
    assert calls == []
    torch.testing.assert_close(found, x * torch.nn.functional.silu(z))


def test_mamba2_of_a_group_on_two_ranks_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mixer2RMSNormGated, "forward_native", lambda *args: "vLLM's")
    calls: list[str] = []
    assert ours(mamba2(n_groups=1, tp_size=2), calls)(torch.ones(2, 24), None) == "vLLM's"
    assert ours(mamba2(n_groups=3, tp_size=2), calls)(torch.ones(2, 24), None) == "vLLM's"
    assert calls == []


def test_kimis_with_a_residual_is_vllms_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedRMSNormGated, "forward_cuda", lambda *args: args[1:])
    calls: list[str] = []
    forward = ours(LAYERS["Kimi's"], calls)
    x, z, residual = torch.randn(3, 2, 24).unbind()
    assert forward(x, z, residual) == (x, z, residual, False, False)
    assert forward(x, z, prenorm=True) == (x, z, None, True, False)
    assert calls == []
