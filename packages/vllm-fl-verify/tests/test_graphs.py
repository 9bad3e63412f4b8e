"""Effects of a capture on the process; graphs themselves are tested on GPUs."""

from __future__ import annotations

import gc
from unittest.mock import MagicMock

import pytest
import torch

from vllm_fl_verify import graphs


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
