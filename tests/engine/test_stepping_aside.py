"""VLLM_FL_PREFER_ENABLED=false gives stock vLLM: configurations, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from engines import Model, answer_of

SCRIPT = """
import json, sys
from contextlib import nullcontext
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm import ir
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope

NORMS = ("rms_norm", "fused_add_rms_norm")

def path(cls):
    return f"{cls.__module__}.{cls.__qualname__}"

def become(eager):
    config = EngineArgs(
        sys.argv[1],
        skip_tokenizer_init=True,
        enforce_eager=eager,
        fail_on_environ_validation=True,
    ).create_engine_config()
    ours = sys.modules.get("vllm_fl.integration.patchers.layers")
    # Our worker does it while it builds the model.
    patched = nullcontext() if ours is None else ours.in_tables(ours.ours())
    with set_current_vllm_config(config), patched:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        layers = [SiluAndMul(), GeluAndMul(), RMSNorm(64), get_rope(64, 128, True, rope)]
        methods = [layer._forward_method for layer in layers]
    priority = config.kernel_config.ir_op_priority
    return {
        "platform": [path(base) for base in type(current_platform).__mro__],
        "enum": current_platform._enum.name,
        "layers": [path(type(layer)) for layer in layers],
        "forwards": [getattr(method, "__func__", method).__qualname__ for method in methods],
        "priorities": {op: getattr(priority, op) for op in NORMS},
        "providers": {op: sorted(getattr(ir.ops, op).impls) for op in NORMS},
        "custom_ops": config.compilation_config.custom_ops,
        "worker": config.parallel_config.worker_cls,
        "extra": config.additional_config,
        "hash": config.compute_hash(),
    }

print(json.dumps({"eager": become(True), "compiled": become(False)}))
"""

ASIDE = {"VLLM_FL_PREFER_ENABLED": "false", "VLLM_FL_PREFER": "vendor"}
WITHOUT = {"VLLM_PLUGINS": ""}
OURS = {"VLLM_FL_PREFER_ENABLED": "true", "VLLM_FL_PREFER": "vendor"}

Configure = Callable[..., tuple[dict[str, Any], str]]

pytestmark = pytest.mark.oldest


@pytest.fixture(scope="module")
def configure(model: Model) -> Configure:
    """`configure(VARIABLE=…)`: (the resulting configuration by mode, the log)."""
    return cache(partial(answer_of, SCRIPT, model("qwen3")))


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_stepping_aside_is_vllm_without_us(configure: Configure, mode: str) -> None:
    became, log = configure(**ASIDE)  # with `fail_on_environ_validation`, so a failure ends it
    assert "Unknown vLLM environment variable" not in log
    aside, without = became[mode], configure(**WITHOUT)[0][mode]
    assert aside == without
    for what in ("platform", "layers"):
        assert not [name for name in without[what] if "vllm_fl" in name]
    assert "vllm_fl" not in without["worker"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_the_same_configuration_is_ours_where_we_do_not_step_aside(
    configure: Configure, mode: str
) -> None:
    ours, without = configure(**OURS)[0][mode], configure(**WITHOUT)[0][mode]
    assert ours["enum"] == without["enum"]
    for what in ("platform", "layers", "forwards", "providers", "worker", "hash"):
        assert ours[what] != without[what], what
    # Eager engines keep the configured priority of vLLM's IR.
    assert (ours["priorities"] != without["priorities"]) is (mode == "compiled")
