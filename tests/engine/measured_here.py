"""A table of this machine, for a test that asks where and how it acts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from vllm_fl.settings.table import Row, Table, TunedOp

__all__ = ["measured"]

FACTS = """
import json, sys
import torch

if __name__ == "__main__":
    from vllm.engine.arg_utils import EngineArgs
    from vllm_fl.contracts import contracts
    from vllm_fl.dispatch import get_default_manager
    from vllm_fl.engine.identity import contract_digest, identity
    config = EngineArgs(sys.argv[1], skip_tokenizer_init=True).create_engine_config()
    torch.set_num_threads(1)  # as in the engine
    owners = get_default_manager().registry.snapshot().owners.values()
    print(json.dumps([identity(torch.device("cpu"), owners),
                      contract_digest(contracts()[sys.argv[2]]),
                      {"hidden": config.model_config.get_hidden_size()}]))
"""


def measured(
    model: str, op: str, *, dtype: str = "bfloat16", env: Mapping[str, str] | None = None
) -> Table:
    """A table as `vllm-fl tune` writes it, for eager engines of this model.

    Calls of up to 16 tokens get the CPU's kernel, larger ones what all have without a table.

    Args:
        model: the model's folder.
        op: the one op that it has rows for.
        dtype: the model's.
        env: the environment in which to look at what is installed; None is the process's own.
    """
    command = [sys.executable, "-c", FACTS, model, op]
    done = subprocess.run(
        command, env=env or os.environ, stdout=subprocess.PIPE, text=True, check=True
    )
    identity, contract, sizes = json.loads(done.stdout.splitlines()[-1])
    rows = (Row(16, "vendor.cpu"), Row(256, "default"))
    return Table(
        identity,
        "eager",
        dtype,
        sizes,
        "qwen3",
        "2026-11-22T17:00:00+00:00",
        1.0,
        {op: TunedOp(contract, "reference.torch", rows)},
    )
