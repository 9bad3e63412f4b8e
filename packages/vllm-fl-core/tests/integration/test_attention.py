"""The attention patcher: a backend's answers to a layer's request, and its faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from builders import managing, planning
from configs import engine_config

import vllm_fl.dispatch
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.errors import AllFailedError
from vllm_fl.integration.patchers import attention
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.types import AttentionImpl, AttentionRequest, BackendImplKind
from vllm_fl.settings.loading import load_settings

KEY = ("attention_backend", "vendor.acme")
REQUEST = AttentionRequest(head_size=64, dtype="bfloat16")
FACTS = EngineFacts(load_settings({}), "eager", attention=REQUEST)

ATTENTION = attention.Attention()


class Request(NamedTuple):
    """vLLM's request, from a release with a field that we do not know."""

    head_size: int = 64
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    has_wings: bool = True


class Backend:
    """The part of an AttentionBackend that core reads."""

    get_impl_cls = get_builder_cls = staticmethod(lambda: None)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"


class Unnamed(Backend):
    @staticmethod
    def get_name() -> str:
        return "ACME"


class Ended(Backend):
    @staticmethod
    def get_name() -> str:
        raise SystemExit(3)


PATH = f"{__name__}.Backend"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """`plan(class_path, …)`: the plan with one installed backend."""
    monkeypatch.setitem(__import__("sys").modules, __name__, SimpleNamespace(**globals()))

    def make(path: Any = PATH, strict: bool = False, **fields: Any) -> Plan:
        impl = AttentionImpl("vendor.acme", path, BackendImplKind.VENDOR, "acme", **fields)
        manager = managing(impl, strict=strict)
        monkeypatch.setattr(vllm_fl.dispatch.manager, "manager", manager)
        return planning(manager)

    return make


def test_the_planned_backend_is_taken_unless_vllms_arguments_set_one(plan: Any) -> None:
    made = plan()
    assert attention.choose(made, None, Request(), 8) == PATH
    assert attention.choose(made, SimpleNamespace(name="TRITON_ATTN"), Request()) is None
    assert ATTENTION.faults(made, FACTS) == {} and ATTENTION.why_not(FACTS).impls == {}


def test_fields_that_we_do_not_know_reach_the_backend(plan: Callable[..., Plan]) -> None:
    seen: list[AttentionRequest] = []
    made = plan(supports=lambda request: bool(seen.append(request)) or "no")
    assert attention.choose(made, None, Request(), 8) is None
    assert (seen[0].num_heads, dict(seen[0].extras)) == (8, {"has_wings": True})
    assert made.fallbacks == {("attention_backend", "stock.vllm"): 1}


def test_strict_mode_tries_nothing_else(plan: Callable[..., Plan]) -> None:
    with pytest.raises(AllFailedError, match="a layer of op 'attention_backend': no"):
        attention.choose(plan(strict=True, supports=lambda request: "no"), None, Request())


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_module.Backend", "failed: ModuleNotFoundError"),
        (f"{__name__}.Request", "is not an AttentionBackend of vLLM: it has no get_name"),
        (f"{__name__}.Unnamed", "'ACME', which is not a key of vLLM's AttentionBackendEnum"),
        (f"{__name__}.Ended", "failed: SystemExit: 3"),
    ],
)
def test_a_class_that_cannot_be_used_is_a_fault(
    plan: Callable[..., Plan], path: str, why: str
) -> None:
    made = plan(path)
    assert why in ATTENTION.faults(made, FACTS)[KEY]
    assert attention.choose(made, None, Request()) is None
    assert ATTENTION.faults(made, EngineFacts(FACTS.settings, "eager")) == {}


def test_a_backend_that_refuses_the_model_says_so(plan: Callable[..., Plan]) -> None:
    plan(supports=lambda request: "no MLA")
    assert ATTENTION.why_not(FACTS).impls == {KEY: "does not support this model: no MLA"}
    assert ATTENTION.why_not(EngineFacts(FACTS.settings, "eager")).impls == {}


@pytest.mark.parametrize("order", ["stock", "stock|vendor"])
def test_a_backend_behind_vllms_own_is_not_asked(plan: Callable[..., Plan], order: str) -> None:
    """Its `supports` may import the library of its kernels."""
    plan(supports=lambda request: pytest.fail("it was asked"))
    named = {"VLLM_FL_PER_OP": f"attention_backend={order}"}
    facts = dataclasses.replace(FACTS, settings=load_settings(named, platform="cpu"))
    assert ATTENTION.why_not(facts).impls == {}


def test_what_of_a_plugin_runs_is_noted_while_it_runs(plan: Callable[..., Plan]) -> None:
    """If a class's import ends the process, the next process must name it."""
    noted: list[str] = []

    def note(request: AttentionRequest) -> Any:
        noted.append(breadcrumb.current_note())
        return PATH if len(noted) > 1 else True

    made = plan(note, supports=note)
    assert attention.choose(made, None, Request()) == PATH
    assert [what.partition(" of attention_backend=vendor.acme")[0] for what in noted] == [
        "the supports",
        "the class",
    ]


def test_a_model_without_attention_asks_for_nothing() -> None:
    config = engine_config(head_size=NotImplementedError("no attention"))
    assert ATTENTION.request(config, compiled=False) == {"attention": None}
    asked = ATTENTION.request(engine_config(), compiled=False)["attention"]
    assert asked is not None
    assert (asked.head_size, asked.num_heads, asked.block_size) == (64, 8, None)
    assert asked.extras == {"is_hybrid": False, "num_kv_heads": 2}
    hybrid = engine_config()
    hybrid.model_config.is_hybrid = True
    asked = ATTENTION.request(hybrid, compiled=False)["attention"]
    assert asked is not None and asked.extras["is_hybrid"] is True
