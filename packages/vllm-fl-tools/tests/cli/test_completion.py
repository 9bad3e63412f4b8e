"""Shell completion, requested as a shell does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import commands
import pytest

pytest.importorskip("argcomplete")


@pytest.mark.parametrize(
    ("line", "offered", "not_offered"),
    [
        ("vllm-fl ex", {"explain"}, {"plan"}),
        ("vllm-fl explain rms_", {"rms_norm", "rms_norm_gated"}, {"silu_and_mul"}),
        ("vllm-fl plan --", {"--diff", "--save", "--json"}, {"--op"}),
    ],
)
def test_what_a_shell_is_offered(
    line: str, offered: set[str], not_offered: set[str], tmp_path: Path
) -> None:
    found = commands.offered(line, tmp_path)
    assert offered <= found
    assert not found & not_offered


def test_nothing_is_completed_or_imported_in_any_other_run() -> None:
    code = (
        "import sys\nfrom vllm_fl_tools.cli import main\n"
        "try:\n main(['--version'])\nexcept SystemExit:\n pass\n"
        "assert 'argcomplete' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
