"""Select the wrong kernels of the default run: one for each check, and a sample by commit.

The others run with the slow tests. Repeat the test of one kernel with `-m "" -k NAME`.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from vllm_fl_tools.testing import CHECKS
from vllm_fl_verify.checks import STARTUP_CHECKS as CHECKS_AT_START

from .corpus import corpus

__all__ = ["AT_START", "BY_KIT", "chosen"]

AT_START: Mapping[str, str] = MappingProxyType(
    {
        "_samples": "features_apart_relu2_x",
        "_process": "number_of_threads",
        "_batches": "one_less_than_the_largest_batch",
        "_dirty_memory": "leaves_rows_of_zeros",
        "_further_batches": "at_forty_tokens",
        "_takes_some": "supports_answers_yes",
        "_captured": "rows_of_the_capture",
        "_compiled": "untraceable_call",
    }
)
"""Check of verification at startup -> a kernel that only this check finds."""

BY_KIT: Mapping[str, str] = MappingProxyType(
    {
        "serving": "supports_raises_not_implemented",
        "values": "equal_numbers_are_lost",
        "bad_inputs": "no_feature_quant_int8",
        "large_pools": "offsets_of_32_bits",
        "determinism": "rounds_at_random",
        "preflight": "one_output_buffer",
        "families": "at_another_width",
        "tracing": "untraceable_call",
        "fork": "in_another_process",
    }
)
"""Check of the conformance kit -> a kernel that it finds."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "_warm_up": "packages/vllm-fl-core/tests/engine/test_warmup.py",
        "availability": "packages/vllm-fl-tools/tests/testing/test_suite.py",
        "declaration": "packages/vllm-fl-tools/tests/testing/test_checks.py",
        "refusals": "packages/vllm-fl-tools/tests/testing/test_checks.py",
        "call_op": "packages/vllm-fl-tools/tests/testing/test_checks.py",
        "opcheck": "packages/vllm-fl-tools/tests/testing/test_checks.py",
        "spawn": "packages/vllm-fl-tools/tests/testing/test_checks.py",
        "engine": "packages/vllm-fl-tools/tests/testing/test_engine.py",
    }
)
"""Check without a kernel in the corpus -> its tests."""

assert {*AT_START, *BY_KIT, *ELSEWHERE} == {c.__name__ for c in CHECKS_AT_START} | {*CHECKS}

DRAWN = 40


@cache
def _commit() -> str:
    """The tested commit; a constant without git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return done.stdout.strip()


@cache
def chosen() -> frozenset[str]:
    """Names of the kernels in the default run."""
    fixed = {*AT_START.values(), *BY_KIT.values()}
    others = [name for name, wrong in corpus().items() if name not in fixed and not wrong.impatient]
    return frozenset(fixed | {*random.Random(_commit()).sample(others, DRAWN)})
