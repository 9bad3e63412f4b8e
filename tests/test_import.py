"""Modules that `import vllm_fl` does not import."""

from __future__ import annotations

import pytest

from installed import Install

DENIED = ("torch", "vllm", "triton", "numpy", "flag_gems", "torch_npu")

RECORD = """
import json, sys

class Recorder:
    asked = []

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {denied!r}:
            self.asked.append(name)

sys.meta_path.insert(0, Recorder())
import {module}
print(json.dumps(Recorder.asked))
"""


@pytest.mark.parametrize("module", ["vllm_fl", "vllm_fl.plugins.hookspecs", "vllm_fl_tools.cli"])
def test_no_heavy_module_is_imported_or_even_tried(install: Install, module: str) -> None:
    """Failed attempts count too: an import that fails and is caught costs a search of the path."""
    assert install().script(RECORD.format(denied=DENIED, module=module)) == []


def test_the_recorder_sees_an_import(install: Install) -> None:
    code = RECORD.format(denied=DENIED, module="contextlib").replace(
        "import contextlib",
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import torch_npu",
    )
    assert install().script(code) == ["torch_npu"]
