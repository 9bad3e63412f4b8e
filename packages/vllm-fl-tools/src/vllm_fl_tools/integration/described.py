"""What a model's folder says of it, without an engine and without weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fl.contracts import ModelSizes
from vllm_fl.contracts.binding import Binding
from vllm_fl.contracts.sizes import model_sizes
from vllm_fl.integration.planning import lacks
from vllm_fl.settings.policy import Mode

if TYPE_CHECKING:
    import torch

__all__ = ["Described", "describe", "encoded"]


@dataclass(frozen=True)
class Described:
    """A model, as an engine would serve it.

    Args:
        sizes: its sizes; the last of `tokens` is the largest batch.
        dtype: its own.
        absent: the ops that it cannot have.
        captured: the numbers of tokens for which vLLM captures graphs; none where it captures none.
    """

    sizes: ModelSizes
    dtype: torch.dtype
    absent: frozenset[str]
    captured: tuple[int, ...]


def describe(
    model: str, mode: Mode, dtype: str | None, bindings: Mapping[str, Binding]
) -> Described:
    """Read a model's folder as vLLM does.

    Args:
        model: the folder, or what else vLLM takes for a model.
        mode: how the engine would run it.
        dtype: as vLLM takes it; None for the model's own.
        bindings: those of every op.

    Raises:
        Exception: vLLM cannot be imported, or cannot serve the model; whatever it raises.
    """
    from vllm import EngineArgs

    config = EngineArgs(
        model=model,
        dtype=dtype or "auto",
        enforce_eager=mode == "eager",
        skip_tokenizer_init=True,
    ).create_engine_config()
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    return Described(
        model_sizes(config, bindings.values()),
        config.model_config.dtype,
        frozenset(op for op, binding in bindings.items() if lacks(config, op, binding)),
        tuple(sorted(captured)) if mode == "compiled" else (),
    )


def encoded(model: str, texts: Iterable[str]) -> list[list[int]]:
    """The token ids of each text, by the model's own tokenizer.

    Args:
        model: the model's folder.
        texts: what is to be encoded.

    Raises:
        Exception: the model has no tokenizer, or it cannot be read; whatever it raises.
    """
    from vllm.tokenizers import get_tokenizer

    tokenizer = get_tokenizer(model)
    return [list(tokenizer.encode(text)) for text in texts]
