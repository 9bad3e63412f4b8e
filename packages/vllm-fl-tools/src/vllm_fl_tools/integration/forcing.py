"""Forces engines to generate given tokens, which makes their log-probabilities comparable.

Only for `vllm-fl bisect`, with vLLM's argument `logits_processors`. Log-probabilities are not
affected, because vLLM computes them before any processor changes the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from .workload import FORCED


class Forcing(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is not typed here
    """Forces the tokens of `SamplingParams.extra_args`, in order."""

    def is_argmax_invariant(self) -> bool:
        """Return False, because vLLM must also call this processor for greedy requests."""
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[..., Tensor] | None:
        forced = (params.extra_args or {}).get(FORCED)
        return None if forced is None else partial(_force, forced)


def _force(forced: Sequence[int], output_ids: list[int], logits: Tensor) -> Tensor:
    """Make all tokens impossible except the next one of `forced`."""
    logits.fill_(-float("inf"))
    logits[forced[len(output_ids)]] = 0.0
    return logits
