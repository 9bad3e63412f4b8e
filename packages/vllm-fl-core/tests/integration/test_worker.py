"""The worker's start without an engine: what it reads, and what its preflight answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

START = """
import json, os, pickle, sys
sys.path.insert(0, os.environ["CONFIGS"])
import torch
from configs import engine_config
from vllm_fl.integration.entry import general_plugin
general_plugin()
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms import current_platform
from vllm_fl.integration.planning import Carried
from vllm_fl.integration.worker import PlannedWorker
from vllm_fl.settings.layers import Settings, load_settings

decoded = []
plain = Settings.from_json.__func__

def counting(cls, data):
    decoded.append(1)
    return plain(cls, data)

Settings.from_json = classmethod(counting)
current_platform.get_default_ir_op_priority = lambda config: IrOpPriorityConfig()
type(current_platform).vllm_fl_stock_priority = classmethod(
    lambda cls, config: IrOpPriorityConfig.with_default(["native"])
)


class Worker:
    def __init__(self, vllm_config):
        self.vllm_config, self.device, self.rank = vllm_config, torch.device("cpu"), 0

    def load_model(self, **options):
        return "loaded"

    def shutdown(self):
        pass


settings = load_settings({"VLLM_FL_PREFLIGHT": os.environ.get("HOW", "off")}, platform="cpu")
carried = pickle.loads(pickle.dumps(Carried(settings=settings.to_json())))
config = engine_config(carried)
config.kernel_config.ir_op_priority = IrOpPriorityConfig()
worker = type("Planned", (PlannedWorker, Worker), {})(config)
assert worker.load_model(load_dummy_weights=True) == "loaded"
print(json.dumps({
    "decoded": len(decoded),
    "report": worker.vllm_fl_report(),
    "entry": config.additional_config["vllm_fl"],
}))
"""


def start(code: str = START, **variables: str) -> Any:
    """What a worker's start in a process of its own prints."""
    here = {"CONFIGS": str(Path(__file__).parents[1]), "VLLM_PLUGINS": "fl"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **here, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_start_decodes_its_settings_once() -> None:
    told = start()
    assert told["decoded"] == 1
    assert told["entry"] == {"plan": told["report"]["digest"]}
