"""Code for child processes that start a two-layer model without vLLM's worker class."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from children import run_each

__all__ = ["HEAD", "MODEL", "answers"]

HEAD = """
import json, os, pickle, sys
sys.path.insert(0, os.environ["CONFIGS"])
import torch
from builders import silu
from configs import engine_config
from vllm_fl.integration.entry import general_plugin
general_plugin()
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration import engines
from vllm_fl.integration.ranks import Opinion
from vllm_fl.errors import StartError
from vllm_fl.plugins.calling import objections
from vllm_fl.plugins.inspection import FAILED, Objection
from vllm_fl.integration.carried import Carried
from vllm_fl.integration.worker import PlannedWorker
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.loading import load_settings

"""

MODEL = """
contract, gelu = (known_contracts().contracts[op] for op in ("silu_and_mul", "gelu_and_mul"))


def right(x):
    return contract.oracle(x).to(x.dtype)


calls = []


def ranks_failed(why):
    failures = (f"rank 0: {why}",)
    return StartError(f"vllm-fl: engine startup failed: {failures[0]}", failures=failures)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(SiluAndMul() for _ in range(2))

    def forward(self, input_ids, positions):
        calls.append(len(input_ids))
        x = torch.sin(input_ids[:, None] * torch.arange(1280)).bfloat16()
        for act in self.blocks:
            x = act(x).repeat(1, 2)
        return x


class Runner:
    def _dummy_run(self, tokens, is_profile=False, skip_eplb=False):
        zeros = torch.zeros(tokens, dtype=torch.int64)
        with set_forward_context(None, self.config, num_tokens=tokens):
            self.model(input_ids=zeros, positions=zeros)


class Worker:
    def __init__(self, vllm_config):
        self.vllm_config, self.device, self.rank = vllm_config, torch.device("cpu"), 0
        self.model_runner = Runner()
        self.model_runner.config = vllm_config

    def init_device(self):
        pass

    def compile_or_warm_up_model(self):
        return 0.0

    def reload_weights(self):
        pass

    def load_model(self, **options):
        with set_current_vllm_config(self.vllm_config):
            self.model = self.model_runner.model = Model()

    def get_model(self):
        return self.model

    def shutdown(self):
        pass


def planned_worker(asked):
    settings = load_settings(
        {"VLLM_FL_PLUGINS": "vllm-fl-ops", "VLLM_FL_STRICT": os.environ.get("STRICT", "0"),
         "VLLM_FL_PLUGIN_MODULES": os.environ.get("VLLM_FL_PLUGIN_MODULES", ""), **asked},
        platform="cpu")
    config = VllmConfig()
    if os.environ.get("EAGER"):
        config.compilation_config.mode = CompilationMode.NONE
        config.compilation_config.custom_ops = ["all"]
    fake = engine_config()
    fake.model_config.get_vocab_size = lambda: 500
    object.__setattr__(config, "model_config", fake.model_config)
    object.__setattr__(
        config, "additional_config",
        {"vllm_fl": pickle.loads(pickle.dumps(Carried(settings)))})
    object.__setattr__(config.scheduler_config, "max_num_batched_tokens", 512)
    return type("Planned", (PlannedWorker, Worker), {})(config)
"""


def answers(
    body: str, cases: Mapping[str, Mapping[str, str]], **env: str
) -> dict[str, tuple[Any, str]]:
    """Run `MODEL` and `body` for each case, with its variables: case -> (the last line, which is
    JSON; the whole output)."""
    here = {"CONFIGS": str(Path(__file__).parent), "VLLM_PLUGINS": "fl"}
    here |= {"VLLM_FL_PLUGINS": "vllm-fl-ops", **env}
    bodies = {name: (MODEL + body, variables) for name, variables in cases.items()}
    outputs = run_each(HEAD, bodies, {**os.environ, **here})
    return {name: (json.loads(text.splitlines()[-1]), text) for name, text in outputs.items()}
