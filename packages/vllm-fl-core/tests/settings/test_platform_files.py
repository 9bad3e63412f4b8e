"""Merging platform files: each orders its own implementations; installation order is irrelevant."""

from __future__ import annotations

import itertools

import pytest
from builders import silu

from vllm_fl.settings.platform_files import unite
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.schema import ITEMS, Setting

IDS = {"a": "vendor.a", "b": "vendor.b", "gems": "default.flagos", "torch": "reference.torch"}
KEY = "op_backends.m"
BROUGHT = {"m": [(f"fl-{name}", silu(impl_id)) for name, impl_id in IDS.items()]}


def united(**orders: str) -> str:
    """The order of the op `m` after merging these files (distribution -> order)."""
    files = [
        (f"fl-{name}", {KEY: Setting(KEY, OpOrder.of(text, pinned=False), name)})
        for name, text in orders.items()
    ]
    found = {
        str(unite(list(each), BROUGHT, ITEMS)[KEY].value) for each in itertools.permutations(files)
    }
    (one,) = found
    return one


@pytest.mark.parametrize(
    ("files", "order"),
    [
        ({"a": "vendor|stock"}, "vendor|stock"),
        # Each file places its own before or after `stock`.
        ({"a": "vendor:a|stock|vendor:b", "b": "stock|vendor:b"}, "vendor:a|stock|vendor:b"),
        ({"a": "stock|vendor:a", "b": "vendor:b|stock|vendor:a"}, "vendor:b|stock|vendor:a"),
        # Files are merged by kind in the default order, then by name.
        ({"b": "vendor:b", "a": "vendor:a", "gems": "flagos"}, "flagos|vendor:a|vendor:b"),
        # A measured order of one file is kept; implementations of other files go where those say.
        (
            {"a": "stock|vendor|flagos|reference", "torch": "stock|flagos|vendor|reference"},
            "stock|vendor|flagos|reference",
        ),
        # An implementation that its own file omits is excluded; without a file, all may list it.
        ({"a": "stock", "b": "vendor|flagos|stock"}, "impl:vendor.b|flagos|stock"),
    ],
)
def test_each_file_orders_its_own(files: dict[str, str], order: str) -> None:
    assert united(**files) == order
