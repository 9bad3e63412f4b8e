"""Names and versions of what computes."""

from __future__ import annotations

import torch

from vllm_fl.plugins.plugin import Owner
from vllm_fl_tools.operate.identity import device_name, identity


def test_it_names_the_device_the_processor_and_the_versions() -> None:
    facts = identity(torch.device("cpu"), [Owner("torch", "torch", torch.__version__)])
    assert {"device", "processor", "torch", "vllm-fl-core"} <= facts.keys()
    assert all(isinstance(value, str) for value in facts.values())
    assert device_name(torch.device("cpu")) == "cpu", "as vLLM's platform has it"
