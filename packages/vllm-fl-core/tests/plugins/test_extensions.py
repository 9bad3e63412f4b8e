"""Extensions of this project, verifiers, and the hooks of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from builders import found as of_kind
from builders import silu, started

from vllm_fl.errors import PluginError, SettingsError, StartError
from vllm_fl.plugins.calling import (
    asking,
    checks,
    enter_session,
    objections,
    plugin_rejections,
    sections,
)
from vllm_fl.plugins.discovery import EXTENSIONS
from vllm_fl.plugins.hookspecs import hookimpl
from vllm_fl.plugins.inspection import Check, GroupFacts, Moment, Objection
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.plugin import Kind, Owner, Plugin
from vllm_fl.plugins.registry import OpRegistry, known_contracts
from vllm_fl.plugins.reserved import FL_OPS, unread, unverified
from vllm_fl.plugins.snapshot import EMPTY
from vllm_fl.settings.loading import load_settings

VERIFY = "vllm-fl-verify"
KEY = ("silu_and_mul", "vendor.acme")
FAULT = Objection("FL410", "it is wrong")
GROUP = GroupFacts("tp", 0, 2, None, None)
ENGINE: Any = SimpleNamespace(rank=0)


def plugin(verifies: object = None, **hooks: Callable[..., Any]) -> Any:
    declared = {} if verifies is None else {"VERIFIES": verifies}
    return SimpleNamespace(**declared, **{name: hookimpl(f) for name, f in hooks.items()})


def nothing() -> None:
    return None


def verifier(fault: Objection | None = None) -> Any:
    return plugin(True, inspect_plan=lambda: {KEY: fault} if fault else None)


def found(distribution: str | None, content: Any = None, kind: Kind = "extension") -> Plugin:
    return of_kind(distribution, content, kind)


def loaded(*every: Plugin, only: list[str] | None = None) -> tuple[Plugin, ...]:
    return load(OpRegistry(EMPTY), every, only=only)


def one(content: Any, distribution: str = VERIFY, kind: Kind = "extension") -> Plugin:
    (only,) = loaded(found(distribution, content, kind))
    return only


@pytest.mark.parametrize("only", [None, [], ["fl-other"]])
@pytest.mark.parametrize("distribution", ["vllm_fl_verify", "vllm-fl-tools"])
def test_an_extension_of_ours_is_loaded_whatever_is_named(
    only: list[str] | None, distribution: str
) -> None:
    registry = OpRegistry(EMPTY)
    named = plugin(doctor=nothing)
    every = (
        found(distribution, verifier()),
        found("fl-other", named if only != [] else None, "backend"),
        # Selecting only plugins without a backend needs no contracts, even with extensions.
        found(FL_OPS, plugin(contracts=nothing) if only != [] else None, "contracts"),
    )
    mine, other, ops = load(registry, every, only=only)
    assert (mine.status, mine.kind, mine.verifies) == ("ok", "extension", True)
    assert {other.status, ops.status} == ({"disabled"} if only == [] else {"ok"})


@pytest.mark.parametrize("only", [None, [], ["fl-acme"]])
@pytest.mark.parametrize("distribution", ["fl-acme", "vllm-fl-verify2", "vllm-fl-reference"])
def test_another_distributions_extension_is_refused_and_not_imported(
    only: list[str] | None, distribution: str
) -> None:
    (refused,) = loaded(found(distribution), only=only)
    assert (refused.status, refused.verifies) == ("failed", False)
    assert refused.error is not None and refused.error.code == "FL201"
    message = str(refused.error)
    assert f"of {distribution} 1.0 is not imported: the group {EXTENSIONS} is only for" in message
    assert VERIFY in message
    # Nor does it hide the module that it refers to if the user names that module.
    module = found(None, verifier(), "backend")
    named = Plugin(module.owner, f"{distribution}.plugin", module.load)
    assert [each.status for each in loaded(found(distribution), named, only=[])] == ["failed", "ok"]


CHOSEN = ["register_ops", "attention_backend", "communicator", "layers", "contracts", "device"]


@pytest.mark.parametrize(
    ("content", "backend", "words"),
    [
        *(
            (plugin(True, inspect_plan=nothing, **{hook: nothing}), False, f"not implement {hook}")
            for hook in CHOSEN
        ),
        (lambda registry: None, False, "register_builtins"),
        (plugin(process_start=nothing), True, "process_start is for extensions"),
        (plugin("yes", inspect_plan=nothing), True, "VERIFIES is 'yes'; expected True or False"),
        (plugin(True, doctor=nothing), True, "True, but it does not implement inspect_plan"),
    ],
)
def test_what_an_extension_or_a_backend_cannot_be(content: Any, backend: bool, words: str) -> None:
    refused = one(content, *(("fl-acme", "backend") if backend else ()))
    assert (refused.status, refused.verifies) == ("failed", False)
    assert words in str(refused.error)


def test_those_that_verify_are_asked_last() -> None:
    every = loaded(
        found("fl-a", verifier(), "backend"),
        found("fl-b", plugin(inspect_plan=nothing), "backend"),
        found("fl-c", plugin(doctor=nothing), "backend"),
        found("fl-d", plugin(inspect_plan=nothing), "backend"),
        found("fl-e", ImportError(), "backend"),
    )
    names = [each.owner.distribution for each in asking(every, "inspect_plan")]
    assert names == ["fl-b", "fl-d", "fl-a"]


HOOKS: dict[str, Callable[[Plugin], object]] = {
    "inspect_plan": lambda each: objections(each, ENGINE, Moment.PLANNED),
    "engine_session": lambda each: enter_session(each, ENGINE)(),
    "worker_report": lambda each: sections(each, ENGINE, {"plan"}),
    "communicator_checks": lambda each: checks(each, ENGINE, None, GROUP),
}


def raising(error: BaseException) -> Callable[..., Any]:
    def fails() -> Any:
        raise error

    return fails


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_of_a_hook_names_its_plugin_and_one_of_cores_own_is_left_as_it_is(
    hook: str,
) -> None:
    for theirs in (OSError("no device"), SystemExit(1), StopIteration(3)):
        with pytest.raises(PluginError, match=f"its {hook} hook failed") as caught:
            HOOKS[hook](one(plugin(**{hook: raising(theirs)})))
        assert (caught.value.plugin, caught.value.distribution) == ("acme", f"{VERIFY} 1.0")
        assert caught.value.cause is theirs
    for ours in (StartError("rank 1 cannot go on"), KeyboardInterrupt()):
        with pytest.raises(type(ours)) as unchanged:
            HOOKS[hook](one(plugin(**{hook: raising(ours)})))
        assert unchanged.value is ours


@contextmanager
def ending(error: Exception) -> Any:
    yield
    raise error


@pytest.mark.parametrize(
    ("hook", "returned", "words"),
    [
        ("inspect_plan", [KEY], "expected Mapping or None"),
        ("inspect_plan", {KEY: "it is wrong"}, "expected Objection"),
        ("inspect_plan", {"silu_and_mul": FAULT}, "ValueError"),
        ("engine_session", 7, "expected AbstractContextManager or None"),
        ("engine_session", ending(OSError("no space left")), "no space left"),
        ("worker_report", ["plan"], "expected Mapping or None"),
        ("worker_report", {"plan": {}}, "returned plan, which the report already contains"),
        ("worker_report", {"acme": object()}, "not JSON serializable"),
        ("communicator_checks", 7, "expected Iterable or None"),
        ("communicator_checks", [print], "expected Check"),
    ],
)
def test_what_a_hook_returns_is_checked(hook: str, returned: Any, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        HOOKS[hook](one(plugin(**{hook: lambda: returned})))


def test_what_the_hooks_of_an_engine_return() -> None:
    check, left = Check("sums", lambda: None), []

    @contextmanager
    def session(engine: Any) -> Any:
        left.append("entered")
        yield
        left.append("left")

    each = one(
        plugin(
            inspect_plan=lambda engine, moment: {KEY: FAULT} if moment is Moment.LOADED else None,
            engine_session=session,
            worker_report=lambda engine: {"rank": engine.rank},
            communicator_checks=lambda group: iter([check] * group.size),
        )
    )
    assert objections(each, ENGINE, Moment.PLANNED) == {}
    assert objections(each, ENGINE, Moment.LOADED) == {KEY: FAULT}
    leave = enter_session(each, ENGINE)
    assert left == ["entered"]
    leave()
    leave()
    assert left == ["entered", "left"]
    assert sections(each, ENGINE) == {"rank": 0}
    assert checks(each, ENGINE, None, GROUP) == [check, check]


# Facts of an engine that may require batch-invariant implementations.
ASKS, FREE = (SimpleNamespace(wants_invariance=why) for why in ("VLLM_BATCH_INVARIANT=1", ""))
SPEC = known_contracts().contracts["silu_and_mul"]
IMPL = silu("vendor.acme")


def test_a_verifier_is_asked_what_it_cannot_measure_and_no_thread_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def rejects(impls: Any, facts: Any, contract: Any) -> Any:
        asked.append((facts, contract))
        return {impl.impl_id: f"{facts.wants_invariance}, and it is not measured" for impl in impls}

    mine = one(plugin(True, inspect_plan=nothing, rejections=rejects))
    other = one(plugin(rejections=raising(AssertionError())), "fl-acme", "backend")
    wrong = one(plugin(True, inspect_plan=nothing, rejections=lambda: {"vendor.acme": None}))
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread was started"))
    both, settings = (mine, other), load_settings({}, platform="cpu")
    assert plugin_rejections(both, settings, "silu_and_mul", [IMPL], FREE, SPEC) == {}
    assert plugin_rejections(both, settings, "silu_and_mul", [IMPL]) == {}
    rejected = plugin_rejections(both, settings, "silu_and_mul", [IMPL], ASKS, SPEC)
    assert rejected == {"vendor.acme": "VLLM_BATCH_INVARIANT=1, and it is not measured"}
    assert asked == [(ASKS, SPEC)]
    with pytest.raises(PluginError, match="its rejections hook failed: TypeError: rejections ret"):
        plugin_rejections([wrong], settings, "silu_and_mul", [IMPL], ASKS, SPEC)


def test_without_a_verifier_nothing_is_known_to_be_batch_invariant() -> None:
    registry = OpRegistry()
    registry.register_impl(IMPL)
    manager = started(registry)
    trace = manager.trace("silu_and_mul", engine=True, facts=ASKS)
    why = "VLLM_BATCH_INVARIANT=1, but no loaded plugin measures it"
    assert ("vendor.acme", why) in trace.rejected
    assert manager.trace("silu_and_mul", engine=True, facts=FREE).selected is IMPL


def refusal(*every: Plugin, only: list[str] | None = None, preflight: str = "verify") -> str | None:
    return unverified(preflight, loaded(*every, only=only), plans_others=True)


NONE = "no loaded plugin verifies kernels: "
MISSING = f"{NONE}pip install vllm-fl-verify, or set VLLM_FL_PREFLIGHT=off"
BACKEND = found("fl-acme", plugin(doctor=nothing), "backend")
TOOLS = found("vllm-fl-tools", plugin(engine_session=nothing))
UNREADABLE = plugin(True, inspect_plan=nothing, settings=raising(ImportError("no file")))


@pytest.mark.parametrize("preflight", ["verify", "full", "run"])
def test_an_engine_needs_a_verifier(preflight: str) -> None:
    assert refusal(BACKEND, TOOLS, preflight=preflight) == MISSING
    assert refusal(BACKEND, found(VERIFY, verifier()), preflight=preflight) is None
    assert refusal(BACKEND, found("fl-verify", verifier(), "backend"), preflight=preflight) is None


def test_which_verifiers_can_be_left_out() -> None:
    plugins = loaded(BACKEND, found(VERIFY, ImportError()))
    assert unverified("off", plugins, plans_others=True) is None
    assert unverified("verify", plugins, plans_others=False) is None
    assert refusal(BACKEND, found(VERIFY, verifier()), only=["fl-acme"]) is None
    # Excluding any other verifier leaves the engine without verification.
    third = found("fl-verify", None, "backend")
    assert refusal(BACKEND, third, only=["fl-acme"]) == MISSING
    assert refusal(BACKEND, found("fl-squatter")) == MISSING
    tools = found("vllm-fl-tools", ImportError())
    assert refusal(BACKEND, tools) == MISSING
    assert refusal(BACKEND, tools, found("fl-squatter"), found(VERIFY, verifier())) is None


@pytest.mark.parametrize(
    "broken",
    [
        found(VERIFY, ImportError("no file")),
        found(VERIFY, UNREADABLE),
        found("fl", UNREADABLE, "backend"),
    ],
)
def test_a_broken_verifier_is_named_with_its_error(broken: Plugin) -> None:
    for others in ((), (found("fl-verify", verifier(), "backend"),)):
        reason = refusal(BACKEND, *others, broken)
        assert reason is not None and reason.startswith(f"{NONE}Plugin 'acme'")
        assert f"of {broken.owner.distribution} 1.0" in reason and "no file" in reason
        assert reason.endswith("Or set VLLM_FL_PREFLIGHT=off")


def test_a_process_starts_with_the_extensions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_fl.dispatch import startup

    calls: list[str] = []
    every = [
        found("fl-acme", None, "backend"),  # no backend is imported
        found("fl-squatter"),
        found(VERIFY, plugin(process_start=raising(OSError("no port")))),
        found("vllm-fl-tools", plugin(process_start=lambda: calls.append("tools"))),
    ]
    monkeypatch.setattr(startup.discovery, "discover", lambda: every)
    startup.begin_process.cache_clear()
    try:
        startup.begin_process()
        startup.begin_process()
        assert calls == ["tools"]
        (record,) = caplog.records
        assert f"{VERIFY} 1.0: its process_start hook failed: OSError: no port" in caplog.text
        assert record.levelname == "ERROR"
        wrong = SettingsError("no such folder", key="metrics", origin="environment")
        every[2:] = [found(VERIFY, plugin(process_start=raising(wrong)))]
        startup.begin_process.cache_clear()
        with pytest.raises(SettingsError) as caught:
            startup.begin_process()
        assert caught.value is wrong
    finally:
        startup.begin_process.cache_clear()


def test_a_setting_that_no_loaded_extension_reads_ends_the_startup() -> None:
    operate = Plugin(
        Owner("operate", "vllm-fl-tools"), "m", lambda: plugin(process_start=nothing), "extension"
    )
    plugins = loaded(operate)
    assert unread({"lock": None, "metrics": "m.prom", "shadow": None}, plugins) is None
    assert "VLLM_FL_METRICS: pip install vllm-fl-tools" in str(unread({"metrics": "m"}, ()))
    assert "VLLM_FL_SHADOW: pip install vllm-fl-verify" in str(unread({"shadow": "1"}, plugins))
