"""FlagGems's attention, run by Triton's interpreter and compared with fp64."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("flag_gems") is None, reason="FlagGems is not installed"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


def outcomes() -> dict[str, tuple[str, str]]:
    """Case -> (status, reason), from one run of `interpreted_attention.py`."""
    script = Path(__file__).with_name("interpreted_attention.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines
    return {line["case"]: (line["status"], line["reason"]) for line in lines}


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_attention_is_right_and_refuses_what_it_would_get_wrong() -> None:
    found = outcomes()
    wrong = {case: found[case] for case in found if found[case][0] != "ok"}
    assert wrong == {}
    kinds = {"float16", "bfloat16", "laid out by vLLM", "warm", "refused"}
    assert {case.partition(": ")[0] for case in found} == kinds
    assert len(found) == 32
