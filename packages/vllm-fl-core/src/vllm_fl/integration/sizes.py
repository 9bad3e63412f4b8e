"""The sizes of the served model on one rank, as far as its configuration tells them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..contracts import ModelSizes
from ..logs import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["model_sizes"]

log = get_logger("engine")

INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff")
"""What configurations call the width of the MLP. The last four are older models' names."""

EPSILON = ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon", "norm_eps")

HALF_ROTARY = frozenset({"chatglm", "glm4", "glm"})
"""Model types whose code in vLLM turns half of each head, whatever their configuration says."""


def model_sizes(vllm_config: VllmConfig) -> ModelSizes:
    """The served model's sizes; None for each that its configuration does not tell."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = model.hf_text_config
    head_size = _asked("head_size", model.get_head_size)
    largest = int(vllm_config.scheduler_config.max_num_batched_tokens)
    return ModelSizes(
        hidden=_asked("hidden", model.get_hidden_size),
        intermediate=_asked(
            "intermediate", lambda: max(1, _width(text) // parallel.tensor_parallel_size)
        ),
        heads=_asked("heads", lambda: model.get_num_attention_heads(parallel)),
        kv_heads=_asked("kv_heads", lambda: model.get_num_kv_heads(parallel)),
        head_size=head_size,
        rotary=_asked("rotary", lambda: _rotary(text, head_size)),
        tokens=(1, largest),
        max_position=int(model.max_model_len),
        epsilon=float(_first(text, EPSILON) or 1e-6),
    )


def _asked(what: str, ask: Callable[[], Any]) -> int | None:
    try:
        return int(ask())
    except (AttributeError, TypeError, ValueError, NotImplementedError, KeyError) as error:
        log.debug("the model's configuration does not tell %s: %s", what, error)
        return None


def _width(text: Any) -> int:
    """Features of one half of the MLP. Models with one width per layer give a list: the first."""
    value = _first(text, INTERMEDIATE)
    return int(value[0] if isinstance(value, list | tuple) else value)


def _rotary(text: Any, head_size: int | None) -> int:
    """How many features of a head rotate, as `vllm.model_executor.layers.rotary_embedding` says."""
    if head_size is None:
        raise ValueError("head_size is not told")
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if not isinstance(parameters, dict):
        parameters = {}
    told = parameters.get("rope_dim") or getattr(text, "rotary_dim", None)
    if told:
        return int(told)
    share = parameters.get("partial_rotary_factor")
    share = share or _first(text, ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction"))
    if share is None and getattr(text, "model_type", "") in HALF_ROTARY:
        share = 0.5
    return max(2, int(head_size * (share or 1.0)))


def _first(text: Any, names: tuple[str, ...]) -> Any:
    """The first of these attributes that is told."""
    return next((v for name in names if (v := getattr(text, name, None)) is not None), None)
