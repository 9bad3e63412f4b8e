"""Contracts outlive plugins: trailing optional parameters may be missing or additional."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import managing
from older_forms import LACKS, by_name, held, newer, of, of_first, rms_norm
from sample_ops import sample_contracts

from vllm_fl.contracts import OpSpec
from vllm_fl.engine.plan import Plan, PlanEntry
from vllm_fl.errors import AllFailedError, PluginError
from vllm_fl.plugins.registry import known_contracts


def whole(x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None) -> Any:
    return ("whole", variance_size)


def test_a_call_with_what_it_lacks_is_refused_by_name_and_goes_on() -> None:
    x = torch.ones(2, 8)
    alone = managing(of("rms_norm", rms_norm))
    with pytest.raises(AllFailedError) as caught:
        alone.call("rms_norm", x, None, None, 1e-6, 4)
    assert caught.value.causes == (("vendor.acme", "has no parameter variance_size"),)
    assert alone.demotions == {}

    both = managing(of("rms_norm", rms_norm), of("rms_norm", whole, "beta"))
    assert both.call("rms_norm", x, None, None, 1e-6, variance_size=4) == ("whole", 4)
    assert both.demotions == {}
    assert isinstance(both.call("rms_norm", x, None, None, 1e-6), torch.Tensor)


def test_supports_may_lack_it_too_and_either_of_the_two() -> None:
    def small(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        return True if x.shape[-1] < 100 else "too wide"

    x, wide = torch.ones(2, 8), torch.ones(2, 200)
    for fn in (rms_norm, whole):
        impl = held(of("rms_norm", fn, supports=small))
        assert impl.supports is not None
        assert impl.supports(x, None, None, 1e-6, None) is True
        assert impl.supports(wide, None, None, 1e-6) == "too wide"
        assert impl.supports(x, None, None, 1e-6, 4) == "has no parameter variance_size"
    asked: list[Any] = []

    def knowing(
        x: Any, residual: Any, weight: Any, epsilon: float, variance_size: Any = None
    ) -> Any:
        asked.append(variance_size)
        return True

    supports = held(of("rms_norm", rms_norm, supports=knowing)).supports
    assert supports is not None
    assert supports(x, None, None, 1e-6, 4) == "has no parameter variance_size"
    assert supports(x, None, None, 1e-6) is True
    assert asked == [None]


def test_the_probe_of_the_older_form_is_kept() -> None:
    class Backend:
        def is_available(self) -> bool:
            return False

        def rms_norm(self, x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
            return x

    assert held(of("rms_norm", Backend().rms_norm)).is_available() is False


def test_inplace_is_off_unless_consumption_is_declared() -> None:
    def rotary_embedding(
        query: Any,
        key: Any,
        cos: Any,
        sin: Any,
        position_ids: Any,
        rotary_interleaved: bool = False,
        inplace: bool = True,
    ) -> Any:
        out = query if inplace else query.clone()
        return out.add_(1), key

    query = torch.zeros(1, 1, 2)
    args = (query, None, torch.ones(2, 1), torch.ones(2, 1), torch.tensor([0]))
    got, _ = managing(of("rotary_embedding", rotary_embedding)).call("rotary_embedding", *args)
    assert got.eq(1).all() and query.eq(0).all()

    def shorter(query: Any, key: Any, cos: Any, sin: Any, position_ids: Any, inplace: Any = 1):  # type: ignore[no-untyped-def]
        assert inplace is False
        return query, key

    held(of("rotary_embedding", shorter)).fn(*args)
    declared = of("rotary_embedding", rotary_embedding, consumes={"query", "key"})
    held(declared).fn(*args)
    assert query.eq(1).all()  # allowed: its caller makes the copies
    got, _ = managing(declared).call("rotary_embedding", *args)
    assert query.eq(1).all() and got.eq(2).all()


# A contract that has gained parameters of every kind, from both sides.


@pytest.fixture
def grown() -> Iterator[OpSpec]:
    with sample_contracts():
        yield known_contracts().contracts["grown"]


per_form = pytest.mark.parametrize(("fn", "lacks"), LACKS, ids=lambda v: getattr(v, "__name__", ""))
REST = {
    "mode": ("negate", False, 0.1, None),
    "flip": ("none", True, 0.1, None),
    "factor": ("none", False, 0.5, None),
    "bias": ("none", False, 0.1, torch.ones(8)),
}
X = torch.arange(16.0).view(2, 8)


def answers(call: Callable[..., Any], spec: OpSpec, lacks: list[str]) -> None:
    """`call` returns the oracle's result; only arguments in `lacks` are unsupported, by name."""
    for given in ((), ("none",), ("none", False, float("0.1"), None)):  # equal, but another object
        torch.testing.assert_close(call(X, 1.0, *given).double(), spec.oracle(X, 1.0))
    for name, rest in REST.items():
        if name in lacks:
            with pytest.raises(AllFailedError) as caught:
                call(X, 1.0, *rest)
            assert [(i, str(cause)) for i, cause in caught.value.causes] == [
                ("vendor.acme", f"has no parameter {name}")
            ]
        else:
            want = spec.oracle(X, 1.0, *rest)
            torch.testing.assert_close(call(X, 1.0, *rest).double(), want)


@per_form
def test_every_kind_of_trailing_parameter(fn: Any, lacks: list[str], grown: OpSpec) -> None:
    manager = managing(of("grown", fn))
    answers(manager.resolve("grown"), grown, lacks)
    if "flip" not in lacks:
        manager.call("grown", X, shift=1.0, flip=True)
    assert manager.demotions == {}


@pytest.mark.parametrize(("fn", "lacks"), LACKS[1:3], ids=["missing", "by name"])
@pytest.mark.parametrize("traceable", [False, True])
def test_every_kind_in_a_compiled_plan(
    fn: Any, lacks: list[str], traceable: bool, grown: OpSpec
) -> None:
    manager = managing(of("grown", fn, traceable=traceable))
    entries = {"grown": PlanEntry("grown", manager.rows("grown"))}
    plan = Plan("compiled", entries, strict=True, contracts={"grown": grown})
    bound = plan.as_compiled("grown", *plan.entries["grown"].firsts)
    compiled = torch.compile(bound, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X, 1.0).double(), grown.oracle(X, 1.0))
    for name, rest in REST.items():
        if name in lacks:
            with pytest.raises(Exception, match=f"has no parameter {name}"):
                compiled(X, 1.0, *rest)
        else:
            got = compiled(X, 1.0, *rest).double()
            torch.testing.assert_close(got, grown.oracle(X, 1.0, *rest))


def test_a_tensor_is_another_value_than_any_default(grown: OpSpec) -> None:
    alone = managing(of("grown", of_first))
    for tensor in (torch.ones(3), torch.tensor(False), torch.ones(0)):
        with pytest.raises(AllFailedError, match="has no parameter flip"):
            alone.call("grown", X, 1.0, "none", tensor)


def test_inplace_may_precede_newer_parameters(grown: OpSpec) -> None:
    def before_newer(
        x: Any, shift: Any, mode: Any = "none", inplace: Any = True, flip: Any = False
    ) -> Any:
        assert inplace is False
        return by_name(x, shift, mode=mode, flip=flip)

    answers(managing(of("grown", before_newer)).resolve("grown"), grown, ["factor", "bias"])


def test_what_a_newer_contract_lets_be_overwritten_is_never_given(grown: OpSpec) -> None:
    assert held(of("grown", newer, consumes={"offsets"})).consumes == frozenset()
    with pytest.raises(PluginError, match="consumes has shift"):
        held(of("grown", newer, consumes={"shift"}))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, shift, flip=False, mode="none": x,
        lambda x, shift, *, flip=False, mode="none": x,
        lambda x, shift, mode="negate": x,
        lambda x, shift, mode="none", *, flip: x,
        lambda x, wrong, *args: x,
        lambda x, **kwargs: x,
        lambda x, shift=1.0: x,
        lambda x: x,
    ],
)
def test_other_forms_are_still_refused(fn: Any, grown: OpSpec) -> None:
    with pytest.raises(PluginError, match="but the contract has"):
        held(of("grown", fn))
    with pytest.raises(PluginError, match="its supports takes"):
        held(of("grown", newer, supports=fn))


@pytest.mark.parametrize(
    "take",
    [lambda call: lambda *args: call(*args), lambda call: lambda x, *rest, **more: call(x, *rest)],
)
def test_one_that_takes_any_arguments_is_given_the_contracts(take: Any) -> None:
    def gelu(x: Any, approximate: Any = "none") -> Any:
        return x, approximate

    impl = held(of("gelu_and_mul", take(gelu), supports=take(lambda x, approximate: True)))
    assert impl.supports is not None
    for one in (impl.fn, impl.supports):
        parameters = inspect.signature(one).parameters.values()
        assert [*map(str, parameters)] == ["x", "approximate='none'"]
    assert impl.fn(1) == (1, "none") and impl.fn(1, approximate="tanh") == (1, "tanh")
    assert impl.supports(1) is True
