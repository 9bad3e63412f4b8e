"""Sequences and state slots: samples and checks for linear attention and convolutions."""

from __future__ import annotations

from itertools import accumulate, cycle
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Problem
from vllm_fl.contracts.spec import Sample

if TYPE_CHECKING:
    import torch

_LENGTHS = (1, 2, 1, 3, 1, 8, 1, 5, 1, 2, 1, 3, 1, 1, 1, 2, 1, 17, 64)
"""Lengths of the sequences after the first, repeated. A batch of 300 tokens has more than 16."""

LONG = 257
"""Tokens of the first sequence in a batch of 300 or more: one more than four chunks of 64."""

STATES, INPUTS = 256, 2**20
"""Limits of a call that the oracle computes: head states (tokens x heads), and inputs of a
convolution (tokens x features).
"""


OF_SEQUENCES: Any = {"group": "linear_attention", "fixed_batch": True, "whole_batch": True}
"""Fields of contracts with states of sequences."""


def sample(name: str, call: dict[str, Any], **change: Any) -> Sample:
    """A call, with changed arguments."""
    return Sample(name, (*(call | change).values(),))


def ends(tokens: int, turned: bool = False) -> tuple[int, ...]:
    """Ends of the sequences of a batch: a long prompt, short prompts, and decode tokens.

    Args:
        tokens: number of tokens of the batch.
        turned: whether the long prompt is last, and one token shorter. The shapes are equal; the
            ends differ.
    """
    first, others = (LONG if tokens >= 300 else -(-tokens // 2)), cycle(_LENGTHS)
    lengths = [first]
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, next(others)))
    if turned and len(lengths) > 1:
        lengths = [lengths[-1] + 1, *lengths[-2:0:-1], first - 1]
    return tuple(accumulate(lengths))


def state_slots(count: int, device: torch.device) -> torch.Tensor:
    """(count,) slots of states, int32, from 2 to count + 1.

    The first two are consecutive, as for requests that arrived together; the rest descend.
    """
    import torch

    at = torch.arange(count, dtype=torch.int32, device=device) + 2
    return torch.cat((at[:2], at[2:].flip(0)))


def fitting_heads(tokens: int, heads: int, value_heads: int) -> tuple[int, int, str]:
    """Return (key heads, value heads, how the call is reduced) for a call with this number of
    tokens.

    The oracle is slow, and heads are independent. Therefore only calls with few tokens have all
    heads. Longer calls have one key head with its value heads, or one of each.
    """
    share = value_heads // heads
    choices = ((heads, value_heads), (1, share), (1, 1))
    keys, values = next((each for each in choices if tokens * each[1] <= STATES), choices[-1])
    is_smaller = values < value_heads
    return keys, values, f"{values} of {value_heads} heads from {tokens} tokens on" * is_smaller


def fitting_features(tokens: int, features: int) -> tuple[int, str]:
    """Return (features, how the call is reduced) of a convolution, which treats all features
    alike."""
    fitting = min(features, max(64, INPUTS // tokens // 64 * 64))
    is_smaller = fitting < features
    return fitting, f"{fitting} of {features} features from {tokens} tokens on" * is_smaller


def boundaries(name: str, value: torch.Tensor, tokens: int) -> Problem:
    """Check that `value` has the first token of each sequence, then the number of tokens."""
    at = [0, tokens] if value.is_meta else value.tolist()
    if at[0] != 0 or at[-1] != tokens or at != sorted(at):
        return name, f"must rise from 0 to the {tokens} tokens, got {at}"
    return None


def slots(name: str, value: torch.Tensor, of: int, *, padding: bool = True) -> Problem:
    """Check that `value` has distinct states of a cache of `of` states; only slot 0 may repeat.

    Args:
        name, value: the argument.
        of: the number of states of the cache.
        padding: whether slot 0, vLLM's null block, is allowed.
    """
    named = [] if value.is_meta else [at for at in value.tolist() if at or not padding]
    if any(not 0 < at < of for at in named):
        return name, f"must be from {1 - padding} to {of - 1}, got {value.tolist()}"
    if len(set(named)) != len(named):
        return name, f"must not contain a state twice, got {value.tolist()}"
    return None
