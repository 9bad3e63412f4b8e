"""Policy contexts: nesting, exceptions, threads and tasks."""

from __future__ import annotations

import asyncio
import threading

import pytest
from builders import X, managing, silu

from vllm_fl.dispatch import (
    get_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from vllm_fl.dispatch.context import policy_context
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.settings.policy import OpOrder, SelectionPolicy

VENDORS = [f"v{number}" for number in range(10)]


def only(vendor: str) -> SelectionPolicy:
    return SelectionPolicy(prefer="vendor", allow_vendors={vendor})


@pytest.fixture
def installed() -> OpManager:
    """Ten vendors that add their number, and a preferred reference that adds -1."""
    vendors = [silu(f"vendor.{vendor}", number) for number, vendor in enumerate(VENDORS)]
    return managing(silu("reference.torch", -1), *vendors, prefer="reference")


def who_runs(installed: OpManager) -> float:
    return installed.call("silu_and_mul", X)[0, 0].item() - 1


def test_nesting_and_its_end(installed: OpManager) -> None:
    assert who_runs(installed) == -1
    with policy_context(only("v1")):
        assert who_runs(installed) == 1
        with policy_context(only("v2")) as inner:
            assert inner == only("v2")
            assert who_runs(installed) == 2
        assert who_runs(installed) == 1
    assert who_runs(installed) == -1
    with pytest.raises(ValueError, match="out"), policy_context(only("v1")):
        raise ValueError("out")
    assert who_runs(installed) == -1


def test_with_star_changes_what_it_says_and_keeps_the_rest() -> None:
    base = SelectionPolicy(
        prefer="vendor",
        per_op_order={
            "rms_norm": OpOrder.of(["flagos", "reference"], pinned=False),
            "silu_and_mul": ["flagos", "reference"],
        },
        deny_vendors={"v1"},
    )
    with policy_context(base):
        with with_strict_mode():
            assert get_policy().strict
            with with_strict_mode(False):
                assert get_policy() == base
        with with_allowed_vendors("v2", "v3"):
            assert get_policy().allow_vendors == {"v2", "v3"}
            assert get_policy().deny_vendors == {"v1"}
        with with_denied_vendors("v2"), with_denied_vendors("v3"):
            assert get_policy().deny_vendors == {"v1", "v2", "v3"}
        with with_preference("reference"):
            assert get_policy().prefer == "reference"
            assert str(get_policy().per_op_order["rms_norm"]) == "reference|flagos"
            assert str(get_policy().per_op_order["silu_and_mul"]) == "flagos|reference"
        assert get_policy() == base
    with pytest.raises(ValueError, match="prefer must be one of"):
        with_preference("flagoss")  # before the block


def test_no_leak_across_threads(installed: OpManager) -> None:
    """Run eight threads in contexts with different vendors, and this thread without one."""
    together = threading.Barrier(9, timeout=300)
    leaks: list[str] = []

    def work(number: int) -> None:
        for turn in range(10):
            vendor = (number + turn) % len(VENDORS)
            with policy_context(only(VENDORS[vendor])):
                together.wait()
                if (got := who_runs(installed)) != vendor:
                    leaks.append(f"thread {number} under v{vendor} ran {got}")
                together.wait()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        together.wait()
        if (got := who_runs(installed)) != -1:
            leaks.append(f"the main thread ran {got}")
        together.wait()
    for thread in threads:
        thread.join(20)
    assert not leaks, leaks
    assert who_runs(installed) == -1


def test_no_leak_across_tasks(installed: OpManager) -> None:
    """Run a hundred tasks that alternate inside their contexts."""
    leaks: list[str] = []

    async def work(number: int) -> None:
        vendor = number % len(VENDORS)
        with policy_context(only(VENDORS[vendor])):
            for _ in range(3):
                await asyncio.sleep(0)
                if (got := who_runs(installed)) != vendor:
                    leaks.append(f"task {number} under v{vendor} ran {got}")

    async def everybody() -> None:
        tasks = [asyncio.create_task(work(number)) for number in range(100)]
        await asyncio.sleep(0)
        if (got := who_runs(installed)) != -1:
            leaks.append(f"the task that made them ran {got}")
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(everybody(), 60))
    assert not leaks, leaks
    assert who_runs(installed) == -1
