"""Hosts for engines of several ranks: this host's GPUs, or its CPU as a rehearsal. On the CPU,
ranks are processes over gloo, on the device of tests/engine/plugins/oot_cpu."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import tiny_model
from cases_engines import OPTIONS
from engine_run import BIND, EngineFailed, Job, cores, run

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))

from shapes import MODELS

__all__ = ["FLAGCX", "Host", "Kept"]

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "tests" / "engine" / "plugins"
FLAGCX = ROOT / "packages" / "vllm-fl-flagcx"

FAMILIES = {
    # Weights from a checkpoint: vLLM's dummy weights are too small for a layer to show in the
    # logits. Fewer layers and a smaller vocabulary save time and change no kernel's shape.
    "qwen3": ("qwen3-8b", {"num_hidden_layers": 4, "initializer_range": 0.025}),
    "qwen3_moe": ("qwen3-30b-a3b", {"num_hidden_layers": 2, "initializer_range": 0.035}),
}
"""Family of tools/tiny_model.py -> (the model with its GPU shapes, further sizes)."""

SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)

WORDS = 4096
"""Vocabulary size; small, because all logits of all tokens are transferred."""


@dataclass(frozen=True)
class Host:
    """Where and how engines run: `ranks` per engine, `at_once` engines at a time, each killed after
    `limit` seconds without an answer. Runs cases with `only` in their names; `on_cpu` rehearses."""

    ranks: int
    on_cpu: bool
    limit: float
    only: str = ""
    at_once: int = 1

    def lacks(self) -> str:
        """Why the host cannot run such an engine, or ""."""
        import torch

        found = torch.cuda.device_count()
        return "" if self.on_cpu or found >= self.ranks else f"{self.ranks} GPUs; here are {found}"

    def side_by_side(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=self.at_once)

    def model(self, folder: Path, family: str) -> str:
        """The folder of a model of this family, tiny on the CPU."""
        named, more = FAMILIES[family]
        shapes = {name: size for name, size in MODELS[named][0].items() if name in SIZES}
        sizes = {} if self.on_cpu else {**shapes, "vocab_size": WORDS, **more}
        return str(tiny_model.make(folder, family, **sizes))

    def job(self, model: str, batches: list[list[list[int]]], eager: bool, **options: Any) -> Job:
        """A job of an engine of all ranks, unless the options set another size."""
        # In float32 the order of a sum makes no difference between ranks.
        size = {"max_model_len": 512, "dtype": "float32"} if self.on_cpu else OPTIONS
        all_options = {**size, "tensor_parallel_size": self.ranks, **options}
        return Job(model, batches, eager=eager, options=all_options)

    def variables(
        self, *modules: str, path: str | Path = PLUGINS, device: str = "oot_cpu", **more: str
    ) -> dict[str, str]:
        """The environment of an engine with vllm-fl. `path` is the folder of the further plugin
        `modules`, in addition to tests/engine/plugins; `device` is the device's plugin on the CPU,
        "" for vLLM's platform; `more` are further variables."""
        own = {"VLLM_FL_PLATFORM": device} if self.on_cpu and device else {}
        names = ",".join((*own.values(), *modules))
        loaded = {"VLLM_FL_PLUGIN_MODULES": names} if names else {}
        path = os.pathsep.join([str(path), str(PLUGINS), os.environ.get("PYTHONPATH", "")])
        return {"PYTHONPATH": path, **own, **loaded, **more}

    def flagcx(self, folder: Path) -> Callable[..., dict[str, str]]:
        """`variables` of engines with FlagCX; compiles its stand-in into this folder."""
        sys.path.append(str(FLAGCX / "tests"))
        from flagcx_library import built, built_over_nccl

        library = built(folder) if self.on_cpu else built_over_nccl(folder)
        installed = entry_points(group="vllm_fl.plugin", name="flagcx")
        modules = () if installed else ("vllm_fl_flagcx.plugin",)
        paths = {"path": FLAGCX / "src", "FLAGCX_PATH": str(library)}
        return partial(self.variables, *modules, **paths)

    @property
    def bound(self) -> dict[str, str]:
        """The CPU binding of an engine: one core per rank, reused if there are too few."""
        each = map(str, islice(cycle(cores()), self.ranks))
        return {BIND: "|".join(each)} if self.on_cpu else {}

    def run(self, job: Job, **variables: str) -> dict[str, Any]:
        """`engine_run.run` within the limit; `took` of the result is its seconds, and so is the
        last line of EngineFailed's log."""
        begun = time.monotonic()
        try:
            answer = run(job, timeout=self.limit, **self.bound, **variables)
        except EngineFailed as error:
            took = time.monotonic() - begun
            raise EngineFailed(f"{error.log}\nafter {took:.1f} s") from None
        return {**answer, "took": time.monotonic() - begun}


class Kept:
    """Facts of each case, written to $OUT as they arrive."""

    def __init__(self, file: str) -> None:
        self.path = Path(os.environ.get("OUT", "."), file)
        self.facts: dict[str, Any] = {}

    def add(self, case: str, **facts: Any) -> None:
        self.facts.setdefault(case, {}).update(facts)
        self.path.write_text(json.dumps(self.facts, indent=1))
