"""What runs in the place of what is banned or fails: the table of docs/settings.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import X, failing, half, planning, refusing, silu

from vllm_fl.dispatch.manager import OpManager
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.loading import load_settings

OP = "silu_and_mul"
LISTED = "[vendor, reference]"
STOCK, PLAIN = "stock.vllm", "reference.torch"
OWN = OpImpl(OP, STOCK, BackendImplKind.REFERENCE, half)
MODES = ["eager", "compiled"]

ORDERS: dict[str, tuple[dict[str, str], str | None, str, str]] = {
    "nobody": ({}, None, "cpu", STOCK),
    "a platform file": ({}, f"op_backends: {{{OP}: {LISTED}}}", "cpu", STOCK),
    "a platform file that puts reference first": (
        {},
        f"op_backends: {{{OP}: [reference, vendor]}}",
        "cpu",
        PLAIN,
    ),
    "a platform without vLLM's kernels": ({}, f"op_backends: {{{OP}: {LISTED}}}", "npu", PLAIN),
    "VLLM_FL_PER_OP": ({"VLLM_FL_PER_OP": f"{OP}=vendor|reference"}, None, "cpu", PLAIN),
    "a group": ({"VLLM_FL_PER_OP": "group:mlp=vendor|reference"}, None, "cpu", PLAIN),
    "default": ({"VLLM_FL_PER_OP": "default=vendor|reference"}, None, "cpu", PLAIN),
    "VLLM_FL_PREFER=reference": ({"VLLM_FL_PREFER": "reference"}, None, "cpu", PLAIN),
    "the same, over a platform file": (
        {"VLLM_FL_PREFER": "reference"},
        f"op_backends: {{{OP}: {LISTED}}}",
        "cpu",
        PLAIN,
    ),
}
"""Who wrote the order -> variables, platform file, platform, and what an engine falls to."""

each_order = pytest.mark.parametrize("who", ORDERS)


class Situation:
    """An order, with what is installed."""

    def __init__(self, folder: Path, who: str, first: OpImpl, **env: str) -> None:
        given, shipped, platform, self.falls_to = ORDERS[who]
        files = []
        if shipped is not None:
            (folder / "p.yaml").write_text(shipped)
            files = [("acme 1", folder / "p.yaml")]
        settings = load_settings(
            {**given, **env}, platform=platform, platform_files=files, groups={"mlp": [OP]}
        )
        registry = OpRegistry()
        registry.register_many([first, silu(PLAIN)])
        self.manager = OpManager(registry, settings.policy)

    def planned(self, mode: Any, **demoted: Any) -> str:
        entry = planning(self.manager, mode, **demoted).entries[OP]
        return entry.rows[-1][1].admitted[0].impl_id


@each_order
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out", ["banned", "unavailable", "demoted"])
def test_at_the_start_of_an_engine(tmp_path: Path, who: str, mode: Any, out: str) -> None:
    available = (lambda: "no device") if out == "unavailable" else None
    env = {"VLLM_FL_DENY_VENDORS": "acme"} if out == "banned" else {}
    first = silu("vendor.acme", available=available) if available else silu("vendor.acme")
    there = Situation(tmp_path, who, first, **env)
    demoted = {"demoted": {(OP, "vendor.acme"): "is wrong"}} if out == "demoted" else {}
    assert there.planned(mode, **demoted) == there.falls_to


@each_order
def test_at_a_call_in_an_engine(tmp_path: Path, who: str) -> None:
    there = Situation(tmp_path, who, refusing("vendor.acme", "no"))
    plan = planning(there.manager)
    first = plan.entries[OP].impls[0].impl_id
    plan.bind(OP, object(), frozenset(), last=OWN)(X)
    assert plan.fallbacks == ({} if first == PLAIN else {(OP, there.falls_to): 1})


@each_order
def test_in_a_place_that_has_no_form_of_vllms_own(tmp_path: Path, who: str) -> None:
    plan = planning(Situation(tmp_path, who, refusing("vendor.acme", "no")).manager)
    first = plan.entries[OP].impls[0].impl_id
    plan.bind(OP, object(), frozenset())(X)
    assert plan.fallbacks == ({} if first == PLAIN else {(OP, PLAIN): 1})


@each_order
def test_what_raises_at_a_call_in_an_engine_is_raised(tmp_path: Path, who: str) -> None:
    there = Situation(tmp_path, who, failing("vendor.acme", ValueError("boom")))
    plan = planning(there.manager)
    bound = plan.bind(OP, object(), frozenset(), last=OWN)
    if plan.entries[OP].impls[0].impl_id == PLAIN:
        bound(X)
    else:
        with pytest.raises(ValueError, match="boom"):
            bound(X)
    assert not plan.fallbacks and not there.manager.demotions


@each_order
@pytest.mark.parametrize("out", ["banned", "refuses", "raises"])
def test_scripts_take_the_next_kind(tmp_path: Path, who: str, out: str) -> None:
    first = {
        "banned": silu("vendor.acme"),
        "refuses": refusing("vendor.acme", "no"),
        "raises": failing("vendor.acme", ValueError("boom")),
    }[out]
    env = {"VLLM_FL_DENY_VENDORS": "acme"} if out == "banned" else {}
    there = Situation(tmp_path, who, first, **env)
    there.manager.call(OP, X)
    tried = there.manager.get_selected_impl_id(OP)
    assert tried == ("vendor.acme" if out == "refuses" and "vendor" in _first(there) else PLAIN)
    moved = there.manager.fallbacks
    assert moved == ({} if out == "banned" or "vendor" not in _first(there) else {(OP, PLAIN): 1})


def _first(there: Situation) -> str:
    return str(there.manager.policy.order(OP)[0]).replace("flagos", "vendor")
