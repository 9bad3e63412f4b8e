"""vLLM's layers with their forward methods bound to the plan.

All four forwards are bound, `forward_native` included: in compiled mode a traceable implementation
is then what the compiler sees, whatever `custom_ops` says of the layer. Norms in compiled code are
ops of vLLM's IR (`ir.py`); called outside of it they are bound like the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import activation, layernorm, rotary_embedding
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from ...contracts import OpSpec
from ...dispatch import dispatch_method
from ...plugins.installed import identity
from ...plugins.types import BackendImplKind, OpImpl
from ..compat import FORMER_LAYERS
from .ir import native_norm

__all__ = [
    "Layer",
    "foreign_layers",
    "forget_shared_layers",
    "known_layers",
    "layer_for",
    "layer_table",
    "replace_layers",
]

FORWARDS = ("forward_native", "forward_cpu", "forward_cuda", "forward_oot")


def _stock(op: str, fn: Callable[..., Any]) -> OpImpl:
    """vLLM's own form of an op, for a call that every candidate refused."""
    return OpImpl(op, "stock.vllm", BackendImplKind.REFERENCE, fn, traceable=True)


def _silu_and_mul(x: Tensor) -> Tensor:
    result: Tensor = activation.SiluAndMul.forward_native(x)
    return result


def _gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    half = x.shape[-1] // 2
    return F.gelu(x[..., :half], approximate=approximate) * x[..., half:]


def _rotary_embedding(
    query: Tensor,
    key: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor,
    rotary_interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    cache = torch.cat((cos, sin), dim=-1)
    rotated: tuple[Tensor, Tensor | None] = RotaryEmbedding.forward_static(
        position_ids, query, key, query.shape[-1], cache.shape[-1], cache, not rotary_interleaved
    )
    return rotated


def _from_positions(layer: Any, rotate: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's rope (positions, flat query, flat key) over the contract's (heads apart, cos, sin).

    cos and sin are views of the layer's one cache, the same ones at every step.
    """
    tables: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)

    def forward(
        positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        nonlocal tables
        positions = positions.flatten()
        cache = layer._match_cos_sin_cache_dtype(query)
        if torch.compiler.is_compiling():  # there views cost nothing
            cos, sin = cache.chunk(2, dim=-1)
        else:
            known, cos, sin = tables
            if known is not cache:
                cos, sin = cache.chunk(2, dim=-1)
                tables = cache, cos, sin
        heads = (positions.shape[0], -1, layer.head_size)
        try:
            q = query.view(heads)
            k = None if key is None else key.view(heads)
        except RuntimeError:  # what made them gave another layout than its contract promises
            return forward(positions, query.contiguous(), None if key is None else key.contiguous())
        q_out, k_out = rotate(q, k, cos, sin, positions, not layer.is_neox_style)
        # What was turned in place is there already.
        return (
            query if q_out is q else q_out.reshape(query.shape),
            key if key is None or k_out is k else k_out.reshape(key.shape),
        )

    return forward


class _GemmaAsRMSNorm:
    """A GemmaRMSNorm as the RMSNorm that it computes: its weight is 1 + w, in float32."""

    has_weight = True
    variance_size_override = None

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @property
    def weight(self) -> Tensor:
        """What the normed x is multiplied with; made at each call, as vLLM does."""
        weight: Tensor = self.layer.weight.float() + 1.0
        return weight

    @property
    def variance_epsilon(self) -> float:
        epsilon: float = self.layer.variance_epsilon
        return epsilon

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.layer, name)


@dataclass(frozen=True)
class Layer:
    """A layer class of vLLM's that an op of ours stands behind.

    Args:
        cls: the class's name.
        registered: the name in vLLM's registry, as `custom_ops` uses it.
        op: the op.
    """

    cls: str
    registered: str
    op: str


def layer_table() -> list[Layer]:
    """Every layer class that we replace."""
    return [
        Layer(base.__name__, base.name, op)  # type: ignore[attr-defined]
        for base, op, _ in _replacements()
    ]


def known_layers() -> frozenset[str]:
    """Every name that a list of layers may hold: vLLM's registered names and its class names."""
    from vllm.model_executor import custom_op

    registry = custom_op.op_registry
    ours = {name for layer in layer_table() for name in (layer.cls, layer.registered)}
    return frozenset(
        {*registry, *(cls.__name__ for cls in registry.values()), *ours, *FORMER_LAYERS}
    )


def replace_layers() -> None:
    """Register our layers with vLLM, once per process. Another plugin's stay as they are.

    Called where the model is about to be built: by then every other plugin has had its turn, and
    one that comes after us would end the start (vLLM refuses a second class for a layer).
    """
    from vllm.model_executor import custom_op

    for base, op, options in _replacements():
        name = base.__name__
        if name in custom_op.op_registry_oot:
            continue
        layer = type(
            f"{name}FL",
            (base,),
            {"__module__": __name__}
            | {forward: dispatch_method(op, **options) for forward in FORWARDS}
            | {"dispatch_forward": _dispatch_forward(base)},
        )
        registered_name = base.name  # type: ignore[attr-defined]
        CustomOp.register_oot(name=name)(layer)
        # `custom_ops` speaks of the registered name; register_oot puts the class name there.
        layer.name = registered_name  # type: ignore[attr-defined]
        globals()[layer.__name__] = layer


def forget_shared_layers() -> None:
    """Let the model that is built next have ropes of its own.

    vLLM gives layers of one process that have the same sizes one rope, which is bound to the plan
    that it was built under: an engine must not be given that of another. Who has one keeps it.
    """
    rotary_embedding._ROPE_DICT.clear()


def layer_for(spec: OpSpec, provided: Mapping[str, Any]) -> object:
    """A layer of vLLM's own class that provides what a contract takes from its layer.

    For verifying an implementation that is handed the layer. Nothing of the class's constructor
    runs, which would choose an implementation.

    Args:
        spec: the contract.
        provided: the parameters of `spec.from_layer`, by name.
    """
    stand_in = spec.layer(**provided)
    base = next((base for base, op, _ in _replacements() if op == spec.name), None)
    if base is None:
        return stand_in
    layer: Any = object.__new__(base)
    torch.nn.Module.__init__(layer)
    for name, value in vars(stand_in).items():
        is_weight = isinstance(value, Tensor)
        setattr(layer, name, torch.nn.Parameter(value, False) if is_weight else value)
    return layer


def _dispatch_forward(base: type) -> Callable[..., Any]:
    """`dispatch_forward`, which vLLM calls when it builds a layer, with every forward bound there.

    Some models call `forward_native` by name, at every step: it must not be resolved each time, nor
    traced by a compiler while it is.
    """

    def dispatch_forward(self: CustomOp, *args: Any, **kwargs: Any) -> Any:
        for forward in FORWARDS:
            vars(self)[forward] = getattr(self, forward)
        return base.dispatch_forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    return dispatch_forward


def foreign_layers() -> dict[str, str]:
    """The layers of `layer_table` that another plugin has replaced.

    Returns:
        {class name: the other's class and distribution, as `acme.Silu of vllm-acme 1.0`}.
    """
    from vllm.model_executor import custom_op

    taken = custom_op.op_registry_oot
    return {
        layer.cls: owner_of(taken[layer.cls])
        for layer in layer_table()
        if layer.cls in taken and taken[layer.cls].__module__ != __name__
    }


@cache
def owner_of(cls: type) -> str:
    """A class with the distribution that its module belongs to, as far as metadata tells."""
    from importlib_metadata import distribution, packages_distributions

    path = f"{cls.__module__}.{cls.__qualname__}"
    try:
        names = packages_distributions().get(cls.__module__.partition(".")[0], [])
        owners = [identity(distribution(name)) for name in dict.fromkeys(names)]
    except Exception:  # all that is installed is read, and one of it may be half there
        return path
    named = " and ".join(f"{name} {version}" for name, version, _ in owners)
    return f"{path} of {named}" if named else path


def _replacements() -> list[tuple[type, str, dict[str, Any]]]:
    """(vLLM's class, op, how its forwards are bound)."""
    rope = {
        "grants": ("query", "key"),  # vLLM's own kernels write into the projections too
        "adapt": _from_positions,
        "last": _stock("rotary_embedding", _rotary_embedding),
    }
    norm = {"traces_own": True, "last": native_norm()}
    return [
        (activation.SiluAndMul, "silu_and_mul", {"last": _stock("silu_and_mul", _silu_and_mul)}),
        (activation.GeluAndMul, "gelu_and_mul", {"last": _stock("gelu_and_mul", _gelu_and_mul)}),
        *((cls, "rotary_embedding", rope) for cls in _ropes()),
        (layernorm.RMSNorm, "rms_norm", norm | {"grants": ("x", "residual")}),  # as vLLM's IR does
        (layernorm.GemmaRMSNorm, "rms_norm", norm | {"stand_in": _GemmaAsRMSNorm}),
    ]


def _ropes() -> list[type]:
    """RotaryEmbedding and those of its subclasses that inherit every forward of it."""
    ropes: list[type] = [RotaryEmbedding]
    for cls in ropes:  # grows while it is walked: subclasses of subclasses count too
        subclasses: list[type] = cls.__subclasses__()
        for rope in subclasses:
            own_forward = any(name.startswith("forward") for name in vars(rope))
            if rope.__module__.startswith("vllm.") and not own_forward:
                ropes.append(rope)
    return ropes
