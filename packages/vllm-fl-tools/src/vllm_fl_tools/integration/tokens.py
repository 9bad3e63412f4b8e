"""A model's own tokenizer, without an engine and without weights."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["encoded"]


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
