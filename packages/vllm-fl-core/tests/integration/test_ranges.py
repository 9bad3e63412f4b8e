"""vLLM's compile ranges, split for ops that graphs have only at some sizes; vLLM's pass manager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm.platforms
from builders import kind_of, managing, planning
from tracing import LARGEST, OP, PATCHER, ROWS, applied, config
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationMode

from vllm_fl.engine.plan import Plan
from vllm_fl.integration.carried import Carried
from vllm_fl.integration.graphs import passes, replacing
from vllm_fl.integration.platform import PlatformOverlay
from vllm_fl.plugins.types import OpImpl


def planned(order: Any) -> Plan:
    kind, vendor = kind_of("vendor.acme")
    product = OpImpl(OP, "vendor.acme", kind, torch.nn.functional.linear, vendor)
    return planning(managing(product, per_op_order={OP: order}), "compiled")


def split(order: Any, changed: Any, entry: dict[str, Any] | None = None) -> Any:
    PATCHER.configure(planned(order), changed, {} if entry is None else entry)
    compilation = changed.compilation_config
    return compilation.compile_ranges_endpoints, compilation.compile_sizes


@pytest.mark.parametrize(
    ("order", "compiled", "captured", "ends", "sizes"),
    [
        (ROWS, [], [], [16, 64], []),
        ({"<=16": "stock", "rest": "vendor"}, [], [], [16, 64], []),
        ({"<=1": "vendor", "rest": "stock"}, [], [], [64], [1]),
        ({"<=8": "vendor", "<=16": "stock", "rest": "vendor"}, [], [], [64], []),
        ({"<=4": "stock", "<=8": "vendor", "rest": "stock"}, [], [], [8, 64], []),
        ("vendor", [], [], [64], []),
        ("stock", [], [], [64], []),
        # A split saves the most above captured sizes.
        ({"<=32": "stock", "<=48": "vendor", "rest": "stock"}, [], [], [32, 64], []),
        ({"<=32": "stock", "<=48": "vendor", "rest": "stock"}, [], [1, 32], [48, 64], []),
        # vLLM's range extends beyond a size that the user compiles apart.
        (ROWS, [16, 1], [], [16, 64], [16, 1]),
        ({"<=1": "vendor", "rest": "stock"}, [1], [], [64], [1]),
    ],
)
def test_vllms_range_is_split_if_a_part_keeps_the_operator(
    order: Any, compiled: list[int], captured: list[int], ends: list[int], sizes: list[int]
) -> None:
    changed = config([64], compiled, cudagraph_capture_sizes=captured)
    assert split(order, changed) == (ends, sizes)


def test_the_users_own_ranges_stay_and_ours_go_with_the_plan_that_had_them() -> None:
    entry: dict[str, Any] = {}
    changed = config([16, 32, 64], [8])
    assert split({"<=4": "vendor", "rest": "stock"}, changed, entry) == ([4, 16, 32, 64], [8])
    assert split({"<=1": "vendor", "rest": "stock"}, changed, entry) == ([16, 32, 64], [1, 8])
    assert split("vendor", changed, entry) == ([16, 32, 64], [8])
    assert split(ROWS, changed, entry) == split("vendor", changed, entry) == ([16, 32, 64], [8])


@pytest.mark.parametrize(
    "fields", [{"mode": CompilationMode.DYNAMO_TRACE_ONCE}, {"backend": "eager"}], ids=str
)
def test_nothing_is_split_unless_vllm_compiles_by_range(fields: Any) -> None:
    assert split(ROWS, config(None, **fields)) == (None, None)


def test_the_platforms_own_pass_manager_has_our_pass_if_an_op_is_planned_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Platform(PlatformOverlay, vllm.platforms.interface.Platform):
        pass

    module, _, name = Platform.get_pass_manager_cls().rpartition(".")
    assert module == "vllm_fl.integration.graphs.passes"
    manager = getattr(passes, name)
    assert issubclass(manager, PostGradPassManager)
    monkeypatch.setattr(PostGradPassManager, "configure", lambda self, config: None)

    def added(plan: Plan | None, **fields: Any) -> list[Any]:
        monkeypatch.setattr(passes, "calling_engine", lambda: plan and applied(plan))
        made = manager()
        made.configure(config([LARGEST], **fields))
        return list(made.passes)

    assert added(planned("stock")) == added(None) == []
    (ours,) = added(planned(ROWS))
    assert isinstance(ours, replacing.TorchOperators)
    assert added(planned(ROWS), backend="eager") == []


def test_a_devices_manager_that_takes_no_pass_is_named_and_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Bare:
        def configure(self, config: Any) -> None:
            pass

    monkeypatch.setattr(passes, "calling_engine", lambda: applied(planned(ROWS)))
    manager: Any = type("BareFL", (passes._WithOurPasses, Bare), {})
    manager().configure(config([LARGEST]))
    assert "Bare does not accept additional passes" in caplog.text


def test_caches_know_the_pass_by_the_plans_digest() -> None:
    engine = applied(planned(ROWS))
    one, other = config([LARGEST]), config([LARGEST])
    other.additional_config["vllm_fl"] = Carried(plan="4567")
    uuids = [replacing.TorchOperators(engine, each).uuid() for each in (one, one, other)]
    assert uuids[0] == uuids[1] != uuids[2]
