"""The check on the engine: vLLM, in a process of its own, serves a tiny model with the backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .subject import Refused, Subject

__all__ = ["engine"]

CONFIG = {
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
"""A model of two layers. It has no weights: vLLM makes them up (`load_format="dummy"`)."""

SERVE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
              max_model_len=256)
    llm.generate([{"prompt_token_ids": [1, 5, 9]}],
                 SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False), use_tqdm=False)
    open(sys.argv[2], "w").write(json.dumps(llm.collective_rpc("vllm_fl_report")[0]))
"""


def engine(subject: Subject, dtype: str, sample: str) -> None:
    """The plan has the implementation for its op, and tokens come out."""
    if find_spec("vllm") is None:
        raise Refused("vLLM is not installed")
    op, impl_id = subject.impl.op_name, subject.impl.impl_id
    report, log = _serve(op, impl_id, subject.deadline)
    assert report is not None, f"the engine failed:\n{log[-4000:]}"
    planned = report["ops"][op]
    assert planned["impl"] == impl_id, f"the engine runs {planned['impl']}: {planned['reason']}"


def _serve(op: str, impl_id: str, deadline: float) -> tuple[dict[str, Any] | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, "serve.py"), Path(folder, "report.json")
        script.write_text(SERVE)
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        variables = {
            "VLLM_FL_PER_OP": f"{op}=impl:{impl_id}|stock",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, str(script), folder, str(out)],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=deadline,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return None, f"no answer within {deadline:.0f} s: {error.output}"
        return (json.loads(out.read_text()) if out.exists() else None), done.stdout
