"""Selectors, orders and policies: syntax, errors, matching and re-sorting."""

from __future__ import annotations

from typing import Any

import pytest
from builders import silu
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.policy import IMPL_KINDS, MODES, OpOrder, SelectionPolicy, Selector

ACME, GEMS, TORCH = map(silu, ("vendor.acme", "default.flagos", "reference.torch"))

names = st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True)
selectors = st.one_of(
    st.sampled_from([*IMPL_KINDS, "stock"]),
    names.map("vendor:{}".format),
    names.map("impl:{}".format),
)
STOCK = (Selector("stock"),)


@given(selectors)
def test_token_prints_what_it_reads(text: str) -> None:
    assert str(Selector.parse(text)) == text
    assert Selector.parse(f"  {text} ") == Selector.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "cuda", "vendor:", "impl:", "stock:x", "flagos:x", "vendor: cuda", "vendor:a b", "Vendor"],
)
def test_token_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid selector"):
        Selector.parse(text)


def test_an_id_is_read_as_logs_have_it_and_has_the_preference_of_its_kind() -> None:
    assert str(Selector.parse("vendor.acme")) == "impl:vendor.acme"
    assert Selector.parse("default.flagos").matches(GEMS)
    assert str(Selector.parse("flagos.decode")) == "impl:flagos.decode"
    order = OpOrder.of(["reference", "impl:default.flagos"], pinned=False)
    assert str(order.preferring("flagos")) == "impl:default.flagos|reference"


@pytest.mark.parametrize(
    ("selector", "matched"),
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
def test_selector_matches(selector: str, matched: set[OpImpl]) -> None:
    assert {
        impl for impl in (ACME, GEMS, TORCH) if Selector.parse(selector).matches(impl)
    } == matched


@pytest.mark.parametrize(
    "value", [[], {}, "", 5, None, ["flagos"] * 2, {"eagre": ["stock"]}, {"eager": {}}]
)
def test_order_refuses(value: object) -> None:
    with pytest.raises(ValueError):
        OpOrder.of(value)


def test_an_order_by_size_is_that_of_the_first_ceiling_that_holds_the_call() -> None:
    order = OpOrder.of({"<=16": "vendor", "<=256": ["flagos", "vendor"], "rest": "reference"})
    policy = SelectionPolicy(per_op_order={"rms_norm": order})

    def of(tokens: int | None) -> str:
        return "|".join(map(str, policy.order("rms_norm", tokens=tokens)))

    for order_of_call, sizes in {
        "vendor": (0, 1, 16),
        "flagos|vendor": (17, 256),
        "reference": (257, None),
    }.items():
        assert {of(tokens) for tokens in sizes} == {order_of_call}
    assert policy.ceilings("rms_norm") == policy.ceilings("rms_norm", "compiled") == (16, 256)
    assert policy.ceilings("silu_and_mul") == ()
    assert str(order) == "<=16 vendor, <=256 flagos|vendor, rest reference"
    assert order.eager[-1] == (None, (Selector.parse("reference"),))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"<=16": "vendor"}, "needs 'rest'"),
        ({"eager": {"<=16": "vendor"}}, "needs 'rest'"),
        ({"<=16": "vendor", "<= 16": "flagos", "rest": "stock"}, "'<=16' follows '<=16'"),
        ({"<=16": "vendor", "<=8": "flagos", "rest": "stock"}, "ascending"),
        ({"<=0": "vendor", "rest": "stock"}, "at least 1"),
        ({"<=1.5": "vendor", "rest": "stock"}, "at least 1"),
        ({"<16": "vendor", "rest": "stock"}, "expected '<=N'"),
        ({16: "vendor", "rest": "stock"}, "expected '<=N'"),
        ({"<=16": [], "rest": "stock"}, "non-empty"),
        ({"<=16": {"rest": "vendor"}, "rest": "stock"}, "non-empty list"),
        ({"<=16": "vendr", "rest": "stock"}, "Did you mean 'vendor'"),
        ({"eager": "vendor", "<=16": "vendor", "rest": "stock"}, "'eager' is not a row"),
        ({"eager": {"eager": "stock"}}, "'eager' is not a row"),
    ],
)
def test_wrong_rows_are_refused(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OpOrder.of(value)


@pytest.mark.parametrize(
    "rows",
    [
        ((8, STOCK),),
        ((None, STOCK), (8, STOCK)),
        ((8, ()), (None, STOCK)),
        ((True, STOCK), (None, STOCK)),
        ((8, STOCK), (8, STOCK), (None, STOCK)),
    ],
)
def test_an_order_that_is_built_by_hand_is_checked_too(rows: Any) -> None:
    with pytest.raises(ValueError):
        OpOrder(rows, ())


@pytest.mark.parametrize(
    ("prefer", "script", "engine"),
    [
        ("flagos", "flagos|vendor|reference", "flagos|vendor|stock|reference"),
        ("vendor", "vendor|flagos|reference", "vendor|flagos|stock|reference"),
        ("reference", "reference|flagos|vendor", "reference|flagos|vendor"),  # then stock
        ("stock", "flagos|vendor|reference", "foreign|stock"),
    ],
)
def test_orders_of_every_preference_are_the_documented_ones(
    prefer: str, script: str, engine: str
) -> None:
    """The table in docs/settings.md, "Orders": a change here breaks users' settings."""
    policy = SelectionPolicy(prefer=prefer)
    for mode in MODES:
        assert "|".join(map(str, policy.order("rms_norm", mode))) == script
        assert "|".join(map(str, policy.order("rms_norm", mode, engine=True))) == engine


def test_deny_beats_allow_and_both_look_at_vendors_only() -> None:
    policy = SelectionPolicy(allow_vendors=frozenset({"acme"}), deny_vendors=frozenset({"acme"}))
    assert policy.refuses(ACME) == "deny_vendors contains acme"
    none = SelectionPolicy(allow_vendors=frozenset())
    assert none.refuses(ACME) == "allow_vendors lists none"
    for impl in (GEMS, TORCH):
        assert policy.refuses(impl) is None
        assert none.refuses(impl) is None


def test_policy_is_frozen_and_equal_by_value() -> None:
    one = SelectionPolicy(per_op_order={"b": ["flagos"], "a": "vendor"})  # type: ignore[dict-item]
    two = SelectionPolicy(per_op_order={"a": OpOrder.of(["vendor"]), "b": OpOrder.of("flagos")})
    assert one == two and hash(one) == hash(two)
    with pytest.raises(TypeError):
        one.per_op_order["a"] = OpOrder.of("flagos")  # type: ignore[index]
    with pytest.raises(AttributeError):
        one.strict = True  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [{"strict": "no"}, {"allow_vendors": {5}}, {"deny_vendors": 5}])
def test_policy_refuses_wrong_types(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SelectionPolicy(**wrong)
