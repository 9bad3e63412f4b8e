"""API of vllm-plugin-FL that code relies on: it works or warns, as docs/migration.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import X, failing, managing, registry_with_settings, silu

from vllm_fl import dispatch
from vllm_fl.dispatch import (
    BackendImplKind,
    BackendPriority,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    call_op,
    get_policy,
    policy_context,
    policy_from_config,
    reset_default_manager,
    reset_global_policy,
    set_global_policy,
    with_preference,
    with_strict_mode,
)
from vllm_fl.errors import PolicySealedError, SettingsError
from vllm_fl.plugins.loading import load
from vllm_fl.plugins.plugin import Owner, Plugin
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.names import check_names


@pytest.fixture
def fresh_manager() -> Iterator[None]:
    """A default manager before discovery; reset it afterwards."""
    reset_default_manager()
    yield
    reset_default_manager()


# Policies.


def test_a_policys_positions_are_the_older_ones() -> None:
    policy = SelectionPolicy("flagos", False, (), frozenset({"AMD"}))  # type: ignore[arg-type]
    assert policy.deny_vendors == {"AMD"} and policy.allow_vendors is None
    orders: Any = (("rms_norm", ("vendor:cuda", "flagos")),)
    policy = SelectionPolicy("vendor", True, orders, frozenset("a"), frozenset("b"))
    assert (policy.deny_vendors, policy.allow_vendors) == ({"a"}, {"b"})
    assert [*map(str, policy.order("rms_norm"))] == ["vendor:cuda", "flagos"]
    assert policy.refuses(silu("vendor.a")) == "deny_vendors contains a"
    assert policy.refuses(silu("vendor.b")) is None


def test_setting_the_global_policy_gives_back_the_one_before(
    fresh_manager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    before = set_global_policy(SelectionPolicy(strict=True))
    assert before.prefer == "reference"
    assert set_global_policy(before) == SelectionPolicy(strict=True)
    assert get_policy() is before
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")  # `set_global_policy` read no settings
    assert get_policy() is before
    reset_global_policy()
    assert get_policy().prefer == "vendor"


def test_a_manager_of_ones_own_registry_goes_by_the_global_policy_and_the_settings(
    fresh_manager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_with_settings(
        failing("default.flagos", RuntimeError("no kernel")), silu("reference.torch", 1.0)
    )
    assert OpManager(registry=registry).call("silu_and_mul", X).eq(2).all()  # falls back

    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    with pytest.raises(RuntimeError, match="no kernel"):
        OpManager(registry=registry).call("silu_and_mul", X)
    monkeypatch.setenv("USE_FLAGGEMS", "false")
    assert OpManager(registry=registry).call("silu_and_mul", X).eq(2).all()
    monkeypatch.delenv("USE_FLAGGEMS")
    monkeypatch.delenv("VLLM_FL_STRICT")

    older = OpManager(registry=registry)
    assert older.get_selected_impl_id("silu_and_mul") == "default.flagos"
    set_global_policy(SelectionPolicy(prefer="reference"))
    assert older.get_selected_impl_id("silu_and_mul") == "reference.torch"
    assert OpManager(registry).get_selected_impl_id("silu_and_mul") == "reference.torch"
    own = OpManager(registry, SelectionPolicy())
    assert own.get_selected_impl_id("silu_and_mul") == "default.flagos"  # keeps its own policy
    reset_global_policy()
    assert older.get_selected_impl_id("silu_and_mul") == "default.flagos"


def test_a_sealed_manager_keeps_every_other_as_it_was(fresh_manager: None) -> None:
    registry = OpRegistry()
    registry.register_many([silu("default.flagos"), silu("reference.torch")])
    one, sealed = OpManager(registry), OpManager(registry)
    sealed.seal("an engine")
    with pytest.raises(PolicySealedError):
        set_global_policy(SelectionPolicy(prefer="reference"))
    assert one.get_selected_impl_id("silu_and_mul") == "default.flagos"
    for wrong in ("reference", None):
        with pytest.raises(TypeError):
            set_global_policy(wrong)  # type: ignore[arg-type]
    assert get_policy().prefer == "flagos"


def test_preferences_in_capitals_and_contexts_as_decorators(fresh_manager: None) -> None:
    before = get_policy()
    with with_preference("VENDOR") as policy:
        assert policy.prefer == "vendor" == get_policy().prefer

    @with_strict_mode()
    def strict() -> bool:
        return get_policy().strict

    context = policy_context(SelectionPolicy(prefer="reference"))
    with context, context:
        assert get_policy().prefer == "reference"
    assert strict() is True
    assert get_policy() is before


# Kinds.


def test_a_kind_is_text_and_fields_that_nobody_read_are_kept() -> None:
    impl = OpImpl(
        op_name="silu_and_mul",
        impl_id="vendor.acme",
        kind=BackendImplKind.VENDOR,
        fn=lambda x: x,
        vendor="acme",
        priority=BackendPriority.VENDOR,
        supported_dtypes={"bfloat16"},
    )
    assert impl.supported_dtypes == {"bfloat16"} and impl.min_arch is None
    assert impl.kind == "vendor" and f"{impl.kind}" == "vendor" and str(impl.kind) == "vendor"
    assert json.dumps({"kind": impl.kind}) == '{"kind": "vendor"}'
    assert {"flagos": 1}[BackendImplKind.DEFAULT] == 1
    assert impl.kind.value == "vendor" and impl.kind is BackendImplKind.VENDOR
    assert BackendImplKind("reference") is BackendImplKind.REFERENCE


# Plugins and registries.


def test_the_list_of_plugins_can_be_emptied(fresh_manager: None) -> None:
    dispatch.discover_plugins(OpRegistry())
    dispatch.clear_discovered_plugins()
    assert dispatch.get_discovered_plugins() == ()
    found = dispatch.discover_plugins(OpRegistry())
    assert dispatch.get_discovered_plugins() == found


def test_a_class_with_a_classmethod_register_is_a_plugin() -> None:
    class Classy:
        @classmethod
        def register(cls, registry: Any) -> None:
            assert registry.get_implementations("silu_and_mul") == []
            registry.register_impl(silu("vendor.acme"))
            assert registry.list_operators() == ["silu_and_mul"]
            (impl,) = registry.get_implementations("silu_and_mul")
            assert registry.get_implementation("silu_and_mul", "vendor.acme") is impl

    registry = OpRegistry()
    (plugin,) = load(registry, [Plugin(Owner("Classy"), "Classy", lambda: Classy)])
    assert plugin.status == "ok"
    assert registry.get_implementation("silu_and_mul", "vendor.acme") is not None
    assert registry.get_implementation("silu_and_mul", "vendor.beta") is None


def test_settings_files_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "older.yaml"
    path.write_text(
        "prefer:\ndeny_vendors: a, b\nallow_vendors:\nflagos_blacklist:\n"
        'op_backends:\n  rms_norm: "vendor:cuda|flagos"\n  silu_and_mul:\n'
    )
    policy = policy_from_config(path)
    assert policy == SelectionPolicy(
        per_op_order={"rms_norm": ["vendor:cuda", "flagos"]},  # type: ignore[dict-item]
        deny_vendors=frozenset("ab"),
    )
    path.write_text("op_backends:\n")
    assert policy_from_config(path) == SelectionPolicy()


@pytest.mark.parametrize("name", ["gated_layer", "masked_fill", "silu_and_mul_with_clamp"])
def test_layer_names_of_the_older_plugin_end_no_start(name: str, tmp_path: Path) -> None:
    path = tmp_path / "metax.yaml"
    path.write_text(f"prefer: flagos\noot_blacklist: [{name}]\n")
    settings = load_settings({}, platform="metax", platform_files=[("older 1.0", str(path))])
    layers = ("rms_norm", "fused_moe")
    checked = check_names(settings, op=(), layer=layers, bindings=known_contracts().bindings)
    assert checked.unchecked == (f"oot_blacklist.{name}",)
    assert any(f"no layer '{name}'" in warning for warning in checked.warnings)
    known = check_names(settings, op=(), layer=("rms_norm", name))
    assert known.unchecked == () and known.warnings == settings.warnings
    path.write_text("oot_blacklist: [rms_nrom]\n")  # a typo is still an error
    slip = load_settings({}, platform="metax", platform_files=[("older 1.0", str(path))])
    with pytest.raises(SettingsError, match="rms_norm"):
        check_names(slip, op=(), layer=("rms_norm",))


# Managers.


def test_the_op_may_be_named_by_keyword() -> None:
    manager = managing(silu("reference.torch"))
    assert manager.call(op_name="silu_and_mul", x=X).shape == (2, 4)
    with pytest.raises(TypeError, match="op_name"):
        call_op()


# Names and modules.


def test_imports_as_older_code_writes_them() -> None:
    code = """
import sys
from vllm_fl.dispatch.backends.base import Backend
from vllm_fl.dispatch.builtin_ops import register_builtins
from vllm_fl.dispatch.discovery import discover_plugins
from vllm_fl.dispatch.logger_manager import get_logger, set_log_level
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.dispatch.method_dispatch import dispatch_method
from vllm_fl.dispatch.ops import VLLMFLBackendBase
from vllm_fl.dispatch.policy import SelectionPolicy, get_policy, policy_context, policy_from_config
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl

assert VLLMFLBackendBase is Backend and "torch" not in sys.modules
"""
    env = {**os.environ, "VLLM_FL_PLUGINS": ""}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
