"""Garbage collection while an engine's startup is verified, and while a graph is captured. Graphs
themselves are tested on GPUs."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import MagicMock

import pytest
import torch

from vllm_fl_verify import graphs
from vllm_fl_verify.trials import without_old_objects


class Circle:
    """Freed only by the garbage collector."""

    def __init__(self) -> None:
        self.itself = self


def test_new_garbage_is_found_and_old_one_later() -> None:
    gc.collect()
    old = weakref.ref(Circle())
    with pytest.raises(MemoryError), without_old_objects():
        new = weakref.ref(Circle())
        gc.collect()
        assert new() is None and old() is not None
        raise MemoryError
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_is_on_afterwards_if_it_was(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    monkeypatch.setattr(torch, "cuda", MagicMock())
    seen: list[bool] = []
    (gc.enable if collects else gc.disable)()
    try:
        _, result = graphs.captured(lambda: seen.append(gc.isenabled()) or 7, torch.device("cpu"))
        assert result == 7 and seen == [collects, False]
        assert gc.isenabled() is collects
    finally:
        gc.enable()
