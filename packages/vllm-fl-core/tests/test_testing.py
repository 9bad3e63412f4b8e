"""The conformance kit's name, where the distribution that brings it is missing."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("module", ["vllm_fl.testing", "vllm_fl.testing.triton"])
def test_without_the_tools_one_error_says_what_to_install(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("vllm_fl.testing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm_fl_tools", None)  # to import it raises
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'vllm-fl-core\[testing\]'") as told:
        importlib.import_module(module)
    assert told.value.name == "vllm_fl_tools"
