"""Fallback for banned or failing implementations: the table in docs/settings.md."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from builders import X, failing, half, refusing, silu, started

from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan, make_plan
from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.registry import OpRegistry
from vllm_fl.plugins.setting import SettingSpec
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.settings.loading import load_settings

OP = "silu_and_mul"
LISTED = "[vendor, reference]"
STOCK, PLAIN = "stock.vllm", "reference.torch"
OWN = OpImpl(OP, STOCK, BackendImplKind.REFERENCE, half)
MODES = ["eager", "compiled"]

ORDERS: dict[str, tuple[dict[str, str], str | None, str, str]] = {
    "no order": ({}, None, "cpu", STOCK),
    "a platform file": ({}, f"op_backends: {{{OP}: {LISTED}}}", "cpu", STOCK),
    "a plain one first": ({}, f"op_backends: {{{OP}: [reference, vendor]}}", "cpu", PLAIN),
    "a platform without vLLM's kernels": ({}, f"op_backends: {{{OP}: {LISTED}}}", "npu", PLAIN),
    "VLLM_FL_PER_OP": ({"VLLM_FL_PER_OP": f"{OP}=vendor|reference"}, None, "cpu", PLAIN),
    "a group": ({"VLLM_FL_PER_OP": "group:mlp=vendor|reference"}, None, "cpu", PLAIN),
    "default": ({"VLLM_FL_PER_OP": "default=vendor|reference"}, None, "cpu", PLAIN),
    "VLLM_FL_PREFER=reference": ({"VLLM_FL_PREFER": "reference"}, None, "cpu", PLAIN),
}
"""Source of the order -> variables, platform file, platform, and the engine's fallback."""

BLACKLIST: SettingSpec[tuple[str, ...]] = SettingSpec(
    "vendor_acme_blacklist", "VLLM_FL_VENDOR_ACME_BLACKLIST", (), in_file=True, names="op"
)

BANS: dict[str, tuple[dict[str, str], str]] = {
    "VLLM_FL_DENY_VENDORS": ({"VLLM_FL_DENY_VENDORS": "acme"}, ""),
    "VLLM_FL_ALLOW_VENDORS": ({"VLLM_FL_ALLOW_VENDORS": "other"}, ""),
    "a blacklist of the plugin's": ({BLACKLIST.variable: OP}, ""),
    "the same in a file": ({}, f"{BLACKLIST.key}: [{OP}]"),
    "deny_vendors in a file": ({}, "deny_vendors: [acme]"),
}
"""Source of the ban of vendor.acme -> variables, and line of a platform file."""

each_order = pytest.mark.parametrize("who", ORDERS)


class Acme:
    """The plugin that declares and applies the blacklist."""

    @hookimpl
    def settings(self) -> list[SettingSpec[Any]]:
        return [BLACKLIST]

    @hookimpl
    def rejections(self, settings: Any, op: str, impls: Any) -> dict[str, str]:
        return {"vendor.acme": BLACKLIST.key} if op in settings[BLACKLIST.key].value else {}


class Situation:
    """An order, the installed implementations and, optionally, a ban of vendor.acme."""

    def __init__(self, folder: Path, who: str, first: OpImpl, ban: str = "", **env: str) -> None:
        given, shipped, platform, self.falls_to = ORDERS[who]
        banning, line = BANS.get(ban, ({}, ""))
        files = []
        if shipped or line:
            (folder / "p.yaml").write_text("\n".join(filter(None, (shipped, line))))
            files = [("acme 1", folder / "p.yaml")]
        self.settings = load_settings(
            {**given, **banning, **env},
            platform=platform,
            platform_files=files,
            groups={"mlp": [OP]},
            plugins=[BLACKLIST],
        )
        registry = OpRegistry()
        load(registry, [Plugin(Owner("acme"), "acme", Acme)])
        registry.register_many([first, silu(PLAIN)])
        self.manager = started(registry, settings=self.settings)

    def plan(self, mode: Any = "eager", **demoted: Any) -> Plan:
        return make_plan(self.manager, EngineFacts(self.settings, mode), **demoted)


@each_order
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out", [*BANS, "unavailable", "demoted"])
def test_at_the_start_of_an_engine_and_never_called(
    tmp_path: Path, who: str, mode: Any, out: str
) -> None:
    available = (lambda: "no device") if out == "unavailable" else None
    first = silu("vendor.acme", available=available) if available else silu("vendor.acme")
    there = Situation(tmp_path, who, first, out)
    demoted = {"demoted": {(OP, "vendor.acme"): "is wrong"}} if out == "demoted" else {}
    entry = there.plan(mode, **demoted).entries[OP]
    assert entry.rows[-1][1].admitted[0].impl_id == there.falls_to
    assert "vendor.acme" not in [impl.impl_id for impl in entry.impls]


@each_order
def test_a_list_of_layers_means_nothing_to_scripts(tmp_path: Path, who: str) -> None:
    there = Situation(tmp_path, who, silu("vendor.acme"), VLLM_FL_OOT_BLACKLIST="SiluAndMul")
    there.manager.call(OP, X)
    first = "vendor.acme" if "vendor" in _first(there) else PLAIN
    assert there.manager.get_selected_impl_id(OP) == first


@each_order
@pytest.mark.parametrize("has_own", [True, False], ids=["with vLLM's own form", "without"])
def test_at_a_call_in_an_engine(tmp_path: Path, who: str, has_own: bool) -> None:
    there = Situation(tmp_path, who, refusing("vendor.acme", "no"))
    plan = there.plan()
    first = plan.entries[OP].impls[0].impl_id
    plan.bind(OP, object(), frozenset(), **({"last": OWN} if has_own else {}))(X)
    falls_to = there.falls_to if has_own else PLAIN
    assert plan.fallbacks == ({} if first == PLAIN else {(OP, falls_to): 1})


@each_order
def test_what_raises_at_a_call_in_an_engine_is_raised(tmp_path: Path, who: str) -> None:
    there = Situation(tmp_path, who, failing("vendor.acme", ValueError("boom")))
    plan = there.plan()
    is_first = plan.entries[OP].impls[0].impl_id != PLAIN
    with pytest.raises(ValueError, match="boom") if is_first else nullcontext():
        plan.bind(OP, object(), frozenset(), last=OWN)(X)
    assert not plan.fallbacks and not there.manager.demotions


@each_order
@pytest.mark.parametrize("out", [*BANS, "refuses", "raises"])
def test_scripts_take_the_next_kind(tmp_path: Path, who: str, out: str) -> None:
    first = {
        "refuses": refusing("vendor.acme", "no"),
        "raises": failing("vendor.acme", ValueError("boom")),
    }.get(out, silu("vendor.acme"))
    there = Situation(tmp_path, who, first, out)
    there.manager.call(OP, X)
    tried = there.manager.get_selected_impl_id(OP)
    assert tried == ("vendor.acme" if out == "refuses" and "vendor" in _first(there) else PLAIN)
    moved = there.manager.fallbacks
    assert moved == ({} if out in BANS or "vendor" not in _first(there) else {(OP, PLAIN): 1})


def _first(there: Situation) -> str:
    return str(there.manager.policy.order(OP)[0]).replace("flagos", "vendor")
