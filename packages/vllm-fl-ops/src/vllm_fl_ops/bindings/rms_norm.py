"""Binding of `rms_norm`: layers, two ops in vLLM's IR, and operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, IrTarget, LayerTarget, OperatorTarget, Route

from ..contracts.rules import EPSILON, HIDDEN
from ._latent import KV_RANK, Q_RANK
from ._phrases import HW_AGNOSTIC

if TYPE_CHECKING:
    from torch import Tensor


def native_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> Any:
    """Compute with the operations and casts of vLLM's layers and of its native IR, in the same
    order.
    """
    import torch

    wide = x.float()
    if residual is not None:
        wide = wide + residual.float()
        residual = wide.to(x.dtype)
    measured = wide if variance_size is None else wide[..., :variance_size]
    wide = wide * torch.rsqrt(measured.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    normed = (wide if weight is None else wide.to(weight.dtype) * weight).to(x.dtype)
    return normed if residual is None else (normed, residual)


class StandIn:
    """A layer that has the attributes of another class of layers, which computes the same op."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read on a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.layer, name)


class _GemmaAsRMSNorm(StandIn):
    """A GemmaRMSNorm with the attributes of an RMSNorm: its weight is 1 + w, in float32."""

    has_weight = True
    variance_size_override = None

    @property
    def weight(self) -> Tensor:
        """The factor of the normalised x, computed at each call as in vLLM."""
        weight: Tensor = self.layer.weight.float() + 1.0
        return weight


_NORMS = "vllm.model_executor.layers.layernorm"

BINDING = Binding(
    targets=(
        # vLLM's fused_add_rms_norm also overwrites both.
        LayerTarget(f"{_NORMS}.RMSNorm", native_rms_norm, grants=("x", "residual"), enabled=False),
        LayerTarget(
            f"{_NORMS}.GemmaRMSNorm", native_rms_norm, stand_in=_GemmaAsRMSNorm, enabled=False
        ),
        IrTarget(
            "rms_norm",
            Route(constants={"residual": None}),
            parameters=("x", "weight", "epsilon", "variance_size"),
        ),
        IrTarget(
            "fused_add_rms_norm",
            Route(args={"residual": "x_residual"}),
            grants=("x", "residual"),
            parameters=("x", "x_residual", "weight", "epsilon", "variance_size"),
        ),
        # With the parameters of the CUDA build, and of the CPU build.
        *(
            OperatorTarget(
                "_C::rms_norm",
                (target, "input", "weight", "epsilon"),
                Route(args={"x": "input"}, constants={"residual": None}, out=target),
                tokens="input",
            )
            for target in ("result", "out")
        ),
        OperatorTarget(
            "_C::fused_add_rms_norm",
            ("input", "residual", "weight", "epsilon"),
            Route(args={"x": "input"}, out=("input", "residual")),
            tokens="input",
        ),
    ),
    sizes=(HIDDEN, EPSILON, Q_RANK, KV_RANK),
    not_reached=(
        "in eager mode, subclasses of RMSNorm and GemmaRMSNorm with their own forward, and other "
        "code that calls vLLM's IR",
        "norms fused by a vLLM pass (with quantisation, all-reduce, or rope), in compiled mode on "
        "CUDA: the pass uses its own kernel",
        HW_AGNOSTIC,
        "gated norms of Mamba and linear attention, and LayerNorm: other formulas",
    ),
    batch_invariant="vLLM's own kernel",
)
