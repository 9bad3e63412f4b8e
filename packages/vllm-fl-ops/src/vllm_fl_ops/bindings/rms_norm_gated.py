"""Binding of `rms_norm_gated`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, LayerTarget, SizeRule

from ..contracts.rules import EPSILON, first_set
from ._hybrid import has_states, mamba_width
from .rms_norm import StandIn

if TYPE_CHECKING:
    from torch import Tensor


def _native(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "swish",
) -> Tensor:
    """Compute in fp32, like vLLM's `RMSNormGated`."""
    import torch

    act = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    y = x.float()
    if z is not None and not norm_before_gate:
        y = y * act(z.float())
    groups = y if group_size is None else y.unflatten(-1, (-1, group_size))
    groups = groups * torch.rsqrt(groups.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    y = groups if group_size is None else groups.flatten(-2)
    y = y * weight.float()
    if z is not None and norm_before_gate:
        y = y * act(z.float())
    return y.to(x.dtype)


class _Mamba2AsRMSNormGated(StandIn):
    """A Mixer2RMSNormGated with all its groups on this rank."""

    norm_before_gate = False
    activation = "silu"

    @property
    def eps(self) -> float:
        epsilon: float = self.layer.variance_epsilon
        return epsilon


class _FusedAsRMSNormGated(StandIn):
    """A FusedRMSNormGated, which normalises all features before the gate."""

    norm_before_gate = True
    group_size = None


def _on_this_rank(layer: Any, norm: Bound) -> Bound:
    """Adapt the op to Mamba 2's norm.

    Layers without a norm, or with groups that span ranks, keep vLLM's method.
    """
    if not layer.use_rms_norm or layer.n_groups % layer.tp_size:
        return partial(_vllms(layer).forward_native, layer)

    def forward(x: Tensor, gate: Tensor) -> Any:
        return norm(x, gate)

    return forward


def _without_residual(layer: Any, norm: Bound) -> Bound:
    """Adapt the op to Kimi's norm.

    Calls with a residual or without a weight keep vLLM's kernel.
    """

    def forward(
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        if residual is not None or prenorm or layer.weight is None:
            return _vllms(layer).forward_cuda(layer, x, g, residual, prenorm, residual_in_fp32)
        return norm(x, g)

    return forward


def _vllms(layer: Any) -> Any:
    """Return vLLM's class of a layer, which may be an instance of a subclass that vllm-fl made."""
    return next(cls for cls in type(layer).__mro__ if cls.__module__.startswith("vllm."))


def _width(config: Any) -> int:
    """Features of a row: of one head in linear attention, of all heads of this rank in Mamba 2."""
    text = config.model_config.hf_text_config
    head = getattr(text, "linear_value_head_dim", None)
    if head is None:
        head = (getattr(text, "linear_attn_config", None) or {}).get("head_dim")
    if head is not None:
        return int(head)
    return mamba_width(config) // int(config.parallel_config.tensor_parallel_size)


def _groups(config: Any) -> int:
    """Number of groups of features on this rank, each with its own mean; 1 for linear attention."""
    text = config.model_config.hf_text_config
    if getattr(text, "linear_value_head_dim", None) or getattr(text, "linear_attn_config", None):
        return 1
    groups = first_set(text, ("mamba_n_groups", "mamba_ngroups", "n_groups"))
    return max(1, int(groups) // int(config.parallel_config.tensor_parallel_size))


BINDING = Binding(
    targets=(
        LayerTarget("vllm.model_executor.layers.layernorm.RMSNormGated", _native, enabled=False),
        LayerTarget(
            "vllm.model_executor.layers.mamba.mamba_mixer2.Mixer2RMSNormGated",
            _native,
            adapt=_on_this_rank,
            stand_in=_Mamba2AsRMSNormGated,
            enabled=False,
        ),
        LayerTarget(
            "vllm.third_party.flash_linear_attention.ops.kda.FusedRMSNormGated",
            _native,
            adapt=_without_residual,
            stand_in=_FusedAsRMSNormGated,
            enabled=False,
        ),
    ),
    sizes=(
        SizeRule("gated_norm", _width, 128, in_kit=False),
        SizeRule("gated_norm_groups", _groups, 1, in_kit=False),
        EPSILON,
    ),
    when=has_states,
    not_reached=(
        "Mamba 2's norm if a group of features spans several ranks: it sums over the ranks",
        "kernels that fuse the norm with the step before or after: Kimi's with a residual, "
        "quantised norms, the recurrent step's",
    ),
)
