"""The kit's modules under the names that backends import: the same objects, not copies."""

from __future__ import annotations

import importlib
import pickle

import pytest

import vllm_fl.testing
from vllm_fl_tools import testing


@pytest.mark.parametrize("module", ["", ".families", ".triton"])
def test_all_names_are_the_kit_s_own(module: str) -> None:
    ours = importlib.import_module(f"vllm_fl_tools.testing{module}")
    theirs = importlib.import_module(f"vllm_fl.testing{module}")
    assert all(getattr(theirs, name) is getattr(ours, name) for name in ours.__all__)
    taken: dict[str, object] = {}
    exec(f"from vllm_fl.testing{module} import *", taken)
    assert taken.keys() >= {*ours.__all__}


def test_what_is_pickled_under_one_name_is_read_under_both() -> None:
    case = vllm_fl.testing.Case("values", "rms_norm", "float32", "16 tokens")
    assert pickle.loads(pickle.dumps(case)) == case and type(case) is testing.Case
    assert pickle.loads(b"cvllm_fl.testing\nXfail\n.") is testing.Xfail
