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
    *(
        pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("flag_gems", "triton", "vllm")
    ),
]


def test_attention_is_right_and_refuses_what_it_would_get_wrong() -> None:
    script = Path(__file__).with_name("interpreted_attention.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line for line in lines if line["status"] != "ok"] == []
    cases = {line["case"] for line in lines}
    kinds = {"float16", "bfloat16", "laid out by vLLM", "warm", "decode", "refused"}
    assert {case.partition(": ")[0] for case in cases} == kinds
    assert len(cases) == 38
