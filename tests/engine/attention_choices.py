"""Ask vLLM's platform for an attention backend without starting an engine; prints `chosen` in JSON.

    python attention_choices.py DIR '[{"env": {…}, "options": {…}, "request": {…}}]'

`env` and `options` are the engine's environment and arguments; `request` overrides the layer's.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def choose(model: str, case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_fl.integration.planning import facts_of, plan_for

    os.environ.update(case.get("env", {}))
    arguments = EngineArgs(model, skip_tokenizer_init=True, **case.get("options", {}))
    config = arguments.create_engine_config()
    fields = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    request = AttentionSelectorConfig(**fields, block_size=None, **case.get("request", {}))
    plan = plan_for(facts_of(config))
    try:
        with set_current_vllm_config(config):
            backend = config.attention_config.backend
            path = current_platform.get_attn_backend_cls(backend, request)
    except Exception as error:
        path = f"{type(error).__name__}: {error}"
    entry = plan.entries["attention_backend"]
    return {"path": path, "planned": entry.label, "reason": entry.reason}


if __name__ == "__main__":
    before, chosen = dict(os.environ), []
    for case in json.loads(sys.argv[2]):
        chosen.append(choose(sys.argv[1], case))
        os.environ.clear()
        os.environ.update(before)
    print(json.dumps({"chosen": chosen}))
