"""Garbage collection while an engine's startup is verified."""

from __future__ import annotations

import gc
import weakref

import pytest

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
