"""Checks of what says which token belongs to which sequence, and which state to which."""

from __future__ import annotations

from itertools import accumulate, cycle
from typing import TYPE_CHECKING

from vllm_fl.contracts.arguments import Problem

if TYPE_CHECKING:
    import torch

__all__ = ["boundaries", "ends", "fitting_features", "fitting_heads", "slots", "state_slots"]


_LENGTHS = (1, 2, 1, 3, 1, 8, 1, 5, 1, 2, 1, 3, 1, 1, 1, 2, 1, 17, 64)
"""How long the sequences after the first are, in turn: in 300 tokens there are more than 16."""

LONG = 257
"""Tokens of the first sequence in a batch of 300: one more than four chunks of 64."""

STATES, INPUTS = 256, 2**20
"""States of single heads, and numbers of a convolution, that the oracle of linear attention goes
through in a call."""


def ends(tokens: int, turned: bool = False) -> tuple[int, ...]:
    """Where the sequences of a batch end: a long prompt, short ones, and some that decode.

    Args:
        tokens: of the batch.
        turned: whether the long prompt is the last one, and a token shorter: a call of the same
            shapes with other ends.
    """
    first, others = (LONG if tokens >= 300 else -(-tokens // 2)), cycle(_LENGTHS)
    lengths = [first]
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, next(others)))
    if turned and len(lengths) > 1:
        lengths = [lengths[-1] + 1, *lengths[-2:0:-1], first - 1]
    return tuple(accumulate(lengths))


def state_slots(count: int, device: torch.device) -> torch.Tensor:
    """(count,), int32: slots of states, neither the first two of a cache nor its last one.

    The first two follow each other, as of requests that came together; the others do not.
    """
    import torch

    at = torch.arange(count, dtype=torch.int32, device=device) + 2
    return torch.cat((at[:2], at[2:].flip(0)))


def fitting_heads(tokens: int, heads: int, value_heads: int) -> tuple[int, int, str]:
    """(heads of keys, heads of values, in what the call is smaller) of a call with so many tokens.

    Heads are independent, and the oracle is dear: few tokens have all heads, and many have those
    of one head of keys, or one.
    """
    share = value_heads // heads
    choices = ((heads, value_heads), (1, share), (1, 1))
    keys, values = next((each for each in choices if tokens * each[1] <= STATES), choices[-1])
    is_smaller = values < value_heads
    return keys, values, f"{values} of {value_heads} heads from {tokens} tokens on" * is_smaller


def fitting_features(tokens: int, features: int) -> tuple[int, str]:
    """(features, in what the call is smaller) of a convolution, for which features are alike."""
    fitting = min(features, max(64, INPUTS // tokens // 64 * 64))
    is_smaller = fitting < features
    return fitting, f"{fitting} of {features} features from {tokens} tokens on" * is_smaller


def boundaries(name: str, value: torch.Tensor, tokens: int) -> Problem:
    """`value` must be where each sequence begins, and where the last one ends."""
    at = [0, tokens] if value.is_meta else value.tolist()
    if at[0] != 0 or at[-1] != tokens or at != sorted(at):
        return name, f"must rise from 0 to the {tokens} tokens, got {at}"
    return None


def slots(name: str, value: torch.Tensor, of: int, *, padding: bool = True) -> Problem:
    """`value` must be states of a cache of so many, none of them twice but slot 0.

    Args:
        name, value: the argument.
        of: how many states the cache has.
        padding: whether it may name slot 0, which is vLLM's null block.
    """
    named = [] if value.is_meta else [at for at in value.tolist() if at or not padding]
    if any(not 0 < at < of for at in named):
        return name, f"must be from {1 - padding} to {of - 1}, got {value.tolist()}"
    if len(set(named)) != len(named):
        return name, f"must name no state twice, got {value.tolist()}"
    return None
