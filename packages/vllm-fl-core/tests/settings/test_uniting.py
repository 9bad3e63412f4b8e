"""Uniting platform files: whatever they set, it ends nothing and no installation order matters."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.settings.policy import ENGINE_ORDERS, Token
from vllm_fl.settings.uniting import Listed, unite_orders

TOKENS = ["flagos", "vendor", "reference", "stock", "vendor:a", "vendor:b", "impl:vendor.a"]
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


def test_the_default_order_settles_what_two_put_differently() -> None:
    a, b = listed("vendor:b|vendor:a", "vendor:a"), listed("vendor:a|vendor:b", "vendor:b")
    assert united(a, b) == ("vendor:a|vendor:b", ["vendor:a|vendor:b"])  # by name
    assert united(listed("reference|flagos"), listed("flagos|reference")) == (
        "flagos|reference",
        ["flagos|reference"],
    )
    assert united(listed("stock"), listed("reference")) == ("stock|reference", [])
    assert united(listed("stock"), listed("vendor")) == ("vendor|stock", [])


@given(several, st.randoms())
def test_the_order_of_the_lists_does_not_matter(lists: list[Listed], chance: random.Random) -> None:
    assert unite_orders(chance.sample(lists, len(lists)), DEFAULT) == unite_orders(lists, DEFAULT)


@given(st.permutations([Token.parse(text) for text in TOKENS]), st.data())
def test_an_order_that_all_agree_on_is_kept(agreed: list[Token], data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sets(st.sampled_from(agreed)), max_size=5))
    owns = st.frozensets(st.sampled_from(agreed))
    lists = [Listed(tuple(t for t in agreed if t in part), data.draw(owns)) for part in parts]
    order, disputed = unite_orders(lists, DEFAULT)
    assert disputed == ()
    for each in lists:
        assert [token for token in order if token in each.tokens] == list(each.tokens)
