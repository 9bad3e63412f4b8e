"""Tokens, orders and the policy: what they read, refuse, match, and how they re-sort."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.policy import DEFAULT_ORDERS, KINDS, OpOrder, SelectionPolicy, Token

ACME = OpImpl("rms_norm", "vendor.acme", BackendImplKind.VENDOR, lambda: None, "acme")
GEMS = OpImpl("rms_norm", "default.flagos", BackendImplKind.DEFAULT, lambda: None)
TORCH = OpImpl("rms_norm", "reference.torch", BackendImplKind.REFERENCE, lambda: None)

names = st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True)
tokens = st.one_of(
    st.sampled_from([*KINDS, "stock"]),
    names.map("vendor:{}".format),
    names.map("impl:{}".format),
)
orders = st.lists(tokens, min_size=1, max_size=6, unique=True)


@trials(deadline=None)
@given(tokens)
def test_token_prints_what_it_reads(text: str) -> None:
    assert str(Token.parse(text)) == text
    assert Token.parse(f"  {text} ") == Token.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "cuda", "vendor:", "impl:", "stock:x", "flagos:x", "vendor: cuda", "vendor:a b", "Vendor"],
)
def test_token_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid token"):
        Token.parse(text)


def test_token_suggests_the_near_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'reference'"):
        Token.parse("refrence")


@pytest.mark.parametrize(
    ("token", "matched"),
    [
        ("flagos", {GEMS}),
        ("reference", {TORCH}),
        ("vendor", {ACME}),
        ("vendor:acme", {ACME}),
        ("vendor:other", set()),
        ("impl:default.flagos", {GEMS}),
        ("stock", set()),
    ],
)
def test_token_matches(token: str, matched: set[OpImpl]) -> None:
    assert {impl for impl in (ACME, GEMS, TORCH) if Token.parse(token).matches(impl)} == matched


@trials(deadline=None)
@given(orders, st.sampled_from(KINDS))
def test_preference_re_sorts_stably_and_adds_nothing(texts: list[str], kind: str) -> None:
    order = OpOrder.of(texts, pinned=False)
    after = order.preferring(kind).eager
    assert order.eager is not None and after is not None
    front = [token for token in order.eager if token.preference == kind]
    assert list(after) == front + [token for token in order.eager if token not in front]
    assert order.preferring(kind).compiled == after
    assert OpOrder.of(texts).preferring(kind) == OpOrder.of(texts)


def test_preference_knows_the_kind_behind_an_id() -> None:
    order = OpOrder.of(["reference", "impl:default.flagos"], pinned=False)
    assert str(order.preferring("flagos")) == "impl:default.flagos|reference"


def test_order_of_one_mode_leaves_the_other_open() -> None:
    policy = SelectionPolicy(per_op_order={"rms_norm": OpOrder.of({"compiled": ["stock"]})})
    assert list(map(str, policy.order("rms_norm", "compiled"))) == ["stock"]
    assert list(map(str, policy.order("rms_norm", "eager"))) == [*DEFAULT_ORDERS["flagos"]]


@pytest.mark.parametrize("value", [[], {}, "", 5, None, ["flagos", "flagos"], {"eagre": ["stock"]}])
def test_order_refuses(value: object) -> None:
    with pytest.raises(ValueError):
        OpOrder.of(value)


@pytest.mark.parametrize("kind", KINDS)
def test_default_order_is_a_preference_and_no_exclusion(kind: str) -> None:
    order = list(map(str, SelectionPolicy(prefer=kind).order("rms_norm")))
    assert order == list(DEFAULT_ORDERS[kind])
    assert order[0] == kind
    assert set(order) == set(KINDS)


def test_deny_beats_allow_and_both_look_at_vendors_only() -> None:
    policy = SelectionPolicy(allow_vendors=frozenset({"acme"}), deny_vendors=frozenset({"acme"}))
    assert policy.refuses(ACME) == "deny_vendors names acme"
    none = SelectionPolicy(allow_vendors=frozenset())
    assert none.refuses(ACME) == "allow_vendors lists none"
    for impl in (GEMS, TORCH):
        assert policy.refuses(impl) is None
        assert none.refuses(impl) is None


def test_policy_is_frozen_and_equal_by_value() -> None:
    one = SelectionPolicy(per_op_order={"b": ["flagos"], "a": "vendor"})  # type: ignore[dict-item]
    two = SelectionPolicy(per_op_order={"a": OpOrder.of(["vendor"]), "b": OpOrder.of("flagos")})
    assert one == two and hash(one) == hash(two)
    with pytest.raises(TypeError, match="frozen"):
        one.per_op_order["a"] = OpOrder.of("flagos")  # type: ignore[index]
    with pytest.raises(AttributeError):
        one.strict = True  # type: ignore[misc]


def test_policy_refuses_a_vendor_as_preference() -> None:
    with pytest.raises(ValueError, match="prefer is one of"):
        SelectionPolicy(prefer="cuda")


def test_pickled_policy_is_the_same_key_in_another_process() -> None:
    policy = SelectionPolicy("vendor", True, {"rms_norm": OpOrder.of("flagos")}, frozenset("a"))
    program = (
        "import pickle, sys\n"
        "from vllm_fl.settings.policy import OpOrder, SelectionPolicy\n"
        "policy = pickle.loads(sys.stdin.buffer.read())\n"
        "same = SelectionPolicy('vendor', True, {'rms_norm': OpOrder.of('flagos')},"
        " frozenset('a'))\n"
        "assert policy == same and {same: 1}[policy] == 1\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(policy),
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        check=True,
    )
