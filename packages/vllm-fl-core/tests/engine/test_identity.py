"""What times hold for: each thing that changes them changes the identity."""

from __future__ import annotations

import torch

from vllm_fl.contracts import contracts
from vllm_fl.engine.identity import contract_digest, identity
from vllm_fl.plugins.plugin import Owner


def test_it_names_the_device_what_computes_and_who_brought_it() -> None:
    facts = identity(torch.device("cpu"), [Owner("torch", "torch", torch.__version__)])
    assert facts["threads"] == str(torch.get_num_threads())
    assert {"device", "torch", "vllm-fl-core"} <= facts.keys()
    assert all(isinstance(value, str) for value in facts.values())


def test_each_contract_has_a_digest_of_its_own() -> None:
    assert len({contract_digest(spec) for spec in contracts().values()}) == len(contracts())
