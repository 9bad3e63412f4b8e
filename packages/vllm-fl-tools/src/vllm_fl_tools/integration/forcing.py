"""Lets requests answer with tokens that were given, so that engines can be compared by them.

For `vllm-fl bisect` alone, by vLLM's argument `logits_processors`. Reported log-probabilities are
those of the model all the same: vLLM takes them before any processor has changed the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from .workload import FORCED

__all__ = ["Forcing"]


class Forcing(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is not typed here
    """Forces the tokens of `SamplingParams.extra_args`, one after the other."""

    def is_argmax_invariant(self) -> bool:
        """It is not: vLLM must ask it for greedy requests, too."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[..., Tensor] | None:
        """What forces the tokens of one request; None where it has none."""
        forced = (params.extra_args or {}).get(FORCED)
        return None if forced is None else partial(_force, forced)


def _force(forced: Sequence[int], output_ids: list[int], logits: Tensor) -> Tensor:
    """Let nothing but the next of the `forced` tokens be possible."""
    logits.fill_(-float("inf"))
    logits[forced[len(output_ids)]] = 0.0
    return logits
