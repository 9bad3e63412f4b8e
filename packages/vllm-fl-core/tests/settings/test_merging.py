"""Merging the orders of several distributions: by example, and what holds whatever they list."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.settings.merging import Listed, Merged, merge
from vllm_fl.settings.policy import ENGINE_ORDERS, Token

DEFAULT = ENGINE_ORDERS["flagos"]
TOKENS = [
    *("flagos", "vendor", "reference", "stock"),
    *("vendor:a", "vendor:b", "vendor:c", "impl:vendor.a", "impl:default.flagos", "impl:odd"),
]


def listed(source: str, text: str, owns: str = "") -> Listed:
    tokens = tuple(map(Token.parse, text.split("|")))
    return Listed(source, tokens, frozenset(map(Token.parse, owns.split("|") if owns else ())))


def order(*lists: Listed) -> str:
    return "|".join(map(str, merge(lists, DEFAULT).tokens))


def dropped(*lists: Listed) -> list[str]:
    return [str(pair) for pair in merge(lists, DEFAULT).dropped]


# By example.


def test_a_vendors_kernel_beside_the_platforms_file() -> None:
    """The file of CUDA's backend, and of somebody who measured their own kernel there."""
    cuda = listed("cuda", "stock|vendor|flagos|reference")
    acme = listed("acme", "vendor:acme|stock|vendor|flagos|reference", "vendor:acme")
    assert order(cuda, acme) == "vendor:acme|stock|vendor|flagos|reference"
    modest = listed("acme", "stock|vendor:acme|vendor|flagos|reference", "vendor:acme")
    assert order(cuda, modest) == "stock|vendor:acme|vendor|flagos|reference"
    assert dropped(cuda, acme) == dropped(cuda, modest) == []


def test_the_owner_of_one_of_the_two_has_the_greater_weight() -> None:
    a = listed("a", "vendor:a|reference", "vendor:a")
    other = listed("x", "reference|vendor:a")
    assert order(a, other) == "vendor:a|reference"
    assert dropped(a, other) == ["reference before vendor:a (weight 1: x)"]


def test_equal_weights_cancel_and_the_default_order_decides() -> None:
    a = listed("a", "vendor:a|vendor:b", "vendor:a")
    b = listed("b", "vendor:b|vendor:a", "vendor:b")
    assert order(a, b) == "vendor:a|vendor:b"  # by name
    assert dropped(a, b) == ["vendor:b before vendor:a (weight 2: b)"]
    both = [listed("a", "reference|flagos"), listed("b", "flagos|reference")]
    assert order(*both) == "flagos|reference"  # by the default order
    assert dropped(*both) == ["reference before flagos (weight 1: a)"]


def test_the_lightest_of_a_cycle_gives_way() -> None:
    lists = [
        listed("a", "vendor:a|vendor:b", "vendor:a"),
        listed("b", "vendor:b|vendor:c", "vendor:b"),
        listed("x", "vendor:c|vendor:a"),
    ]
    assert order(*lists) == "vendor:a|vendor:b|vendor:c"
    assert dropped(*lists) == ["vendor:c before vendor:a (weight 1: x)"]


def test_votes_of_several_lists_add_up() -> None:
    a = listed("a", "vendor:a|flagos", "vendor:a")
    others = [listed(name, "flagos|vendor:a") for name in ("x", "y", "z")]
    assert order(a, *others) == "flagos|vendor:a"
    assert dropped(a, *others) == ["vendor:a before flagos (weight 2: a)"]


def test_stock_takes_part_as_a_token() -> None:
    assert order(listed("a", "stock|vendor"), listed("b", "vendor|reference")) == (
        "stock|vendor|reference"
    )
    # Where nobody says where it stands, the default order does: before plain PyTorch.
    assert order(listed("a", "stock"), listed("b", "reference")) == "stock|reference"
    assert order(listed("a", "stock"), listed("b", "vendor")) == "vendor|stock"


def test_of_nothing_comes_nothing() -> None:
    assert merge([], DEFAULT) == Merged((), ())
    assert merge([Listed("a", ())], DEFAULT) == Merged((), ())


# Whatever they list.

tokens = st.sampled_from([Token.parse(text) for text in TOKENS])
lists = st.builds(
    Listed,
    st.sampled_from(["a 1", "b 2", "c 3", "d 4"]),
    st.lists(tokens, max_size=6, unique=True).map(tuple),
    st.frozensets(tokens, max_size=3),
)
several = st.lists(lists, max_size=6)
defaults = st.sampled_from(sorted(ENGINE_ORDERS.values()))


@given(several, defaults, st.randoms())
def test_it_does_not_depend_on_the_order_in_which_they_are_given(
    given_lists: list[Listed], default: tuple[str, ...], chance: random.Random
) -> None:
    shuffled = chance.sample(given_lists, len(given_lists))
    assert merge(shuffled, default) == merge(given_lists, default)


@given(several, defaults)
def test_every_token_stands_in_it_once_and_none_is_added(
    given_lists: list[Listed], default: tuple[str, ...]
) -> None:
    merged = merge(given_lists, default).tokens
    assert len(set(merged)) == len(merged)
    assert set(merged) == {token for each in given_lists for token in each.tokens}


@given(lists, defaults)
def test_one_list_gives_itself(single: Listed, default: tuple[str, ...]) -> None:
    assert merge([single], default) == Merged(single.tokens, ())
    assert merge([single, single], default) == Merged(single.tokens, ())


@given(st.permutations([Token.parse(text) for text in TOKENS]), st.data(), defaults)
def test_an_order_that_all_agree_on_is_kept(
    agreed: list[Token], data: st.DataObject, default: tuple[str, ...]
) -> None:
    parts = data.draw(st.lists(st.sets(st.sampled_from(agreed)), max_size=5))
    sources = data.draw(st.lists(lists, min_size=len(parts), max_size=len(parts)))
    given_lists = [
        Listed(source.source, tuple(t for t in agreed if t in part), source.owns)
        for source, part in zip(sources, parts, strict=True)
    ]
    merged = merge(given_lists, default)
    assert merged.dropped == ()
    for each in given_lists:
        assert [t for t in merged.tokens if t in each.tokens] == list(each.tokens)


@given(several, defaults)
def test_it_says_exactly_what_it_does_not_follow(
    given_lists: list[Listed], default: tuple[str, ...]
) -> None:
    merged = merge(given_lists, default)
    against = {
        (before, after)
        for each in given_lists
        for n, before in enumerate(each.tokens)
        for after in each.tokens[n + 1 :]
        if merged.tokens.index(before) > merged.tokens.index(after)
    }
    assert {(pair.before, pair.after) for pair in merged.dropped} == against


@given(several, defaults)
def test_the_heaviest_of_all_pairs_is_never_contradicted(
    given_lists: list[Listed], default: tuple[str, ...]
) -> None:
    weights: dict[tuple[Token, Token], int] = {}
    for each in given_lists:
        for n, before in enumerate(each.tokens):
            for after in each.tokens[n + 1 :]:
                weight = 2 if {before, after} & each.owns else 1
                weights[before, after] = weights.get((before, after), 0) + weight
    for (before, after), weight in weights.items():
        others = [w for pair, w in weights.items() if pair != (before, after)]
        if all(weight > other for other in others):
            merged = merge(given_lists, default).tokens
            assert merged.index(before) < merged.index(after)
