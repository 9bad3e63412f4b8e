"""Additions of `vllm-fl verify --stock` to the workers of a vLLM without vllm-fl.

Importing this module changes the process: vLLM's loader passes each new model to `Linears`. vLLM
imports it by its argument `worker_extension_cls`, before a worker loads its model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_pp_group

from . import attention
from .linear import PROBE_SIZES, Linears, new_models
from .ops import compare_layers, compare_logits
from .rows import StockRows
from .steps import Steps

results = StockRows()
"""The results of this process, which has one worker of an engine."""

linears: list[Linears] = []
"""The linear layers of the model, then of its draft model."""

_recording = attention.recording()
_recording.__enter__()  # until the process ends


class StockChecks:
    """Methods that vLLM adds to its worker."""

    def vllm_fl_stock_compare(self) -> None:
        """Compare the layers of the loaded models, and the logits."""
        worker: Any = self
        runner = worker.model_runner
        self.vllm_fl_stock_loading = sum(each.seconds for each in linears)
        model, draft = runner.get_model(), getattr(runner, "get_draft_model", lambda: None)()
        models = {"": model, "(draft model) ": draft}
        models = {prefix: each for prefix, each in models.items() if hasattr(each, "named_modules")}
        with torch.inference_mode():
            compare_layers(worker, models, results)
            if get_pp_group().is_last_rank:
                compare_logits(worker, model, results, worker.vllm_config.model_config.seed)
            for found in attention.compared_attention(runner, worker.vllm_config.model_config.seed):
                key = "attention", found.backend.rpartition(".")[2], "a float64 reference"
                names, why = found.layers, found.reason
                if found.cases:
                    results.add(key, names[0], found.worst, found.reason, calls=found.cases)
                    names, why = names[1:], "their parameters equal those of a compared layer"
                for name in names:
                    results.skip(key, name, why)

    def vllm_fl_stock_record(self) -> None:
        """Record the hidden states of further steps."""
        self.vllm_fl_stock_steps = Steps(self)

    def vllm_fl_stock_eager(self) -> None:
        """Run further steps without compiled code and captured graphs."""
        self.vllm_fl_stock_steps.go_eager()

    def vllm_fl_stock_recorded(self) -> None:
        """Compare the recorded steps with the eager ones, and run compiled steps again."""
        self.vllm_fl_stock_steps.compare(results)

    def vllm_fl_stock_reload(self) -> None:
        """Load the weights again, and compare linear layers."""
        worker: Any = self
        worker.reload_weights()
        with torch.inference_mode():
            for each in linears:
                each.compare_again()

    def vllm_fl_stock_rows(self) -> dict[str, Any]:
        """Return all results as JSON data, and the seconds of comparisons while loading."""
        return {"rows": results.to_json(), "seconds": self.vllm_fl_stock_loading}


class ThoroughChecks(StockChecks):
    """`StockChecks` with linear layers compared at every captured size."""


def _sizes(config: Any) -> tuple[int, ...]:
    """Return the numbers of tokens of a linear layer's calls."""
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    if not config.parallel_config.worker_extension_cls.endswith(ThoroughChecks.__name__):
        captured = captured and (min(captured), max(captured))
    return tuple(sorted({*PROBE_SIZES, *captured}))


def _watch(config: Any, model: torch.nn.Module) -> None:
    linears.append(Linears(results, _sizes(config), config.model_config.seed))
    linears[-1].watch({module: name for name, module in model.named_modules()})


_models = new_models(_watch)
_models.__enter__()  # until the process ends
