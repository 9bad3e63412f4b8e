"""Comparison of the engine's compiled and captured steps with eager steps of the same tokens."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch.compiler import set_stance

from vllm_fl.integration.patchers.attention import uncompiled

from ..graphs import without_graphs
from .linear import PROBE_STEPS
from .rows import StockRows

EAGER = "eager steps"

ROUNDINGS = 8.0
"""Tolerance of a row of hidden states, as a root mean square in steps of its dtype. It is
multiplied by the square root of the number of layers, because their errors add up.
"""

QUANTISED = 4.0
"""Factor of the tolerance for quantised models, because activations may be rounded to 8 bits."""

LARGEST = 0.7
"""Largest tolerance. Unrelated hidden states differ by 1.4 times their magnitude."""

Step = tuple[int, torch.Tensor]
"""Number of tokens, and the hidden states before the product for the logits."""


class Steps:
    """Records hidden states of a worker's steps, and compares the states of two visits.

    Args:
        worker: vLLM's worker.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._seen: list[Step] = []
        self._served: list[Step] = []
        self._tokens = 0
        self._run = worker.execute_model
        vars(worker)["execute_model"] = self._execute
        self._stack = ExitStack()
        self._model = worker.model_runner.get_model()
        self._own = self._model.compute_logits
        vars(self._model)["compute_logits"] = self._noting

    def _execute(self, scheduled: Any, *args: Any, **named: Any) -> Any:
        self._tokens = scheduled.total_num_scheduled_tokens
        return self._run(scheduled, *args, **named)

    def _noting(self, hidden: Any, *args: Any, **named: Any) -> Any:
        self._seen.append((self._tokens, hidden.detach().float().cpu()))
        return self._own(hidden, *args, **named)

    def go_eager(self) -> None:
        """Run further steps without compiled code and captured graphs."""
        self._served, self._seen = self._seen, []
        self._stack.enter_context(set_stance("force_eager"))
        self._stack.enter_context(uncompiled())
        self._stack.enter_context(without_graphs(self.worker.model_runner))

    def compare(self, rows: StockRows) -> None:
        """Return to compiled steps, and compare the recorded steps."""
        self._stack.close()
        vars(self._model).pop("compute_logits", None)
        vars(self.worker).pop("execute_model", None)
        config = self.worker.vllm_config
        compilation, dtype = config.compilation_config, config.model_config.dtype
        has_graphs = getattr(compilation.cudagraph_mode, "name", "NONE") != "NONE"
        largest = max(compilation.cudagraph_capture_sizes or (0,)) if has_graphs else 0
        layers = config.model_config.get_num_layers(config.parallel_config)
        limit = ROUNDINGS * PROBE_STEPS[dtype] * layers**0.5
        limit = min(limit * QUANTISED if config.quant_config else limit, LARGEST)
        if len(self._served) != len(self._seen):
            counts = f"{len(self._served)} steps, but {len(self._seen)} eager ones"
            return rows.skip(("steps", "", EAGER), "all", counts)
        both = zip(self._served, self._seen, strict=True)
        for number, ((tokens, served), (others, eager)) in enumerate(both):
            key = "steps", "captured graph" if tokens <= largest else "compiled", EAGER
            step = f"step {number} of {tokens} tokens"
            if (tokens, served.shape) != (others, eager.shape):
                rows.skip(key, step, "other batches")
                continue
            error = float(((served - eager).norm(dim=1) / eager.norm(dim=1)).max())
            wrong = f"hidden states differ by {error:.3g} of their size" if error > limit else ""
            problem = wrong if math.isfinite(error) else "hidden states are NaN or infinite"
            rows.add(key, step, error / limit, problem)
