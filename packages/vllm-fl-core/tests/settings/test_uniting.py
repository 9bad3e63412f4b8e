"""Uniting platform files: whatever they set, it ends nothing and no installation order matters."""

from __future__ import annotations

import random

from builders import PLUGIN_SETTINGS
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.files import Layer
from vllm_fl.settings.policy import ENGINE_ORDERS, OpOrder, Token
from vllm_fl.settings.schema import ITEMS, Setting, pairs
from vllm_fl.settings.uniting import Listed, unite, unite_orders

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
            own = of_mode.get(owner, [t for tokens in of_mode.values() for t in tokens])
            anybodys = {token for tokens in of_mode.values() for token in tokens}
            expected = any(t.matches(impl) for t in own) and any(t.matches(impl) for t in anybodys)
            assert (
                any(t.matches(impl) for _, tokens in order.rows(mode) for t in tokens) == expected
            )


# Orders of one op.

DEFAULT = ENGINE_ORDERS["flagos"]
some_tokens = st.sampled_from([Token.parse(text) for text in (*TOKENS, "impl:odd")])
some_lists = st.builds(
    Listed,
    st.lists(some_tokens, max_size=6, unique=True).map(tuple),
    st.frozensets(some_tokens, max_size=3),
)
several = st.lists(some_lists, max_size=5)


def listed(text: str, own: str = "") -> Listed:
    tokens = tuple(map(Token.parse, text.split("|")))
    return Listed(tokens, frozenset(map(Token.parse, own.split("|") if own else ())))


def united(*lists: Listed) -> tuple[str, list[str]]:
    order, disputed = unite_orders(lists, DEFAULT)
    return "|".join(map(str, order)), [f"{one}|{other}" for one, other in disputed]


def test_a_vendors_kernel_stands_where_its_own_file_puts_it() -> None:
    cuda = listed("stock|vendor|flagos|reference", "vendor")
    acme = listed("vendor:acme|stock|vendor|flagos|reference", "vendor:acme|vendor")
    assert united(cuda, acme) == ("vendor:acme|stock|vendor|flagos|reference", [])
    modest = listed("stock|vendor:acme|flagos|reference", "vendor:acme")
    assert united(cuda, modest) == ("stock|vendor|vendor:acme|flagos|reference", [])


def test_another_file_has_no_word_about_a_token_whose_owner_has_one() -> None:
    others = [listed("flagos|vendor:a")] * 3
    assert united(listed("vendor:a|flagos", "vendor:a"), *others) == ("vendor:a|flagos", [])


def test_the_default_order_settles_what_two_put_differently() -> None:
    a, b = listed("vendor:b|vendor:a", "vendor:a"), listed("vendor:a|vendor:b", "vendor:b")
    assert united(a, b) == ("vendor:a|vendor:b", ["vendor:a|vendor:b"])  # by name
    assert united(listed("reference|flagos"), listed("flagos|reference")) == (
        "flagos|reference",
        ["flagos|reference"],
    )
    assert united(listed("stock"), listed("reference")) == ("stock|reference", [])
    assert united(listed("stock"), listed("vendor")) == ("vendor|stock", [])


def test_three_that_go_in_a_circle_are_a_dispute_too() -> None:
    circle = (listed(text) for text in ("flagos|vendor", "vendor|stock", "stock|flagos"))
    assert united(*circle) == ("flagos|vendor|stock", ["flagos|stock"])


@given(several, st.randoms())
def test_the_order_of_the_lists_does_not_matter(lists: list[Listed], chance: random.Random) -> None:
    assert unite_orders(chance.sample(lists, len(lists)), DEFAULT) == unite_orders(lists, DEFAULT)


@given(several)
def test_every_token_stands_in_it_once_and_none_is_added(lists: list[Listed]) -> None:
    order, _ = unite_orders(lists, DEFAULT)
    assert len({*order}) == len(order)
    assert {*order} == {token for each in lists for token in each.tokens}


@given(st.permutations([Token.parse(text) for text in TOKENS]), st.data())
def test_an_order_that_all_agree_on_is_kept(agreed: list[Token], data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sets(st.sampled_from(agreed)), max_size=5))
    owns = st.frozensets(st.sampled_from(agreed))
    lists = [Listed(tuple(t for t in agreed if t in part), data.draw(owns)) for part in parts]
    order, disputed = unite_orders(lists, DEFAULT)
    assert disputed == ()
    for each in lists:
        assert [token for token in order if token in each.tokens] == list(each.tokens)
