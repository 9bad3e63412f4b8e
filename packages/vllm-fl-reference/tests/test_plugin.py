"""The plugin: what it returns, and that the contracts agree with it."""

from __future__ import annotations

import pluggy
import pytest

from vllm_fl import BackendImplKind, OpImpl
from vllm_fl.contracts import contracts
from vllm_fl.plugins import hookspecs
from vllm_fl_reference import plugin

IMPLS = {impl.op_name: impl for impl in plugin.register_ops()}


def test_pluggy_finds_the_hook() -> None:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    (found,) = manager.hook.register_ops()
    assert [impl.op_name for impl in found] == list(IMPLS)


def test_every_contract_has_an_implementation() -> None:
    assert set(IMPLS) == set(contracts())


BY_CONTENTS = {
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_experts",
    "recurrent_gated_delta_rule",
}
"""Ops whose steps depend on what tensors hold: a compiler takes them whole."""

INTO_CACHES = {
    "causal_conv1d": {"conv_states"},
    "causal_conv1d_update": {"conv_state"},
    "concat_and_cache_mla": {"kv_cache"},
    "recurrent_gated_delta_rule": {"state"},
    "reshape_and_cache": {"key_cache", "value_cache"},
}
"""Ops that change what a request has left behind: op -> what of it."""


@pytest.mark.parametrize("impl", IMPLS.values(), ids=lambda impl: impl.op_name)
def test_identity(impl: OpImpl) -> None:
    assert impl.impl_id == "reference.torch"
    assert impl.kind is BackendImplKind.REFERENCE
    assert impl.traceable == (impl.op_name not in BY_CONTENTS)
    assert impl.vendor is None
    assert impl.consumes == INTO_CACHES.get(impl.op_name, set())
    assert impl.is_available()
