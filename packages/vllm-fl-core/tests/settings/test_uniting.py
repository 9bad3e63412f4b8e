"""Uniting platform files: whatever they set, it ends nothing and no installation order matters."""

from __future__ import annotations

import random

from builders import PLUGIN_SETTINGS
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.files import Layer
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.schema import ITEMS, Setting, pairs
from vllm_fl.settings.uniting import unite

DECLARED = {**ITEMS, **{spec.key: spec for spec in PLUGIN_SETTINGS}}
TOKENS = ["flagos", "vendor", "reference", "stock", "vendor:a", "vendor:b", "impl:vendor.a"]
OWNERS = {"a 1": "vendor.a", "b 2": "vendor.b"}
BROUGHT = {
    "m": [
        (owner, OpImpl("m", impl_id, BackendImplKind.VENDOR, print, impl_id[-1]))
        for owner, impl_id in OWNERS.items()
    ]
}

tokens = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4, unique=True)
orders = st.one_of(
    tokens, st.dictionaries(st.sampled_from(["eager", "compiled"]), tokens, min_size=1)
).map(lambda order: OpOrder.of(order, pinned=False))
names = st.lists(st.sampled_from(["x", "y", "z"]), unique=True).map(tuple)
values = st.fixed_dictionaries(
    {},
    optional={
        "prefer": st.sampled_from(["flagos", "vendor", "reference"]),
        "strict": st.booleans(),
        "deny_vendors": names,
        "oot_whitelist": names,
        "flagos_blacklist": names,
        "op_backends.m": orders,
        "op_backends.n": orders,
    },
) | st.fixed_dictionaries({"oot_blacklist": names, "flagos_whitelist": names})


@st.composite
def some_files(draw: st.DrawFn) -> list[tuple[str, Layer]]:
    owners = draw(st.lists(st.sampled_from([*OWNERS, "c 3"]), max_size=3, unique=True))
    return [
        (
            owner,
            {
                key: Setting(key, value, f"/{owner}.yaml:{line} ({owner})")
                for line, (key, value) in enumerate(draw(values).items(), 1)
            },
        )
        for owner in owners
    ]


@given(some_files(), st.randoms())
def test_it_does_not_depend_on_the_order_of_installation(
    files: list[tuple[str, Layer]], chance: random.Random
) -> None:
    assert unite(chance.sample(files, len(files)), BROUGHT, DECLARED) == unite(
        files, BROUGHT, DECLARED
    )


@given(some_files())
def test_what_one_file_alone_sets_stands(files: list[tuple[str, Layer]]) -> None:
    united = unite(files, BROUGHT, DECLARED)
    for key in {key for _, layer in files for key in layer}:
        said = [layer[key] for _, layer in files if key in layer]
        if len(said) == 1 and not any(key in pair for pair in pairs(DECLARED)):
            assert united[key] == said[0]
        if key in ("prefer", "strict") and len({setting.value for setting in said}) > 1:
            assert united[key].value == ITEMS[key].default
            assert united[key].disagreements


@given(some_files())
def test_what_one_file_rejects_stays_rejected(files: list[tuple[str, Layer]]) -> None:
    united = unite(files, BROUGHT, DECLARED)

    def allows(layer: Layer, name: str, white: str, black: str) -> bool:
        listed = layer[white].value if white in layer else None
        denied = layer[black].value if black in layer else ()
        return (listed is None or name in listed) and name not in denied  # type: ignore[operator]

    for pair in pairs(DECLARED):
        for name in ("x", "y", "z"):
            assert allows(united, name, *pair) == all(
                allows(layer, name, *pair) for _, layer in files
            )


@given(some_files())
def test_only_its_own_list_leaves_an_implementation_out(files: list[tuple[str, Layer]]) -> None:
    united = unite(files, BROUGHT, DECLARED)
    lists = {
        owner: layer["op_backends.m"].value for owner, layer in files if "op_backends.m" in layer
    }
    if len(lists) < 2:
        return
    order = united["op_backends.m"].value
    assert isinstance(order, OpOrder)
    for mode in ("eager", "compiled"):
        of_mode = {
            owner: tokens
            for owner, one in lists.items()
            for _, tokens in one.rows(mode)  # type: ignore[attr-defined]
        }
        for owner, impl in BROUGHT["m"]:
            names_itself = any(token.matches(impl) for token in of_mode.get(owner, ()))
            expected = len(of_mode) > 1 and owner in of_mode and not names_itself
            assert ((mode, impl.impl_id) in order.left_out) == expected
