"""The engine check: vLLM serves a tiny model with the backend, in separate processes.

One engine serves with all ops of the backend, and its report shows which ops are not planned as
expected.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..cli._engines import EngineError, running_engine
from ..integration.workload import Visit
from .processes import installed_with
from .subject import Refused, Subject, expect

SHOWN = 80
"""Number of lines to show from the end of a log: the cause, then vLLM's traceback."""

TINY_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
"""A model of two layers, with vLLM's dummy weights (`load_format="dummy"`)."""

OPTIONS = {"enforce_eager": True, "max_model_len": 256}


def engine(subject: Subject, dtype: str, sample: str) -> None:
    """The implementation is planned, and the engine generates tokens."""
    if find_spec("vllm") is None:
        raise Refused("vLLM is not installed")
    op, impl_id, deadline = subject.impl.op_name, subject.impl.impl_id, subject.deadline
    brought = installed_with(subject.impl)
    ops = tuple(impl.op_name for impl in brought if impl.availability() is True)
    served = _served(ops, impl_id, deadline)
    if isinstance(served, str):
        raise AssertionError(served)
    planned = served["ops"][op]
    why = f"the engine runs {planned['impl']}: {planned['reason']}"
    expect(planned["impl"] == impl_id, why)


@cache
def _served(ops: tuple[str, ...], impl_id: str, deadline: float) -> dict[str, Any] | str:
    """Run one engine with the implementation for all these ops.

    Returns:
        The engine's report; or why it failed, with the end of its log.
    """
    limit = deadline * len(ops)
    variables = {
        "VLLM_FL_PER_OP": ";".join(f"{op}=impl:{impl_id}|stock" for op in ops),
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_MODEL))
        name, environment = f"with {', '.join(ops)}", os.environ | variables
        try:
            with running_engine(
                name, folder, OPTIONS, environment, limits=(limit, limit)
            ) as running_one:
                running_one.ask("visit", **vars(Visit("kit", 1, 3, 8)))
                return running_one.report
        except EngineError as error:
            what = (
                "the engine failed; `vllm-fl doctor` checks the installation, and `vllm-fl bisect "
                "--startup` finds the op"
            )
            if error.hung:
                what = (
                    f"the engine did not answer within {limit:.0f} s and was killed: `deadline` is "
                    f"{deadline:.0f} s for each op. On a slow machine, set a longer one in the "
                    "test class"
                )
            return f"{what} ({name}). The end of its log:\n{_end_of(error.log)}"


def _end_of(log: str) -> str:
    lines = log.splitlines()
    left_out = len(lines) - SHOWN
    return "\n".join([f"({left_out} lines before)"] * (left_out > 0) + lines[-SHOWN:])
