"""Orders by size in graphs compiled by range: vLLM's splits, and inlined code."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import vllm.model_executor.layers.layernorm  # before the platform is replaced
import vllm.platforms
from builders import engine_of, half, kind_of, managing, planning, silu
from torch._inductor.virtualized import V
from tracing import traced
from vllm import ir
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.clone_elimination import UnsafeCloneEliminationPass
from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationMode, VllmConfig
from vllm.config.utils import Range as VllmRange

from vllm_fl.engine.plan import Plan, release_number, take_number
from vllm_fl.engine.ranges import Range
from vllm_fl.integration.carried import Carried
from vllm_fl.integration.engines import calling
from vllm_fl.integration.graphs import lowering, passes, ranges
from vllm_fl.integration.graphs.lowering import OWNER
from vllm_fl.integration.graphs.state import in_graphs
from vllm_fl.integration.patchers import ir as ir_patcher
from vllm_fl.integration.patching import by_range
from vllm_fl.integration.platform import PlatformOverlay
from vllm_fl.plugins.types import OpImpl

OP = "silu_and_mul"
NOTHING: frozenset[str] = frozenset()
LARGEST = 64

ROWS = {"<=4": "vendor", "<=16": "reference", "rest": "flagos"}


def three(**second: Any) -> tuple[OpImpl, ...]:
    """The implementations of `ROWS`; by default the second is not traceable."""
    return (
        silu("vendor.acme", 1, traceable=True),
        silu("reference.torch", 2, **second),
        silu("default.flagos", 3, traceable=True),
    )


def norm(impl_id: str, mark: float, **fields: Any) -> OpImpl:
    """A `rms_norm` that returns x + mark, and the residual if there is one."""

    def rms_norm(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> Any:
        return x + mark if residual is None else (x + mark, residual * 1)

    kind, vendor = kind_of(impl_id)
    return OpImpl("rms_norm", impl_id, kind, rms_norm, vendor, traceable=True, **fields)


def config(
    endpoints: list[int] | None = None, sizes: list[int] | None = None, **fields: Any
) -> Any:
    fields = {"mode": CompilationMode.VLLM_COMPILE, "backend": "inductor", **fields}
    fields.setdefault("cudagraph_capture_sizes", [])
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            compile_ranges_endpoints=endpoints, compile_sizes=sizes, **fields
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=LARGEST),
        additional_config={"vllm_fl": Carried(plan="0123")},
    )


Planned = Callable[..., Plan]


@pytest.fixture
def planned() -> Iterator[Planned]:
    """`planned(order, impl, …)`: a compiled engine's plan, unregistered after the test."""
    taken: list[Plan] = []

    def make(order: Any, *impls: OpImpl) -> Plan:
        manager = managing(*impls, per_op_order={impls[0].op_name: order})
        taken.append(take_number(planning(manager, "compiled")))
        return taken[-1]

    yield make
    for plan in taken:
        release_number(plan)


def lowered(
    plan: Plan,
    sizes: tuple[int, int],
    function: Callable[..., Any],
    *args: torch.Tensor,
    apart: list[int] | None = None,
    afterwards: Sequence[Callable[[torch.fx.Graph], None]] = (),
) -> tuple[Any, list[str]]:
    """(a range's result after the pass, our or IR operators left; with `afterwards`, which are
    vLLM's passes after ours, also copies). If the range `sizes` is a single size, the graph is
    traced with it. `apart` is `compile_sizes`."""
    unknown = [arg.ndim > 1 and sizes[0] != sizes[1] for arg in args]
    with traced(function, args, unknown) as (mode, module):
        run = lowering.RangeLowering(engine_of(plan), config([LARGEST], apart))
        with V.set_fake_mode(mode), pass_context(VllmRange(*sizes)):
            for each in (run, *afterwards):
                each(module.graph)
    module.graph.lint()
    module.recompile()
    counted = ("vllm_", "aten.clone") if afterwards else "vllm_"
    left = [str(n.target) for n in module.graph.nodes if str(n.target).startswith(counted)]
    return module(*args), left


def reported(plan: Plan, of: Any) -> Any:
    engine = engine_of(plan)
    engine.worker.vllm_config = of
    return ranges.report(engine, by_range(plan))


@pytest.mark.parametrize(
    ("sizes", "tokens", "mark", "stays"),
    [
        ((1, 4), 3, 1, False),
        ((1, 1), 1, 1, False),
        ((4, 5), 4, 1, True),
        ((1, 5), 3, 1, True),
        ((5, 16), 8, 2, True),
        ((5, 5), 5, 2, True),
        ((16, 64), 20, 3, True),
        ((17, 64), 20, 3, False),
    ],
)
def test_a_range_of_one_traceable_choice_has_its_code_and_no_operator(
    planned: Planned, sizes: tuple[int, int], tokens: int, mark: int, stays: bool
) -> None:
    plan = planned(ROWS, *three())
    bound = plan.bind(OP, object(), NOTHING)
    x = torch.randn(tokens, 8)
    result, left = lowered(plan, sizes, lambda x: bound(x * 2) + 1, x)
    torch.testing.assert_close(result, half(x * 2) + mark + 1)
    assert len(left) == stays
    impl_id = {1: "vendor.acme", 3: "default.flagos"}.get(mark, "")
    assert in_graphs(engine_of(plan)).inlined[OP, Range(*sizes), impl_id] == (not stays)


def test_code_in_a_graph_has_the_name_of_its_implementation(planned: Planned) -> None:
    """A profiler attributes a fused kernel by these names."""
    plan = planned(ROWS, *three())
    bound = plan.bind(OP, object(), NOTHING)
    owners: dict[str, Any] = {}

    def look(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            owner = (node.meta.get("nn_module_stack") or {}).get(OWNER)
            owners.setdefault(str(node.target), []).append(owner)

    lowered(plan, (1, 4), lambda x: bound(x * 2) + 1, torch.randn(3, 8), afterwards=[look])
    assert owners["aten.mul.Tensor"] == [None], "this is not the op's"
    assert (OP, "vendor.acme") in owners["aten.add.Tensor"] and None in owners["aten.add.Tensor"]


def test_a_size_that_is_compiled_apart_is_not_of_the_range_around_it(planned: Planned) -> None:
    order = {"<=1": "vendor", "rest": "flagos"}
    plan = planned(order, *three())
    bound = plan.bind(OP, object(), NOTHING)
    x = torch.randn(3, 8)
    assert lowered(plan, (1, 64), bound, x)[1]
    result, left = lowered(plan, (1, 64), bound, x, apart=[1])
    assert not left and torch.equal(result, half(x) + 3)


@pytest.mark.parametrize(("sizes", "stays"), [((1, 4), True), ((1, 2), False)])
def test_rows_go_by_what_the_call_has_and_not_by_vllms_number_of_tokens(
    planned: Planned, sizes: tuple[int, int], stays: bool
) -> None:
    """The call has two rows per token: up to 8 rows for vLLM's range of at most 4 tokens."""
    plan = planned(ROWS, *three())
    bound = plan.bind(OP, object(), NOTHING)
    x = torch.randn(2, 16)
    result, left = lowered(plan, sizes, lambda x: bound(x.reshape(-1, 8)), x)
    assert bool(left) is stays
    torch.testing.assert_close(result, half(x.reshape(-1, 8)) + 1)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda bound, x, y: bound(torch.cat([x, y])), id="of two unknowns"),
        pytest.param(lambda bound, x, y: bound(x[: x.shape[0] // 2 + 1]), id="not linear"),
    ],
)
def test_with_an_unknown_token_count_the_operator_stays_and_is_logged(
    planned: Planned, function: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(ROWS, *three())
    bound = plan.bind(OP, object(), NOTHING)
    x, y = torch.randn(3, 8), torch.randn(5, 8)
    with caplog.at_level(logging.WARNING, "vllm_fl.engine"):
        for _ in range(2):  # graphs
            assert lowered(plan, (1, 4), lambda x, y: function(bound, x, y), x, y)[1]
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith(f"Op '{OP}': 'vendor.acme' is not inlined everywhere")
    first, *_ = reported(plan, config([4, 16, 64]))[OP]
    assert (first["places"], first["operators"]) == (0, 2)


def test_what_cannot_be_traced_stays_an_operator_and_is_named(
    planned: Planned, caplog: pytest.LogCaptureFixture
) -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return half(x) + float(x.sum().item() > 1e30)

    plan = planned(
        {"<=4": "vendor", "rest": "flagos"},
        silu("vendor.acme", fn=reads, traceable=True),
        three()[2],
    )
    bound = plan.bind(OP, object(), NOTHING)
    x = torch.randn(3, 8)
    with caplog.at_level(logging.WARNING, "vllm_fl.engine"):
        result, left = lowered(plan, (1, 4), bound, x)
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith(
        f"Op '{OP}': graphs for 1-4 tokens cannot inline 'vendor.acme' and run it"
    )
    assert left and torch.equal(result, half(x))


def test_a_result_that_is_a_view_of_an_argument_becomes_a_tensor_of_its_own(
    planned: Planned,
) -> None:
    """The surrounding graph was traced with contiguous results that share no memory."""

    def view(x: torch.Tensor) -> torch.Tensor:
        return x[..., : x.shape[-1] // 2]

    first = silu("vendor.acme", fn=view, traceable=True)
    plan = planned({"<=4": "vendor", "rest": "flagos"}, first, three()[2])
    bound = plan.bind(OP, object(), NOTHING)
    x = torch.randn(3, 8)
    result, left = lowered(plan, (1, 4), bound, x)
    assert not left and torch.equal(result, view(x))
    assert result.is_contiguous() and result.data_ptr() != x.data_ptr()


def writes_into_its_copy(x: torch.Tensor) -> torch.Tensor:
    """SiluAndMul on its own copy, in place and through a view."""
    own = x.clone()
    width = own.shape[-1] // 2
    own[..., :width].mul_(torch.sigmoid(own[..., :width]))
    return own[..., :width] * own[..., width:]


def test_what_writes_into_a_copy_of_its_own_leaves_the_argument_alone(planned: Planned) -> None:
    """A graph has no writes, and torch's passes remove copies that look unnecessary."""
    first = silu("vendor.acme", fn=writes_into_its_copy, traceable=True)
    plan = planned({"<=4": "vendor", "rest": "flagos"}, first, three()[2])
    bound = plan.bind(OP, object(), NOTHING)
    x = torch.randn(3, 8)
    before = x.clone()
    (result, read), left = lowered(plan, (1, 4), lambda x: (bound(x), x + 0), x)
    assert not left
    torch.testing.assert_close(result, torch.nn.functional.silu(before[:, :4]) * before[:, 4:])
    assert torch.equal(x, before) and torch.equal(read, before)


@pytest.mark.parametrize(("sizes", "tokens", "mark"), [((1, 4), 3, 1), ((5, 64), 8, 3)])
def test_ops_of_vllms_ir_are_lowered_by_range(
    planned: Planned, sizes: tuple[int, int], tokens: int, mark: int
) -> None:
    plan = planned(
        {"<=4": "vendor", "rest": "flagos"}, norm("vendor.acme", 1), norm("default.flagos", 3)
    )

    def model(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        y, residual = ir.ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        return ir.ops.rms_norm(y, weight, 1e-6), residual

    x, residual, weight = torch.randn(tokens, 8), torch.randn(tokens, 8), torch.ones(8)
    (result, passed), left = lowered(plan, sizes, model, x, residual, weight)
    assert not left
    torch.testing.assert_close(result, x + 2 * mark)
    torch.testing.assert_close(passed, residual)
    assert lowered(plan, (1, 64), model, x, residual, weight)[1], "no choice holds for all"


@pytest.fixture
def our_provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's IR has our provider in first place during the test."""
    ir_patcher.register_provider()
    with contextlib.ExitStack() as stack:
        for name in ("rms_norm", "fused_add_rms_norm"):
            op = getattr(ir.ops, name)
            stack.callback(op.impls.pop, ir_patcher.PROVIDER)
            stack.enter_context(op.set_priority([ir_patcher.PROVIDER, "native"]))
        yield


@pytest.mark.usefixtures("our_provider")
@pytest.mark.parametrize("by_range", [True, False])
def test_a_row_that_writes_in_place_needs_no_copies_where_the_others_are_inlined(
    planned: Planned, by_range: bool
) -> None:
    """Unless inlined by range, the largest row decides: one traced graph serves all rows."""

    def in_place(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> Any:
        if residual is None:
            return x + 1
        return x.add_(1), residual.mul_(1)

    kind, vendor = kind_of("vendor.acme")
    both = frozenset({"x", "residual"})
    first = OpImpl("rms_norm", "vendor.acme", kind, in_place, vendor, consumes=both)
    plan = planned({"<=4": "vendor", "rest": "flagos"}, first, norm("default.flagos", 3))
    engine_of(plan).facts = replace(engine_of(plan).facts, by_range=by_range)
    ir_patcher.Ir().apply(engine_of(plan))
    passes = [each(VllmConfig()) for each in (VllmIRLoweringPass, UnsafeCloneEliminationPass)]

    def model(x: torch.Tensor, residual: torch.Tensor) -> Any:
        return ir.ops.fused_add_rms_norm(x * 2, residual * 2, None, 1e-6)

    for sizes, tokens, mark in (((1, 4), 3, 1), ((5, 64), 8, 3)):
        x, residual = torch.randn(tokens, 8), torch.randn(tokens, 8)
        with calling(engine_of(plan)):
            (result, passed), left = lowered(plan, sizes, model, x, residual, afterwards=passes)
        torch.testing.assert_close(result, x * 2 + mark)
        torch.testing.assert_close(passed, residual * 2)
        assert len(left) == (mark == 1)  # the operator, and no copy
        assert all(in_its_schema(name) == by_range for name in left)


def in_its_schema(operator: str) -> bool:
    """Whether an operator's schema marks arguments as mutable."""
    _, name, overload = operator.split(".")
    found = getattr(getattr(torch.ops.vllm_fl, name), overload)
    return bool(found._schema.is_mutable)


def split(plan: Plan, entry: dict[str, Any] | None = None, **fields: Any) -> Any:
    changed = config(**fields)
    ranges.split(changed, by_range(plan), {} if entry is None else entry)
    return changed.compilation_config


@pytest.mark.parametrize(
    ("order", "endpoints", "sizes"),
    [
        (ROWS, [4, 64], []),
        ({"<=4": "vendor", "rest": "flagos"}, [4, 64], []),
        ({"<=1": "vendor", "rest": "flagos"}, [64], [1]),
        ({"<=1": "vendor", "<=8": "reference", "rest": "flagos"}, [8, 64], []),
        ({"<=1": "vendor", "<=8": "vendor", "rest": "reference"}, [8, 64], []),
        ({"<=4": "reference", "<=8": ["reference", "vendor"], "rest": "reference"}, [64], []),
        ("vendor", [64], []),
    ],
)
def test_vllms_ranges_are_split_at_the_edges_of_rows(
    planned: Planned, order: Any, endpoints: list[int], sizes: list[int]
) -> None:
    found = split(planned(order, *three()), endpoints=[64], sizes=[])
    assert (found.compile_ranges_endpoints, found.compile_sizes) == (endpoints, sizes)


def test_a_size_that_the_user_has_compiled_apart_is_no_end_of_a_range(planned: Planned) -> None:
    """vLLM's range extends beyond it, and no row applies to the whole range."""
    found = split(planned(ROWS, *three()), endpoints=[64], sizes=[4, 1])
    assert (found.compile_ranges_endpoints, found.compile_sizes) == ([4, 64], [4, 1])


def test_the_users_own_ranges_stay_and_ours_go_with_the_plan_that_had_them(
    planned: Planned,
) -> None:
    entry: dict[str, Any] = {}
    changed = config([16, 32, 64], [1, 8])
    by_four = planned({"<=4": "vendor", "rest": "flagos"}, *three())
    ranges.split(changed, by_range(by_four), entry)
    compilation = changed.compilation_config
    assert compilation.compile_ranges_endpoints == [4, 16, 32, 64]
    by_two = planned({"<=1": "vendor", "<=2": "flagos", "rest": "vendor"}, *three())
    ranges.split(changed, by_range(by_two), entry)
    assert compilation.compile_ranges_endpoints == [2, 16, 32, 64]
    ranges.split(changed, by_range(planned("vendor", *three())), entry)
    assert compilation.compile_ranges_endpoints == [16, 32, 64]
    assert compilation.compile_sizes == [1, 8]


@pytest.mark.parametrize(
    "fields", [{"mode": CompilationMode.DYNAMO_TRACE_ONCE}, {"backend": "eager"}], ids=str
)
def test_where_vllm_does_not_compile_by_range_nothing_is_split(
    planned: Planned, fields: Any
) -> None:
    plan = planned(ROWS, *three())
    assert split(plan, endpoints=None, **fields).compile_ranges_endpoints is None
    assert ranges.inlined_ranges(by_range(plan), config([4, 16, 64], [], **fields)) == {}


def test_what_is_reported_is_what_was_planned_and_what_became_of_it(planned: Planned) -> None:
    plan = planned(ROWS, *three())
    bound = plan.bind(OP, object(), NOTHING)
    for sizes in ((1, 4), (5, 16)):
        lowered(plan, sizes, bound, torch.randn(8, 8))
    chosen = ranges.inlined_ranges(by_range(plan), config([16, 64], []))[OP]
    assert ranges.describe_ranges(chosen) == "inlined in 1 of 2 ranges (17-64 tokens)"
    assert reported(plan, config([4, 16, 64])) == {
        OP: [
            {"first": 1, "last": 4, "impl": "vendor.acme", "places": 1, "operators": 0},
            {"first": 5, "last": 16, "impl": None, "places": 0, "operators": 1},
            {"first": 17, "last": 64, "impl": "default.flagos", "places": 0, "operators": 0},
        ]
    }


def test_the_platforms_own_pass_manager_has_our_pass_where_there_is_something_to_inline(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Platform(PlatformOverlay, vllm.platforms.interface.Platform):
        pass

    module, _, name = Platform.get_pass_manager_cls().rpartition(".")
    assert module == "vllm_fl.integration.graphs.passes"
    manager = getattr(passes, name)
    assert issubclass(manager, PostGradPassManager)
    monkeypatch.setattr(PostGradPassManager, "configure", lambda self, config: None)

    def added(plan: Plan | None, **fields: Any) -> list[Any]:
        monkeypatch.setattr(passes, "calling_engine", lambda: plan and engine_of(plan))
        made = manager()
        made.configure(config([LARGEST], **fields))
        return list(made.passes)

    plan = planned(ROWS, *three())
    assert added(plan) == added(None) == []
    plan.bind(OP, object(), NOTHING)
    (ours,) = added(plan)
    assert isinstance(ours, lowering.RangeLowering)
    assert added(plan, backend="eager") == []


def test_a_devices_manager_that_takes_no_pass_is_named_and_starts(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Bare:
        def configure(self, config: Any) -> None:
            pass

    plan = planned(ROWS, *three())
    plan.bind(OP, object(), NOTHING)
    monkeypatch.setattr(passes, "calling_engine", lambda: engine_of(plan))
    manager: Any = type("BareFL", (passes._WithOurPasses, Bare), {})
    manager().configure(config([LARGEST]))
    assert "Bare does not accept additional passes" in caplog.text


def test_caches_know_the_pass_by_the_plans_digest(planned: Planned) -> None:
    plan = planned(ROWS, *three())
    one, other = config([LARGEST]), config([LARGEST])
    other.additional_config["vllm_fl"] = Carried(plan="4567")
    uuids = [lowering.RangeLowering(engine_of(plan), each).uuid() for each in (one, one, other)]
    assert uuids[0] == uuids[1] != uuids[2]
