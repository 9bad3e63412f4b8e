"""The check on the engine: vLLM, in processes of its own, serves a tiny model with the backend.

One engine serves with all ops of the backend at once, and its report tells which op is not planned
as it should be. Only where that engine fails or gives no answer is one started for each op alone:
so the op at fault is named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_fl.plugins.breadcrumb import FOLDER

from .processes import installed_with
from .subject import Refused, Subject, expect

__all__ = ["engine"]

SHOWN = 80
"""Lines of a log's end that are shown: vLLM's own traceback and, above it, the cause."""

GRACE = 5.0
"""Seconds in which the processes of an engine may end by themselves, and release what they hold."""

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
    op, impl_id, deadline = subject.impl.op_name, subject.impl.impl_id, subject.deadline
    brought = installed_with(subject.impl)
    ops = tuple(impl.op_name for impl in brought if impl.availability() is True)
    served = _served(ops, impl_id, deadline)
    if served.report is None and len(ops) > 1:
        together, served = served, _served((op,), impl_id, deadline)
        alone = (_served((each,), impl_id, deadline) for each in ops)
        if served.report is not None and all(one.report is not None for one in alone):
            raise AssertionError(
                f"each of {', '.join(ops)} is served alone, but together {together.problem}"
            )
    if served.report is None:
        raise AssertionError(served.problem)
    planned = served.report["ops"][op]
    why = f"the engine runs {planned['impl']}: {planned['reason']}"
    expect(planned["impl"] == impl_id, why)


@dataclass(frozen=True)
class _Served:
    """The outcome of an engine: its report, or what went wrong and the end of its log."""

    report: dict[str, Any] | None
    problem: str = ""


@cache
def _served(ops: tuple[str, ...], impl_id: str, deadline: float) -> _Served:
    """One engine with the implementation for each of these ops."""
    with tempfile.TemporaryDirectory() as folder:
        script, out = Path(folder, "serve.py"), Path(folder, "report.json")
        script.write_text(SERVE)
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        variables = {
            "VLLM_FL_PER_OP": ";".join(f"{op}=impl:{impl_id}|stock" for op in ops),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, str(script), folder, str(out)]
        status, log = _run(command, variables, deadline * len(ops))
        if out.exists():
            return _Served(json.loads(out.read_text()))
    if status is None:
        what = (
            f"the engine gave no answer within {deadline * len(ops):.0f} s and was ended: that is "
            f"`deadline`, {deadline:.0f} s, for each op. Where the machine is slow, set a longer "
            "one in the test class"
        )
    else:
        what = f"the engine failed, exit status {status}; `vllm-fl doctor` looks for its cause here"
    return _Served(None, f"{what} (with {', '.join(ops)}). The end of its log:\n{_end_of(log)}")


def _run(
    command: Sequence[str], variables: dict[str, str], deadline: float
) -> tuple[int | None, str]:
    """A command's exit status, None where the deadline passed, and what it printed.

    Whatever happens, none of the processes that it started is left.
    """
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command,
            env=os.environ | variables | {FOLDER: ""},
            stdin=subprocess.DEVNULL,
            stdout=log,  # a pipe stays open as long as any of the processes lives
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = child.wait(deadline)
        finally:
            _end_session(child)
        log.seek(0)
        return status, log.read().decode(errors="replace")


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """End every process of a session, and wait until they are gone."""
    for asked in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):  # twice: one may start another
        for pid in _members(leader.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, asked)
        patience = time.monotonic() + GRACE
        while (leader.poll() is None or _members(leader.pid)) and time.monotonic() < patience:
            time.sleep(0.1)


def _members(session: int) -> list[int]:
    """The living processes of a session, those included that left its process group."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, of = (
                Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:4]
            )
            if int(of) == session and state != "Z":
                found.append(int(entry))
    return found


def _end_of(log: str) -> str:
    lines = log.splitlines()
    left_out = len(lines) - SHOWN
    return "\n".join([f"({left_out} lines before)"] * (left_out > 0) + lines[-SHOWN:])
