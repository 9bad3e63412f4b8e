"""What engines of several ranks run on: the GPUs of this host, or, to rehearse, its CPU.

On the CPU ranks are processes over gloo, on the device that tests/engine/plugins/oot_cpu brings.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import OPTIONS
from engine_run import BIND, EngineFailed, Job, cores, run

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))

from shapes import MODELS

__all__ = ["Host", "Kept"]

PLUGINS = Path(__file__).resolve().parents[1] / "engine" / "plugins"

FAMILIES = {
    # Of a checkpoint, so that what a layer adds is seen in the logits: vLLM's dummy weights are too
    # small for that. Fewer layers and words: they cost time, and no kernel gets another shape.
    "qwen3": ("qwen3-8b", {"num_hidden_layers": 4, "initializer_range": 0.025}),
    "qwen3_moe": ("qwen3-30b-a3b", {"num_hidden_layers": 2, "initializer_range": 0.035}),
}
"""Family of tools/tiny_model.py -> (the model whose shapes it gets on GPUs, and what else)."""

SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)

WORDS = 4096
"""Of the vocabulary: every logit of every token is handed over."""


@dataclass(frozen=True)
class Host:
    """Where engines run, and how.

    Args:
        ranks: how many one engine has.
        on_cpu: whether it is rehearsed on the CPU.
        limit: seconds until an engine is killed that has not answered.
        only: what the names of the cases have in them that are run.
        at_once: how many engines start side by side.
    """

    ranks: int
    on_cpu: bool
    limit: float
    only: str = ""
    at_once: int = 1

    def lacks(self) -> str:
        """Why it cannot hold such an engine, or nothing."""
        import torch

        found = torch.cuda.device_count()
        return "" if self.on_cpu or found >= self.ranks else f"{self.ranks} GPUs; here are {found}"

    def side_by_side(self) -> ThreadPoolExecutor:
        """Runs engines at the same time."""
        return ThreadPoolExecutor(max_workers=self.at_once)

    def model(self, folder: Path, family: str) -> str:
        """The folder of a model of this family, tiny on the CPU."""
        named, more = FAMILIES[family]
        shapes = {name: size for name, size in MODELS[named][0].items() if name in SIZES}
        sizes = {} if self.on_cpu else {**shapes, "vocab_size": WORDS, **more}
        return str(tiny_model.make(folder, family, **sizes))

    def job(self, model: str, batches: list[list[list[int]]], eager: bool, **options: Any) -> Job:
        """Of an engine of all ranks, unless the options say otherwise."""
        # On the CPU float32 leaves the ranks no difference that another sum makes.
        size = {"max_model_len": 512, "dtype": "float32"} if self.on_cpu else OPTIONS
        told = {**size, "tensor_parallel_size": self.ranks, **options}
        return Job(model, batches, eager=eager, options=told)

    def variables(
        self, *modules: str, path: str | Path = PLUGINS, device: str = "oot_cpu", **more: str
    ) -> dict[str, str]:
        """The environment of an engine in which vllm-fl takes part.

        Args:
            modules: further plugins, by their modules.
            path: where these are, beside tests/engine/plugins.
            device: on the CPU the plugin that brings the device; empty for vLLM's own platform.
            more: further variables.
        """
        own = {"VLLM_FL_PLATFORM": device} if self.on_cpu and device else {}
        names = ",".join((*own.values(), *modules))
        loaded = {"VLLM_FL_PLUGIN_MODULES": names} if names else {}
        path = os.pathsep.join([str(path), str(PLUGINS), os.environ.get("PYTHONPATH", "")])
        return {"PYTHONPATH": path, **own, **loaded, **more}

    @property
    def bound(self) -> dict[str, str]:
        """What an engine on the CPU is told of cores: one for each rank, in turns."""
        each = map(str, islice(cycle(cores()), self.ranks))
        return {BIND: "|".join(each)} if self.on_cpu else {}

    def run(self, job: Job, **variables: str) -> dict[str, Any]:
        """`engine_run.run` within the limit; `took` of the result is its seconds.

        Raises:
            EngineFailed: as there; the seconds are the last line of its log.
        """
        begun = time.monotonic()
        try:
            answer = run(job, timeout=self.limit, **self.bound, **variables)
        except EngineFailed as error:
            took = time.monotonic() - begun
            raise EngineFailed(f"{error.log}\nafter {took:.1f} s") from None
        return {**answer, "took": time.monotonic() - begun}


class Kept:
    """What is known of each case beside its problem, written to $OUT as it comes."""

    def __init__(self, file: str) -> None:
        self.path = Path(os.environ.get("OUT", "."), file)
        self.facts: dict[str, Any] = {}

    def add(self, case: str, **facts: Any) -> None:
        """Keep this of a case."""
        self.facts.setdefault(case, {}).update(facts)
        self.path.write_text(json.dumps(self.facts, indent=1))
