"""Measure the overhead of a call compared with a direct call of the same function, in ns.

Each round runs every case and its direct call; the figure is the median of the differences within
a round. The implementation does nothing, so only the dispatch is measured.
"""

from __future__ import annotations

import argparse
import time
import timeit
from contextvars import copy_context
from typing import Any

from figures import Figure, figure, paired, ratios

from vllm_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    dispatch_method,
    policy_context,
    set_log_level,
    with_preference,
    with_strict_mode,
)
from vllm_fl.dispatch.context import building
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import make_plan
from vllm_fl.plugins.registry import Owner
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.policy import OpOrder

__all__ = ["measure"]

ROUNDS, CALLS, OPAQUE_CALLS = 300, 5_000, 500
OP = "silu_and_mul"


def silu_and_mul(x: Any) -> Any:
    """Implementation that returns its input."""
    return x


def rms_norm(
    x: Any, residual: Any, weight: Any, epsilon: float, variance_size: int | None = None
) -> Any:
    """Implementation of an op whose layer provides half of the arguments."""
    return x


def supports(x: Any) -> bool:
    """Predicate that only costs its call."""
    return True


class Case:
    """Timed statement.

    Args:
        stmt: one call.
        given: values of the names in it.
    """

    def __init__(self, stmt: str, **given: Any) -> None:
        # Local names, so that the lookup of globals is not measured.
        setup = f"{', '.join(given)}, = given"
        # Thread time excludes other processes of a shared machine.
        self.timer = timeit.Timer(
            stmt, setup, time.thread_time, globals={"given": tuple(given.values())}
        )
        self.context = copy_context()  # keep the policy_context of its creation
        self.times: list[float] = []

    def run(self, calls: int) -> None:
        """Time one round, in nanoseconds per call."""
        self.times.append(self.context.run(self.timer.timeit, calls) / calls * 1e9)


Comparison = tuple[str, Case, Case, float | None]
"""(description, case, baseline case, bar in nanoseconds)."""


class Plain:
    """Layer whose method is the implementation, stored like in vLLM's CustomOp."""

    def __init__(self) -> None:
        self._forward_method = self.forward_oot

    def forward_oot(self, x: Any) -> Any:
        return x


class Calling(Plain):
    """Layer whose method calls the implementation, like a hand-written `forward_oot`."""

    def forward_oot(self, x: Any) -> Any:
        return silu_and_mul(x)


class Bound:
    """Layer whose method is bound to the plan when it is built."""

    forward_oot = dispatch_method(OP)

    def __init__(self) -> None:
        self._forward_method = self.forward_oot


class Norm:
    """Attributes of a norm layer."""

    weight: Any = type("Weight", (), {"data": object()})
    variance_epsilon = 1e-6
    variance_size_override = None
    has_weight = True


class CallingNorm(Norm):
    """Norm whose method calls the implementation."""

    def __init__(self) -> None:
        self._forward_method = self.forward_oot

    def forward_oot(self, x: Any, residual: Any = None) -> Any:
        return rms_norm(
            x, residual, self.weight.data, self.variance_epsilon, self.variance_size_override
        )


class BoundNorm(Norm):
    """Norm whose method is bound to the plan."""

    forward_oot = dispatch_method("rms_norm")

    def __init__(self) -> None:
        self._forward_method = self.forward_oot


def manager(
    impls: int, policy: SelectionPolicy | None = None, *, others: int = 0, **options: Any
) -> OpManager:
    """Make a manager with `impls` implementations of the op, each from its own plugin.

    Args:
        impls: number of implementations of the called op.
        policy: the global policy.
        others: further ops, each with one implementation.
        options: fields of the implementations of the called op.
    """
    registry = OpRegistry()
    for n in range(impls):
        registry.register_many(
            [
                OpImpl(
                    OP, f"vendor.v{n}", BackendImplKind.VENDOR, silu_and_mul, f"v{n}", **options
                ),
                OpImpl("rms_norm", f"vendor.v{n}", BackendImplKind.VENDOR, rms_norm, f"v{n}"),
            ],
            Owner(f"v{n}"),
        )
    registry.register_many(
        OpImpl(f"op_{n}", "vendor.v0", BackendImplKind.VENDOR, silu_and_mul, "v0")
        for n in range(others)
    )
    return OpManager(registry, policy)


def measure(options: argparse.Namespace) -> list[Figure]:
    """Measure the call path."""
    set_log_level("WARNING")
    rounds = options.rounds or ROUNDS
    return [
        *compare([*layers(), *functions()], rounds, CALLS),
        *compare(by_size(), rounds, CALLS),
        *compare(opaque(), rounds, OPAQUE_CALLS),
        *multiples(rounds),
    ]


def compare(comparisons: list[Comparison], rounds: int, calls: int) -> list[Figure]:
    """Run all cases in each round; each round starts with another case."""
    cases = list(dict.fromkeys(case for _, *pair, _ in comparisons for case in pair))
    for case in cases:
        case.run(calls)
        case.times.clear()
    for n in range(rounds):
        start = n % len(cases)
        for case in (*cases[start:], *cases[:start]):
            case.run(calls)
    return [
        figure(what, "ns", paired(case.times, over.times), at_most=bar)
        for what, case, over, bar in comparisons
    ]


def multiples(rounds: int) -> list[Figure]:
    """Cost of calls from a script as multiples of a direct call, valid on any machine."""
    x = object()
    ten = manager(10)
    direct = Case("f(x)", f=silu_and_mul, x=x)
    # A wrapper with only a `try` is the lower bound of a guard.
    least = Case("f(x)", f=trying, x=x)
    enter = {
        "entering and leaving with_strict_mode": with_strict_mode,
        "entering and leaving with_preference": lambda: with_preference("vendor"),
    }
    cases = {
        "resolve_op result": (Case("f(x)", f=ten.resolve(OP), x=x), 2.5),
        "  the least that a guard in Python costs": (least, None),
        "call_op": (Case(f"f({OP!r}, x)", f=ten.call, x=x), 10.0),
        **{what: (Case("with f(): pass", f=make), None) for what, make in enter.items()},
    }
    for _ in range(rounds + 1):
        for case in (direct, *(case for case, _ in cases.values())):
            case.run(CALLS // 10)
    return [
        figure(
            f"{what}, as a multiple of a direct call",
            "",
            ratios(case.times[1:], direct.times[1:]),
            at_most=bar,
        )
        for what, (case, bar) in cases.items()
    ]


def trying(x: Any) -> Any:
    """Call the implementation in a `try`."""
    try:
        return silu_and_mul(x)
    except Exception:
        return None


def layers() -> list[Comparison]:
    """Compare calls of layer methods in an eager engine."""
    x = object()

    def method(layer: object) -> Case:
        return Case("layer._forward_method(x)", layer=layer, x=x)

    def norm(layer: object) -> Case:
        return Case("layer._forward_method(x, x)", layer=layer, x=x)

    plain, bound = method(Plain()), method(engine_layer(Bound, manager(10)))
    asking = method(engine_layer(Bound, manager(10, supports=supports)))
    return [
        ("bound layer call over a plain method call", bound, plain, 30),
        ("  over a method that calls the function by hand", bound, method(Calling()), None),
        ("  with supports, over a plain method call", asking, plain, None),
        (
            "  rms_norm over a method that calls it by hand",
            norm(engine_layer(BoundNorm, manager(10))),
            norm(CallingNorm()),
            None,
        ),
    ]


def functions() -> list[Comparison]:
    """Compare calls from a script, with `resolve_op` and `call_op`."""
    x = object()
    direct = Case("f(x)", f=silu_and_mul, x=x)

    def resolved(owner: OpManager) -> Case:
        return Case("f(x)", f=owner.resolve(OP), x=x)

    def called(owner: OpManager, arguments: str = "x") -> Case:
        return Case(f"f({OP!r}, {arguments})", f=owner.call, x=x)

    strict = SelectionPolicy(strict=True)
    with policy_context(strict):
        inside = called(manager(10))
    ten, hundred, thousand = (called(manager(n)) for n in (10, 100, 1000))
    return [
        ("resolve_op result over the function, strict", resolved(manager(10, strict)), direct, 50),
        ("  not strict", resolved(manager(10)), direct, None),
        ("  with supports", resolved(manager(10, supports=supports)), direct, None),
        ("call_op over a direct call, 10 implementations", ten, direct, 300),
        ("  100 implementations", hundred, direct, 300),
        ("  1000 implementations, of 1000 plugins", thousand, direct, 300),
        ("  1000 further ops", called(manager(10, others=1000)), direct, 300),
        ("  100 implementations over 10: flat", hundred, ten, None),
        ("  1000 implementations over 10: flat", thousand, ten, None),
        ("  with supports", called(manager(10, supports=supports)), direct, None),
        ("  by keyword", called(manager(10), "x=x"), direct, None),
        ("  inside policy_context", inside, direct, None),
    ]


# Not v0 first: a compiled plan has one operator per process and chain, and v0 is used elsewhere.
ONE_ORDER = SelectionPolicy(per_op_order={OP: OpOrder.of("vendor:v1")})
BY_SIZE = SelectionPolicy(
    per_op_order={OP: OpOrder.of({"<=4": "vendor:v0", "<=64": "vendor:v2", "rest": "vendor:v1"})}
)


def by_size() -> list[Comparison]:
    """Cost of the table lookup if the order of an op depends on the size of the call."""
    import torch

    def of(policy: SelectionPolicy, tokens: int) -> Case:
        layer = engine_layer(Bound, manager(3), policy=policy)
        return Case("layer._forward_method(x)", layer=layer, x=torch.empty(tokens, 2))

    return [
        (f"by size, {what}, over one order", of(BY_SIZE, n), of(ONE_ORDER, n), None)
        for what, n in (("the first row", 1), ("the largest calls", 65))
    ]


def opaque() -> list[Comparison]:
    """Cost of torch.library, which wraps an opaque implementation in a compiled plan."""
    import torch

    out = torch.empty(1)

    def ready(x: Any) -> Any:
        return out

    registry = OpRegistry()
    registry.register_impl(OpImpl(OP, "vendor.v0", BackendImplKind.VENDOR, ready, "v0"))
    layer = engine_layer(Bound, OpManager(registry), mode="compiled")
    x = torch.empty(2)
    called = Case("layer._forward_method(x)", layer=layer, x=x)
    one, by_rows = (
        Case(
            "layer._forward_method(x)",
            layer=engine_layer(Bound, manager(3), mode="compiled", policy=policy),
            x=x,
        )
        for policy in (ONE_ORDER, BY_SIZE)
    )
    return [
        (
            "opaque op of a compiled plan over a direct call",
            called,
            Case("f(x)", f=ready, x=x),
            None,
        ),
        ("  by size, over one order", by_rows, one, None),
    ]


def engine_layer(
    cls: type, owner: OpManager, mode: Any = "eager", policy: SelectionPolicy | None = None
) -> Any:
    """Build a layer of this class like an engine, with a plan."""
    settings = load_settings({})
    if policy is not None:
        vars(settings)["policy"] = policy
    with building(make_plan(owner, EngineFacts(settings, mode))):
        return cls()
