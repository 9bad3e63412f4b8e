"""Measuring the candidates of an op, with a clock that only kernels advance."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.policy import Mode
from vllm_fl_tools.engine import bench, tuning
from vllm_fl_tools.engine.timing import table_rows
from vllm_fl_tools.engine.tuning import Contender, OpTuning

BETWEEN, NO_GRAPH = "between the graphs of a prefill", "without a graph of 8 tokens"

SIZES = ModelSizes(16, 8, 4, 2, 8, 8, tokens=(1, 64), max_position=64)


class Machine:
    """A clock, and kernels that take a given time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: Counter[tuple[str, int]] = Counter()

    def kernel(
        self,
        name: str,
        us: float,
        fn: Callable[..., Any] | None = None,
        *,
        op: str = "silu_and_mul",
        supports: Callable[..., Any] | None = None,
        consumes: frozenset[str] = frozenset(),
    ) -> Contender:
        plain = fn or known_contracts().contracts[op].oracle

        def run(*args: Any) -> Any:
            self.now += us * 1e-6
            self.calls[name, args[0].shape[0]] += 1
            return rounded(plain(*args), args[0].dtype)

        return Contender(name, (impl_of(op, name, run, supports=supports, consumes=consumes),))

    def against(
        self,
        us: float,
        fn: Callable[..., Any] | None = None,
        *,
        op: str = "silu_and_mul",
        supports: Callable[..., Any] | None = None,
        bare: bool = False,
        **more: Any,
    ) -> OpTuning:
        """`vendor.fast`, and a default that takes 30 µs and is a bare function of vLLM or not."""
        default = dataclasses.replace(self.kernel("vendor.default", 30, op=op), bare=bare)
        fast = self.kernel("vendor.fast", us, fn, op=op, supports=supports)
        return self.tuning(default, fast, **more)

    def tuning(self, *contenders: Contender, mode: Mode = "eager", **more: Any) -> OpTuning:
        spec = known_contracts().contracts[contenders[0].impls[0].op_name]
        device = torch.device("cpu")
        known = spec, contenders, "vendor.default", mode, torch.float32, device, SIZES
        return OpTuning(*known, clock=lambda: self.now, **more)


def impl_of(op: str, name: str, fn: Callable[..., Any], **more: Any) -> OpImpl:
    return OpImpl(op, name, BackendImplKind.VENDOR, fn, name.rpartition(".")[2], **more)


def rounded(result: Any, dtype: torch.dtype) -> Any:
    if isinstance(result, tuple):
        return tuple(part if part is None else part.to(dtype) for part in result)
    return result.to(dtype)


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench, tuning):
        monkeypatch.setattr(module, "cold_bytes", lambda device: 1024)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def silu(x: torch.Tensor) -> torch.Tensor:
    return known_contracts().contracts["silu_and_mul"].oracle(x)


def wrong_at(*counts: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        result = silu(x)
        if x.shape[0] in counts:
            result[-1, -1] += 100
        return result

    return fn


class Capturing(tuning.Bench):
    """Measures as if its calls were captured in graphs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.captures = True

    def _captured(self, run: Callable[[], None], calls: int) -> Any:
        def once() -> float:
            start = self.clock()
            run()
            return (self.clock() - start) / calls * 1e6

        return once


class TestChoosing:
    def test_the_fastest_wins_and_its_figures_are_exact(self, machine: Machine) -> None:
        found = machine.against(10).measure(8)
        assert found.winner == "vendor.fast"
        fast, default = found.figures()
        assert (fast.us, fast.low, fast.high, fast.ratio) == pytest.approx((10, 10, 10, 3))
        assert (fast.impl, fast.n, fast.ratio_low) == ("vendor.fast", 11, 3)
        assert (default.us, default.n, default.ratio) == (pytest.approx(30), 11, None)

    def test_forms_are_summed(self, machine: Machine) -> None:
        op = machine.against(10, op="rms_norm")
        assert len(op.forms) > 1
        fast, _ = op.measure(8).figures()
        assert fast.us == pytest.approx(10 * len(op.forms))

    def test_who_is_slower_in_one_form_does_not_win_by_the_others(self, machine: Machine) -> None:
        oracle = known_contracts().contracts["rms_norm"].oracle

        def slow_with_a_residual(x: Any, residual: Any, *rest: Any) -> Any:
            machine.now += 0 if residual is None else 25e-6
            return oracle(x, residual, *rest)

        found = machine.against(10, slow_with_a_residual, op="rms_norm").measure(8)
        fast, default = found.figures()
        assert fast.us is not None and default.us is not None and fast.us < default.us
        assert "residual" in fast.slower and fast.slower.endswith("0.86")
        assert default.slower == ""
        assert found.winner == "default"

    def test_of_calls_that_a_layer_makes_once_each_the_sum_decides(self, machine: Machine) -> None:
        oracle = known_contracts().contracts["linear"].oracle

        def slow_with_one_weight(x: Any, weight: Any, *rest: Any) -> Any:
            machine.now += 25e-6 if len(weight) == first else 0
            return oracle(x, weight, *rest)

        for once, winner in ((False, "default"), (True, "vendor.fast")):
            op = machine.against(10, slow_with_one_weight, op="linear", once=once)
            first = int(op.forms[0].name.rpartition(" -> ")[2])
            found = op.measure(8)
            assert len(op.forms) > 1 and found.winner == winner
            assert bool(found.slower) is not once

    @pytest.mark.parametrize(
        ("us", "captured", "between", "busy_at", "where"),
        [
            pytest.param(10, 0, False, "", "", id="it saves more than its launch costs"),
            pytest.param(25, 0, False, "", NO_GRAPH, id="it saves less"),
            pytest.param(25, 8, False, "", "", id="a graph launches it"),
            pytest.param(25, None, False, "", "", id="not known"),
            # A cache write is in the graph of a decoding step, but not of a prefill.
            pytest.param(10, 8, True, "", "", id="between graphs it saves more"),
            pytest.param(25, 8, True, "", BETWEEN, id="between graphs of that size"),
            pytest.param(25, None, True, "", BETWEEN, id="between graphs of unknown sizes"),
            pytest.param(25, 0, True, "", NO_GRAPH, id="no graph to be between"),
            pytest.param(25, 0, False, "8", "", id="the device is busy"),
            pytest.param(25, 0, False, "16", NO_GRAPH, id="it is busy at other sizes"),
        ],
    )
    def test_where_no_graph_serves_the_launch_through_python_counts(
        self,
        machine: Machine,
        monkeypatch: pytest.MonkeyPatch,
        us: float,
        captured: Any,
        between: bool,
        busy_at: str,
        where: str,
    ) -> None:
        # Only kernels advance the clock: a PyTorch operator takes no time to launch.
        monkeypatch.setattr(tuning, "Bench", Capturing)
        op = machine.against(
            us,
            bare=True,
            captured=captured,
            between_graphs=between,
            products=lambda tokens: 2001.0 if str(tokens) == busy_at else 1999.0,
        )
        found = op.measure(8)
        assert found.winner == ("default" if where else "vendor.fast")
        slower = {figure.impl: figure.slower for figure in found.figures()}
        assert slower["vendor.default"] == ""
        more = f"{us} µs more to launch, and 5 µs less on the device"
        assert slower["vendor.fast"] == (f"{where}: {op.forms[0].name}: {more}" if where else "")

    @pytest.mark.parametrize("traced", [None, frozenset({"vendor.default"}), frozenset()])
    def test_only_what_is_traced_is_compiled(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, traced: Any
    ) -> None:
        compiled = []

        def noted(self: OpTuning, function: Any, form: Any) -> Any:
            compiled.append(function)
            return function

        monkeypatch.setattr(OpTuning, "_compiled", noted)
        op = machine.against(10, mode="compiled", traced=traced)
        assert op.measure(8).winner == "vendor.fast"
        assert len(compiled) == len(op.forms) * (2 if traced is None else len(traced))


class TestWrongAtOneSizeOnly:
    def test_it_is_recorded_never_timed_there_and_chosen_elsewhere(self, machine: Machine) -> None:
        op = machine.against(10, wrong_at(16))
        found = [op.measure(count) for count in (1, 8, 16, 32)]
        assert [(row.up_to, row.impl) for row in table_rows(found)] == [
            *((8, "vendor.fast"), (16, "default"), (32, "vendor.fast"))
        ]
        at_16 = found[2]
        assert "vendor.fast" not in at_16.times
        assert machine.calls["vendor.fast", 16] == 1  # the check that found it
        assert machine.calls["vendor.fast", 8] > 100
        figure = next(f for f in at_16.figures() if f.impl == "vendor.fast")
        assert figure.us is None
        assert "1 of 128 elements exceed the tolerance; worst at" in figure.rejected
        assert "16 x" in figure.rejected

    def test_large_values_count(self, machine: Machine) -> None:
        def overflows(x: torch.Tensor) -> torch.Tensor:
            return silu(x).where(x[:, :8].abs() < 50, 0)

        found = machine.against(10, overflows).measure(8)
        assert "large values" in found.rejected["vendor.fast"]

    def test_the_wrong_default_stays_since_nothing_was_compared_with_it(
        self, machine: Machine
    ) -> None:
        op = machine.tuning(
            machine.kernel("vendor.default", 30, wrong_at(8)), machine.kernel("vendor.fast", 10)
        )
        found = op.measure(8)
        assert found.winner == "default"
        assert found.rejected["vendor.default"].startswith("incorrect: ")
        (fast, _) = found.figures()
        assert (fast.us, fast.ratio) == (pytest.approx(10), None)


class TestWhoDoesNotRun:
    @pytest.mark.parametrize("by", ["supports", "NotImplementedError"])
    def test_a_size_that_it_refuses(self, machine: Machine, by: str) -> None:
        def refusing(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 16:
                raise NotImplementedError("not 16 rows")
            return silu(x)

        def supports(x: torch.Tensor) -> Any:
            return x.shape[0] != 16 or "not 16 rows"

        how: Any = {"supports": supports} if by == "supports" else {"fn": refusing}
        op = machine.against(10, **how)
        found = [op.measure(count) for count in (8, 16, 32)]
        assert [one.winner for one in found] == ["vendor.fast", "default", "vendor.fast"]
        assert found[1].rejected["vendor.fast"].startswith("unsupported: not 16 rows")
        assert machine.calls["vendor.fast", 16] <= 1

    @pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
    def test_what_it_refuses_of_the_forms_is_the_defaults(
        self, machine: Machine, mode: Mode
    ) -> None:
        def without_residual(x: Any, residual: Any, *rest: Any) -> Any:
            return residual is None or "no kernel for a residual"

        op = machine.against(10, op="rms_norm", supports=without_residual, mode=mode)
        found = op.measure(8)
        assert not found.rejected
        added = sum("residual" in form.name for form in op.forms)
        assert 0 < added < len(op.forms)
        figure = next(f for f in found.figures() if f.impl == "vendor.fast")
        assert figure.us == pytest.approx(30 * added + 10 * (len(op.forms) - added))
        assert found.winner == "vendor.fast"

    def test_one_that_raises_only_when_it_is_called_often(self, machine: Machine) -> None:
        def tired(x: torch.Tensor) -> torch.Tensor:
            if machine.calls["vendor.fast", 8] > 50:
                raise RuntimeError("no more")
            return silu(x)

        found = machine.against(10, tired).measure(8)
        assert "no more" in found.rejected["vendor.fast"]
        assert found.winner == "default"
        assert {*found.times} == {"vendor.default"}

    def test_one_that_takes_too_long(self, machine: Machine) -> None:
        entered: list[str] = []

        @contextmanager
        def over(name: str) -> Iterator[None]:
            entered.append(name)
            if name == "vendor.fast":
                raise TimeoutError("given up after 5 s")
            yield

        found = machine.against(10, over=over).measure(8)
        assert "given up after 5 s" in found.rejected["vendor.fast"]
        assert {*found.times} == {"vendor.default"}
        assert entered.count("vendor.fast") == 1


def test_calls_in_turn_have_weights_that_no_cache_holds(machine: Machine) -> None:
    """In a step each layer reads its own weights. 1024 bytes represent the caches here."""
    tuning = machine.against(10, op="linear")
    assert tuning.measure(2).winner == "vendor.fast"
    (form,) = (form for form in tuning.forms if form.name == "32 -> 16")
    sets = tuning._with_own([tuning._laid(form, 2, number) for number in range(8)])
    weights = [laid.args[1] for laid in sets]
    distinct = dict.fromkeys(weight.data_ptr() for weight in weights)
    assert next(iter(distinct)) == form.static.arguments["weight"].data_ptr()
    assert (len(distinct) - 1) * weights[0].nbytes >= 1024 > (len(distinct) - 2) * weights[0].nbytes
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert len({laid.args[0].data_ptr() for laid in sets}) == 8


def test_what_is_consumed_is_fresh_at_every_call(machine: Machine) -> None:
    seen: list[float] = []

    def in_place(x: Any, residual: Any, *rest: Any) -> Any:
        result = rounded(
            known_contracts().contracts["rms_norm"].oracle(x, residual, *rest), x.dtype
        )
        if residual is None:
            return result
        seen.append(float(x.abs().sum()))
        x.zero_()
        residual.zero_()
        x.add_(result[0])
        residual.add_(result[1])
        return x, residual

    consumes = frozenset({"x", "residual"})
    fast = machine.kernel("vendor.fast", 10, in_place, op="rms_norm", consumes=consumes)
    op = machine.tuning(machine.kernel("vendor.default", 30, op="rms_norm"), fast)
    assert op.measure(8).winner == "vendor.fast"
    assert len(seen) > 20 * tuning.ROUNDS
    often = [value for value, count in Counter(seen).items() if count >= tuning.ROUNDS - 1]
    # Equal inputs in every round, apart from checks and warm-up.
    assert sum(Counter(seen)[value] for value in often) > 0.9 * len(seen)


class TestSeveralFunctionsOfVllm:
    def test_the_first_that_gets_a_form_right_is_timed_for_it(self, machine: Machine) -> None:
        oracle = known_contracts().contracts["rms_norm"].oracle

        def plain(x: Any, residual: Any, *rest: Any) -> Any:
            return oracle(x, None, *rest)

        def fused(x: Any, residual: Any, *rest: Any) -> Any:
            if residual is None:
                raise TypeError("expected Tensor as residual")
            return oracle(x, residual, *rest)

        parts = (
            machine.kernel("vendor.plain", 5, plain, op="rms_norm"),
            machine.kernel("vendor.fused", 7, fused, op="rms_norm"),
        )
        stock = Contender("stock", tuple(c.impls[0] for c in parts), bare=True)
        op = machine.tuning(machine.kernel("vendor.default", 30, op="rms_norm"), stock)
        found = op.measure(8)
        assert not found.rejected
        with_residual = sum("residual" in form.name for form in op.forms)
        without = len(op.forms) - with_residual
        assert with_residual
        figure = next(f for f in found.figures() if f.impl == "stock")
        assert figure.us == pytest.approx(5 * without + 7 * with_residual)

    def test_its_results_may_lie_in_any_layout(self, machine: Machine) -> None:
        def turned(x: torch.Tensor) -> torch.Tensor:
            return silu(x).T.contiguous().T

        stock = machine.kernel("vendor.stock", 10, turned)
        for bare in (False, True):
            contender = Contender("stock", stock.impls, bare=bare)
            op = machine.tuning(machine.kernel("vendor.default", 30), contender)
            assert ("stock" in op.measure(8).rejected) is not bare

    @pytest.mark.parametrize("is_right", [True, False])
    def test_what_is_compared_need_not_be_what_is_timed(
        self, machine: Machine, is_right: bool
    ) -> None:
        """vLLM's graph may not combine results as the op does."""
        together = machine.kernel("vendor.stock", 50, None if is_right else wrong_at(8))
        less = machine.kernel("vendor.less", 10, lambda x: x.chunk(2, dim=-1))
        apart = {"vendor.stock": less.impls[0].fn}
        stock = Contender("stock", together.impls, bare=True, apart=apart)
        found = machine.tuning(machine.kernel("vendor.default", 30), stock).measure(8)
        assert ("stock" in found.rejected) is not is_right
        figures = {figure.impl: figure.us for figure in found.figures()}
        assert figures["stock"] == (pytest.approx(10) if is_right else None)
        assert found.winner == ("stock" if is_right else "default")


class TestCompiled:
    @pytest.fixture(autouse=True)
    def traced_only(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(tuning, "LOWERED_BY", "aot_eager")
        yield
        torch._dynamo.reset()

    def test_heads_of_one_projection_at_many_sizes_in_one_graph(self, machine: Machine) -> None:
        """Each form has its own graph, although its guards are dropped."""
        spec = known_contracts().contracts["rotary_embedding"]
        native = spec.second_form
        assert native is not None

        def traced(*args: Any) -> Any:
            return rounded(native(*args), args[0].dtype)

        def in_place(*args: Any) -> Any:
            for arg, part in zip(args, traced(*args), strict=False):
                arg.copy_(part)
            return args[:2]

        consumes = frozenset({"query", "key"})
        op = "rotary_embedding"
        impls = (
            impl_of(op, "vendor.default", traced, traceable=True),
            impl_of(op, "vendor.opaque", in_place, consumes=consumes),
        )
        contenders = [Contender(impl.impl_id, (impl,)) for impl in impls]
        found = machine.tuning(*contenders, mode="compiled")
        assert len(found.forms) == 2
        for tokens in (1, 64):
            one = found.measure(tokens)
            assert not one.rejected
            assert {*one.times} == {"vendor.default", "vendor.opaque"}

    def test_one_that_cannot_be_traced(self, machine: Machine) -> None:
        def branching(x: torch.Tensor) -> torch.Tensor:
            return silu(x).float() if bool(x.sum() > 0) else -silu(-x).float()

        impls = (
            impl_of("silu_and_mul", "vendor.default", lambda x: silu(x).float()),
            impl_of("silu_and_mul", "vendor.branches", branching, traceable=True),
        )
        op = machine.tuning(*(Contender(i.impl_id, (i,)) for i in impls), mode="compiled")
        found = op.measure(8)
        assert {*found.rejected} == {"vendor.branches"}
        assert found.rejected["vendor.branches"].startswith("raised: ")
