"""What of the ops a model has, by the layers that vLLM builds for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionPlace, FusionPlace, LayerPlace, OperatorPlace

if TYPE_CHECKING:
    from vllm_fl.engine.described import Described

__all__ = ["hidden_layers", "is_quantised", "vocabulary_of", "without"]

NORM = "rms_norm"
OTHER_NORM = "layer_norm"
"""By their ops' names: those of heads, and those that have none of their own."""


def hidden_layers(engine: Described) -> int:
    """How many hidden layers the model has; 0 where it does not tell."""
    config = engine.config.model_config.hf_text_config if engine.config else None
    return int(getattr(config, "num_hidden_layers", 0) or 0)


def vocabulary_of(engine: Described) -> int:
    """How many tokens the model knows."""
    return int(engine.config.model_config.get_vocab_size()) if engine.config else 0


def is_quantised(engine: Described) -> bool:
    """Whether the model's weights are quantised."""
    return engine.config is not None and engine.config.model_config.quantization is not None


def without(engine: Described, bindings: Mapping[str, Binding]) -> frozenset[str]:
    """The ops that the model has not, beside those that its configuration rules out.

    That is an op of layers of which it makes none, but the activation that its experts call
    (`Binding.calls_operators`); and an op that a pass puts in the place of parts which it has not.
    None where it is not known which layers it makes.

    Args:
        engine: its engine.
        bindings: of every op.
    """
    return frozenset(_without(engine, bindings)) if engine.layers else frozenset()


def _without(engine: Described, bindings: Mapping[str, Binding]) -> Iterator[str]:
    absent, layers = engine.facts.absent, engine.layers
    is_called = any(b.calls_operators and op not in absent for op, b in bindings.items())
    for op, binding in bindings.items():
        places = binding.places
        has_layers = any(isinstance(place, LayerPlace) for place in places)
        has_operators = any(isinstance(place, OperatorPlace | FunctionPlace) for place in places)
        of_experts = is_called and has_operators and op.startswith(_activation(engine))
        if has_layers and op not in layers and not of_experts:
            yield op
        parts = [part for place in places if isinstance(place, FusionPlace) for part in place.parts]
        if any(part not in layers for part in parts) or (
            NORM in parts and not _norms_heads(engine)
        ):
            yield op


def _activation(engine: Described) -> str:
    """How the names of ops begin that are the model's activation; nothing where it is not told."""
    config = engine.config.model_config.hf_text_config if engine.config else None
    return str(getattr(config, "hidden_act", None) or "").partition("_")[0]


def _norms_heads(engine: Described) -> bool:
    """Whether the model may norm heads: it has more norms than two of each layer and the last one,
    or norms of another kind."""
    count, most = sum(engine.layers.get(NORM, {}).values()), 2 * hidden_layers(engine) + 1
    return count > most or OTHER_NORM in engine.layers
