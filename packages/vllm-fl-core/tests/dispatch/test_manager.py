"""The manager: calls, fallback, demotion, log messages, and the end of a demotion."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import X, failing, managing, norm, refusing, silu

from vllm_fl.dispatch.context import policy_context
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.startup import Startup
from vllm_fl.errors import (
    AllFailedError,
    CallError,
    NoImplementationError,
    PolicySealedError,
    SettingsError,
    UnknownOpError,
    VllmFLError,
)
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.policy import SelectionPolicy

OP = "silu_and_mul"


Lines = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """`lines()`: the (level, line)s of the log."""
    caplog.set_level(logging.INFO, logger="vllm_fl")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


FLAGOS = "Op 'silu_and_mul' using 'default.flagos' (kind=flagos, vendor=None)"
TO_REFERENCE = "Op 'silu_and_mul' fallback to 'reference.torch' (kind=reference, vendor=None)"


class TestLogLines:
    def test_using_is_said_once_and_switched(self, lines: Lines) -> None:
        manager = managing(silu("vendor.acme"), silu("default.flagos"))
        for _ in range(3):
            manager.call(OP, X)
        manager.set_policy(SelectionPolicy(prefer="vendor"))
        for _ in range(2):
            manager.call(OP, X)
        switched = "Op 'silu_and_mul' switched from 'default.flagos' to 'vendor.acme' "
        assert lines() == [("INFO", FLAGOS), ("INFO", switched + "(kind=vendor, vendor=acme)")]

    def test_failed_then_fallback(self, lines: Lines) -> None:
        manager = managing(failing("default.flagos", ValueError("boom")), silu("reference.torch"))
        for _ in range(3):
            manager.call(OP, X)
        failed = "Implementation 'default.flagos' failed for op 'silu_and_mul': boom"
        assert lines() == [("INFO", FLAGOS), ("WARNING", failed), ("INFO", TO_REFERENCE)]

    def test_the_last_one_and_all(self, lines: Lines) -> None:
        boom, bang = ValueError("boom"), ValueError("bang")
        manager = managing(
            failing("default.flagos", boom),
            refusing("vendor.acme", "needs bf16"),
            failing("reference.torch", bang),
        )
        with pytest.raises(AllFailedError) as caught:
            manager.call(OP, X)
        last = "Last implementation 'reference.torch' failed for op 'silu_and_mul': bang"
        assert lines()[-1] == ("ERROR", last)
        error = caught.value
        first = "All 3 implementation(s) failed for op='silu_and_mul'. Last error: ValueError: bang"
        assert str(error).startswith(first)
        assert isinstance(error, VllmFLError)
        assert (error.op, error.cause, error.__cause__) == (OP, bang, bang)
        causes = dict(error.causes)
        assert causes == {
            "default.flagos": boom,
            "vendor.acme": "needs bf16",
            "reference.torch": bang,
        }
        assert all(str(cause) in str(error) for cause in causes.values())
        assert "vllm-fl explain silu_and_mul" in str(error)


def test_what_was_resolved_or_bound_before_the_demotion_keeps_to_it() -> None:
    runs = []

    def broken(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        raise ValueError("boom")

    manager = managing(silu("vendor.acme", fn=broken), silu("reference.torch", 1))
    resolved, bound = manager.resolve(OP), manager.bind(OP, object())
    for function in (resolved, bound, resolved, bound):
        assert function(X)[0, 0] == 2
    assert runs == [1]
    manager.clear_failed_impls()
    assert resolved(X)[0, 0] == 2
    assert runs == [1, 1]


class AcceleratorError(RuntimeError):
    """Has the same name as torch's class."""


@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError("unspecified launch failure"),
        MemoryError(),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NPU error 507011"),
        torch.OutOfMemoryError("tried to allocate"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("strict", [False, True])
def test_device_errors_are_raised_and_nothing_is_demoted(error: Exception, strict: bool) -> None:
    manager = managing(failing("vendor.acme", error), silu("reference.torch"), strict=strict)
    with pytest.raises(type(error)) as caught:
        manager.call(OP, X)
    assert caught.value is error
    assert manager.demotions == {}


class Unprintable(RuntimeError):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise KeyError("no message")


@pytest.mark.parametrize("last", [False, True])
def test_an_error_that_cannot_be_printed_is_one_like_others(last: bool) -> None:
    second = failing("reference.torch", Unprintable()) if last else silu("reference.torch")
    manager = managing(failing("vendor.acme", Unprintable()), second)
    if last:
        with pytest.raises(AllFailedError, match="Unprintable"):
            manager.call(OP, X)
    else:
        manager.call(OP, X)
    assert "Unprintable" in manager.demotions[OP, "vendor.acme"]


class TestCallersMistakes:
    @pytest.mark.parametrize("x", [[1.0], torch.ones(2, 7)], ids=["a list", "an odd width"])
    @pytest.mark.parametrize("strict", [False, True])
    def test_silu(self, x: Any, strict: bool) -> None:
        def picky(x: torch.Tensor) -> torch.Tensor:
            assert x.is_floating_point()
            return x.view(-1, 2, 4)[:, 0]

        manager = managing(silu("vendor.acme", fn=picky), silu("reference.torch"), strict=strict)
        with pytest.raises(CallError) as caught:
            manager.call(OP, x=x)
        assert (caught.value.argument, caught.value.op) == ("x", OP)
        assert OP in str(caught.value) and caught.value.problem in str(caught.value)
        assert caught.value.cause is not None
        assert manager.demotions == {}

    def test_a_call_that_does_not_fit_is_an_error_of_its_signature(self) -> None:
        manager = managing(norm("vendor.acme", lambda x, residual: x))
        with pytest.raises(TypeError, match=r"rms_norm\(\) missing 1 .* 'epsilon'"):
            manager.call("rms_norm", torch.ones(2, 4), None, None)
        assert manager.demotions == {}


class TestNothingToCall:
    def test_an_unknown_op_or_selector_says_what_was_meant(self) -> None:
        with pytest.raises(UnknownOpError, match="'silu_and_mul'") as caught:
            managing().call("silu_and_mull", X)
        assert caught.value.op == "silu_and_mull"
        meant = managing(silu("vendor.cpu"), per_op_order={OP: ["impl:vendor.cup"]})
        with pytest.raises(NoImplementationError, match=r"Did you mean 'impl:vendor\.cpu'\?"):
            meant.call(OP, X)

    def test_nothing_installed_says_what_to_install(self) -> None:
        with pytest.raises(NoImplementationError, match="pip install vllm-fl-reference") as caught:
            managing().call(OP, X)
        assert (caught.value.op, caught.value.rejected) == (OP, ())

    def test_everything_rejected_gives_each_reason(self) -> None:
        manager = managing(
            silu("vendor.acme"),
            silu("reference.torch", available=lambda: "no torch"),
            deny_vendors={"acme"},
        )
        with pytest.raises(NoImplementationError) as caught:
            manager.call(OP, X)
        assert dict(caught.value.rejected) == {
            "vendor.acme": "deny_vendors contains acme",
            "reference.torch": "not available: no torch",
        }
        for impl_id, reason in caught.value.rejected:
            assert f"{impl_id}: {reason}" in str(caught.value)


class TestSeal:
    def test_what_would_not_reach_the_layers_any_more_is_refused(self) -> None:
        manager = managing(silu("vendor.acme", 1), silu("default.flagos", 2))
        manager.seal("the engine")
        for change in (
            lambda: manager.set_policy(SelectionPolicy()),
            lambda: manager.set_policy(None),
            manager.clear_failed_impls,
            lambda: manager.clear_failed_impls(OP),
        ):
            with pytest.raises(PolicySealedError, match="the engine"):
                change()
        assert manager.call(OP, X)[0, 0] == 3
        with policy_context(SelectionPolicy(prefer="vendor")):
            assert manager.call(OP, X)[0, 0] == 2

    def test_it_ends_with_the_last_engine_that_relies_on_it(self) -> None:
        manager = managing(silu("vendor.acme"))
        end_first, end_second = manager.seal("the engine"), manager.seal("the engine")
        for _ in range(2):  # an engine that shuts down twice does not end another engine's seal
            end_first()
            with pytest.raises(PolicySealedError):
                manager.reset()
        end_second()
        manager.reset()
        manager.set_policy(SelectionPolicy())

    def test_a_failure_under_it_demotes_nothing_and_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        manager = managing(failing("vendor.acme", ValueError("boom")), silu("reference.torch"))
        manager.seal("the engine")
        with pytest.raises(ValueError, match="boom"):
            manager.call(OP, X)
        assert manager.demotions == {}
        assert "Implementation 'vendor.acme' failed for op 'silu_and_mul': boom" in caplog.text


class TestPolicies:
    def test_set_policy_wants_a_policy(self) -> None:
        with pytest.raises(TypeError, match="SelectionPolicy"):
            managing().set_policy("vendor")  # type: ignore[arg-type]
        manager = managing(prefer="vendor")
        assert manager.startup is manager.settings is None  # nothing has been loaded for it
        manager.set_policy(SelectionPolicy(prefer="reference"))
        manager.set_policy(None)  # back to the constructor's policy
        assert manager.policy.prefer == "vendor"

    def test_one_that_is_set_before_the_first_use_stands_and_the_plugins_are_found(self) -> None:
        policy = SelectionPolicy(prefer="reference")
        manager = OpManager()
        manager.set_policy(policy)
        assert manager.startup is not None
        assert manager.policy is policy
        assert OpManager(policy=policy).startup is not None
        assert OpManager(policy=policy).policy is policy

    def test_deferred_errors_of_settings_are_raised_where_the_policy_is_needed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("VLLM_FL_CONFIG", "/nonexistent/policy.yaml")
        with pytest.raises(SettingsError, match="does not exist"):
            OpManager().ensure_initialized()
        manager = OpManager()
        manager.ensure_initialized("cpu", defer_errors=True)
        assert manager.startup is not None and manager.startup.settings.platform == "cpu"
        registry = manager.registry
        for need in (lambda: manager.policy, lambda: manager.call(OP, X)):
            with pytest.raises(SettingsError, match="does not exist"):
                need()
        policy = SelectionPolicy(prefer="reference")
        settings = load_settings({"VLLM_FL_PREFER": "reference"})
        manager.use_startup(Startup(manager.startup.plugins, settings), registry)
        assert manager.policy == policy


def test_an_op_without_contract_takes_what_its_implementations_take() -> None:
    def fused(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    def broken(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        raise ValueError("boom")

    manager = managing(
        OpImpl("acme_fused", "vendor.acme", BackendImplKind.VENDOR, broken, "acme"),
        OpImpl("acme_fused", "reference.torch", BackendImplKind.REFERENCE, fused),
    )
    assert manager.call("acme_fused", X, scale=3.0)[0, 0] == 3
    assert manager.call("acme_fused", X)[0, 0] == 2
    with pytest.raises(TypeError, match=r"acme_fused\(\) .* 'factor'"):
        manager.call("acme_fused", X, factor=3.0)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "fallback"])
@pytest.mark.parametrize(
    "op", [op for op, spec in known_contracts().contracts.items() if spec.consumable]
)
def test_of_what_is_overwritten_caches_alone_are_not_copied(op: str, place: int) -> None:
    """A cache uses most of a device's memory, and a call changes only a few slots."""
    spec, seen = known_contracts().contracts[op], dict[str, Any]()
    samples = [spec.named(s.args) for s in spec.samples(torch.float32, torch.device("cpu"))]
    given = next(
        s for s in samples if spec.consumed(spec.consumable, s.values()) == spec.consumable
    )

    def keep(*args: Any) -> None:
        seen.update(spec.named(args))

    acme = OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, keep, "acme", consumes=spec.consumable)
    refuses = OpImpl(op, "default.flagos", BackendImplKind.DEFAULT, keep, supports=lambda *_: "no")
    managing(acme, *[refuses] * place).call(op, *given.values())
    uncopied = {name for name in spec.consumable if seen[name] is given[name]}
    assert uncopied == {name for name in spec.consumable if "cache" in name or "state" in name}


def test_warm_calls_take_no_lock() -> None:
    manager, layer = managing(silu("reference.torch")), object()
    for lock in (manager._lock, None):
        manager._lock = lock  # type: ignore[assignment]
        manager.call(OP, X)
        manager.call_as_method(OP, layer, X)


def test_policies_of_contexts_are_freed() -> None:
    manager = managing(silu("reference.torch"))
    policies = [SelectionPolicy(deny_vendors=frozenset({f"v{n}"})) for n in range(500)]
    weak = [weakref.ref(policy) for policy in policies]
    for policy in policies:
        with policy_context(policy):
            manager.call(OP, X)
            manager.bind(OP, object())
    manager.call(OP, X)
    del policies, policy
    gc.collect()
    assert sum(reference() is not None for reference in weak) <= 64
