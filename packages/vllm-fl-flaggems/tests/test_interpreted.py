"""FlagGems's own Triton kernels, run by Triton's interpreter and compared with the oracles."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from vllm_fl.dispatch.contracts import contracts

pytestmark = [
    pytest.mark.skipif(find_spec("flag_gems") is None, reason="FlagGems is not installed"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]

REFUSED = {
    "rms_norm": {"weight=None", "weight=None, residual", "variance_size", "variance_size, residual"}
}
"""What FlagGems has no kernel for; every other sample must be right."""

DTYPES = ("float32", "float16", "bfloat16")


@cache
def outcomes(what: str) -> dict[str, tuple[str, str]]:
    """Case -> (status, reason), from one run of `interpreted.py`."""
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), what],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines
    return {line["case"]: (line["status"], line["reason"]) for line in lines}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", sorted(contracts()))
def test_every_sample_is_right_or_refused(op: str, dtype: str) -> None:
    found = outcomes("ops")
    for sample in contracts()[op].samples(getattr(torch, dtype), torch.device("cpu")):
        status, reason = found[f"{op} {dtype}: {sample.name}"]
        wanted = "refused" if sample.name in REFUSED.get(op, ()) else "ok"
        assert status == wanted, f"{sample.name}: {reason}"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_attention_is_right_and_refuses_what_it_would_get_wrong() -> None:
    found = outcomes("attention")
    wrong = {case: found[case] for case in found if found[case][0] != "ok"}
    assert wrong == {}
    assert {case.partition(": ")[0] for case in found} == {"float16", "bfloat16", "refused"}
    assert len(found) == 23
