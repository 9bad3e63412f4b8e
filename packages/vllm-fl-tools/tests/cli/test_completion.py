"""Shell completion, requested as a shell does."""

from __future__ import annotations

from pathlib import Path

import commands
import pytest

pytest.importorskip("argcomplete")


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("vllm-fl ex", {"explain"}, {"plan"}),
        ("vllm-fl explain rms_", {"rms_norm", "rms_norm_gated"}, {"silu_and_mul"}),
        ("vllm-fl verify --op silu_", {"silu_and_mul"}, {"rms_norm"}),
        ("vllm-fl plan --", {"--diff", "--save", "--json"}, {"--op"}),
    ],
)
def test_what_a_shell_is_offered(
    line: str, offered: set[str], not_offered: set[str], tmp_path: Path
) -> None:
    found = commands.offered(line, tmp_path)
    assert offered <= found
    assert not found & not_offered
