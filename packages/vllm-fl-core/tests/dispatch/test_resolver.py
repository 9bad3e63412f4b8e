"""Resolving, against a simple restatement of its rules, and by example."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from builders import silu
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.dispatch.resolver import FOREIGN, STOCK, Resolver, Trace
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.snapshot import EMPTY
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.policy import OpOrder, SelectionPolicy

VENDORS = ["acme", "beta", "cuda"]
IDS = ["default.flagos", "default.other", "reference.torch", "reference.slow"]
IDS += [f"vendor.{name}" for name in VENDORS]
TOKENS = ["flagos", "vendor", "reference", "foreign", "stock", "vendor:absent", "impl:absent"]
TOKENS += [*(f"vendor:{name}" for name in VENDORS), *(f"impl:{impl_id}" for impl_id in IDS)]
ORDERS = {
    "flagos": ["flagos", "vendor", "reference"],
    "vendor": ["vendor", "flagos", "reference"],
    "reference": ["reference", "flagos", "vendor"],
    "stock": ["flagos", "vendor", "reference"],
}
ENGINE_ORDERS = {
    "flagos": ["flagos", "vendor", "stock", "reference"],
    "vendor": ["vendor", "flagos", "stock", "reference"],
    "reference": ["reference", "flagos", "vendor"],
    "stock": ["foreign", "stock"],
}
THEIRS = {"SiluAndMul": "acme.Silu of vllm-acme 1.0"}


def resolve(
    op: str,
    impls: Any,
    policy: SelectionPolicy,
    *,
    rejections: Any = (),
    foreign: Any = None,
    tokens: int | None = None,
    **how: Any,
) -> Trace:
    registry, theirs = OpRegistry(EMPTY), {op: foreign} if foreign else {}
    resolver = Resolver(registry=registry, policy=policy, foreign=theirs, **how)
    return resolver.resolve(op, impls, dict(rejections), tokens=tokens)


@dataclass(frozen=True)
class Case:
    """A situation, described without the code under test."""

    priorities: dict[str, int]
    unavailable: dict[str, str]
    rejections: dict[str, str]
    prefer: str
    eager: list[str] | None
    compiled: list[str] | None
    allow: set[str] | None
    deny: set[str]
    mode: str
    engine: bool
    strict: bool
    foreign: bool = False

    @property
    def listed(self) -> list[str]:
        defaults = ENGINE_ORDERS if self.engine else ORDERS
        return defaults[self.prefer] if self.written is None else self.written

    @property
    def written(self) -> list[str] | None:
        return self.eager if self.mode == "eager" else self.compiled

    def refused(self, impl_id: str) -> bool:
        """Whether a filter, a rejection or availability excludes it, regardless of the order."""
        head, name = impl_id.split(".")
        if head == "vendor":
            if name in self.deny:
                return True
            if self.allow is not None and name not in self.allow:
                return True
        return impl_id in self.rejections or impl_id in self.unavailable

    def expected(self) -> list[str]:
        """Ids in the expected order."""
        is_foreign = self.engine and self.foreign
        unnamed = ["foreign.oot"] if is_foreign and "foreign" not in self.listed else []
        result = [] if self.written else [*unnamed]
        for selector in self.listed:
            if selector == "stock":
                result += ["stock.vllm"] if self.engine else []
                continue
            if selector == "foreign":
                result += ["foreign.oot"] if is_foreign else []
                continue
            group = [i for i in self.priorities if stands_under(i, selector)]
            group = [i for i in group if not self.refused(i) and i not in result]
            result += sorted(group, key=lambda i: (-self.priorities[i], i))
        # With strict, the user's order applies unchanged.
        forced = self.strict and self.written is not None and "foreign" not in self.listed
        if self.written is not None and not forced:
            result += unnamed
        if self.engine and "stock" not in self.listed and not forced:
            result.append("stock.vllm")
        return result

    def impls(self, shuffled: int) -> list[OpImpl]:
        ids = sorted(self.priorities)
        random.Random(shuffled).shuffle(ids)
        verdicts = {impl_id: self.unavailable.get(impl_id, True) for impl_id in ids}
        return [
            silu(i, priority=self.priorities[i], available=lambda i=i: verdicts[i]) for i in ids
        ]

    def policy(self) -> SelectionPolicy:
        sides = {"eager": self.eager, "compiled": self.compiled}
        order = {mode: selectors for mode, selectors in sides.items() if selectors is not None}
        orders = {"silu_and_mul": order} if order else {}
        return SelectionPolicy(self.prefer, self.strict, orders, self.deny, self.allow)

    def trace(self, shuffled: int = 0) -> Trace:
        return resolve(
            "silu_and_mul",
            self.impls(shuffled),
            self.policy(),
            mode=self.mode,
            rejections=self.rejections,
            engine=self.engine,
            foreign=THEIRS if self.foreign else None,
        )


def stands_under(impl_id: str, selector: str) -> bool:
    head, name = impl_id.split(".")
    if selector.startswith("impl:"):
        return impl_id == selector[len("impl:") :]
    if selector.startswith("vendor:"):
        return head == "vendor" and name == selector[len("vendor:") :]
    return selector == {"default": "flagos"}.get(head, head)


orders = st.none() | st.lists(st.sampled_from(TOKENS), min_size=1, max_size=6, unique=True)
cases = st.builds(
    Case,
    priorities=st.dictionaries(st.sampled_from(IDS), st.sampled_from([-1, 0, 50, 100, 999])),
    unavailable=st.dictionaries(st.sampled_from(IDS), st.just("no device"), max_size=3),
    rejections=st.dictionaries(st.sampled_from(IDS), st.just("failed earlier"), max_size=3),
    prefer=st.sampled_from(sorted(ORDERS)),
    eager=orders,
    compiled=orders,
    allow=st.none() | st.sets(st.sampled_from(VENDORS)),
    deny=st.sets(st.sampled_from(VENDORS), max_size=2),
    mode=st.sampled_from(["eager", "compiled"]),
    engine=st.booleans(),
    strict=st.booleans(),
    foreign=st.booleans(),
)


@given(cases)
def test_the_order_is_what_the_rules_say(case: Case) -> None:
    assert [impl.impl_id for impl in case.trace().admitted] == case.expected()


@given(cases)
def test_everything_installed_is_in_the_trace_and_what_is_rejected_has_a_reason(case: Case) -> None:
    trace = case.trace()
    ids = [candidate.impl_id for candidate in trace.candidates]
    theirs = ["foreign.oot"] if case.foreign and case.engine else []
    own = [*theirs, *(["stock.vllm"] if stock(trace) else [])]
    assert sorted(ids) == sorted([*case.priorities, *own])
    assert all(reason for _, reason in trace.rejected)
    assert [c.status for c in trace.candidates].count("selected") == (1 if case.expected() else 0)
    assert trace.selected is next(iter(trace.admitted), None)
    for candidate in trace.candidates:
        assert f"{candidate.status:<9} {candidate.impl_id}: {candidate.reason}" in str(trace)


def stock(trace: Trace) -> bool:
    return any(candidate.impl is STOCK for candidate in trace.candidates)


@given(cases, st.integers())
def test_it_does_not_depend_on_the_order_of_installation(case: Case, seed: int) -> None:
    def seen(trace: Trace) -> list[tuple[str, str, str]]:
        return [(c.impl_id, c.status, c.reason) for c in trace.candidates]

    assert seen(case.trace(seed)) == seen(case.trace(0))


@given(cases, st.sampled_from(sorted(ORDERS)), st.booleans())
def test_a_higher_preference_sorts_a_platforms_list_stably_and_a_users_never(
    case: Case, kind: str, written_by_the_user: bool
) -> None:
    selectors = case.eager or ["flagos", "vendor:cuda", "vendor", "reference"]
    order = OpOrder.of(selectors, pinned=written_by_the_user)
    policy = SelectionPolicy(per_op_order={"silu_and_mul": order}).preferring(kind)
    got = [str(selector) for selector in policy.order("silu_and_mul")]
    assert got == [*map(str, policy.order("silu_and_mul", "compiled"))]
    if kind == "stock" and "stock" not in selectors and not written_by_the_user:
        selectors = [*selectors, "stock"]  # implied at the end of every order without it
    assert sorted(got) == sorted(selectors)
    if written_by_the_user:
        assert got == selectors
    else:
        first = {"flagos": ("flagos", "impl:default."), "reference": ("reference", "impl:ref")}
        first["stock"] = ("foreign", "stock")
        starts = first.get(kind, ("vendor", "impl:vendor."))
        preferred = [t for t in selectors if t.startswith(starts)]
        assert got == preferred + [t for t in selectors if t not in preferred]


# By example.


def ids(trace: Trace) -> list[str]:
    return [i.impl_id for i in trace.admitted]


ALL = [*map(silu, ("reference.torch", "vendor.acme", "vendor.beta", "default.flagos"))]


@pytest.mark.parametrize(
    ("selectors", "want"),
    [
        (["vendor:acme", "foreign", "stock"], ["vendor.acme", "foreign.oot", "stock.vllm"]),
        (["foreign", "vendor:acme"], ["foreign.oot", "vendor.acme", "stock.vllm"]),
        ("vendor:acme", ["vendor.acme", "foreign.oot", "stock.vllm"]),
        (["vendor:acme", "stock"], ["vendor.acme", "stock.vllm", "foreign.oot"]),
        ({"<=4": ["vendor:acme"], "rest": ["stock"]}, ["vendor.acme", "foreign.oot", "stock.vllm"]),
        ({"<=4": ["stock"], "rest": ["vendor:acme", "foreign"]}, ["stock.vllm", "foreign.oot"]),
    ],
)
def test_the_users_own_order_of_an_op_replaces_what_another_plugin_has_replaced(
    selectors: Any, want: list[str]
) -> None:
    policy = SelectionPolicy(per_op_order={"silu_and_mul": selectors})
    trace = resolve("silu_and_mul", ALL, policy, engine=True, foreign=THEIRS, tokens=1)
    assert ids(trace) == want
    (reason,) = [candidate.reason for candidate in trace.candidates if candidate.impl is FOREIGN]
    assert reason == "layer SiluAndMul is replaced by acme.Silu of vllm-acme 1.0"


def test_strict_mode_drops_what_another_plugin_has_replaced_as_it_drops_vllms() -> None:
    policy = SelectionPolicy(strict=True, per_op_order={"silu_and_mul": "vendor:acme"})
    trace = resolve("silu_and_mul", ALL, policy, engine=True, foreign=THEIRS)
    assert ids(trace) == ["vendor.acme"]
    assert dict(trace.rejected)["foreign.oot"] == "strict mode: not in your order"


@pytest.mark.parametrize(
    "policy",
    [
        *map(SelectionPolicy, ("flagos", "vendor", "reference")),
        SelectionPolicy(per_op_order={"default": ["vendor"]}),
        SelectionPolicy(strict=True, per_op_order={"default": ["vendor"]}),
        SelectionPolicy(per_op_order={"silu_and_mul": OpOrder.of("vendor", pinned=False)}),
        SelectionPolicy(
            per_op_order={"silu_and_mul": replace(OpOrder.of("vendor"), group="activations")}
        ),
        SelectionPolicy(per_op_order={"silu_and_mul": {"compiled": "vendor"}}),
    ],
)
def test_an_order_for_more_than_the_op_and_a_backends_leave_another_plugins_layer(
    policy: SelectionPolicy,
) -> None:
    """`VLLM_FL_PREFER=flagos` is the default: setting it explicitly changes nothing."""
    trace = resolve("silu_and_mul", ALL, policy, engine=True, foreign=THEIRS)
    assert trace.selected is FOREIGN
    hint = "to use vllm-fl instead, set an order for silu_and_mul itself (VLLM_FL_PER_OP)"
    assert trace.candidates[0].reason.endswith(hint)


def test_what_is_rejected_anyway_is_not_probed() -> None:
    def probe() -> bool:
        raise AssertionError("probed")

    probed = silu("vendor.acme", available=probe)
    policy = SelectionPolicy(deny_vendors={"acme"})
    trace = resolve("silu_and_mul", [probed], policy)
    assert trace.rejected == (("vendor.acme", "deny_vendors contains acme"),)
    trace = resolve("silu_and_mul", [probed], SelectionPolicy(), rejections={"vendor.acme": "gone"})
    assert trace.rejected == (("vendor.acme", "gone"),)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ("no NPU", "not available: no NPU"),
        (False, "not available: its availability check returned neither True nor a reason"),
        (OSError("libacme.so"), "raised OSError: libacme.so"),
    ],
)
def test_a_negative_keeps_its_reason_and_is_asked_once(verdict: object, reason: str) -> None:
    asked = []

    def probe() -> object:
        asked.append(1)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    probed = silu("vendor.acme", available=probe)
    for _ in range(3):
        trace = resolve("silu_and_mul", [probed], SelectionPolicy())
        assert reason in dict(trace.rejected)["vendor.acme"]
    assert asked == [1]
