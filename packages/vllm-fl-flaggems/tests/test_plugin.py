"""The installed plugin: its entry point and its hooks' results."""

from __future__ import annotations

import pkgutil
from functools import partial

import pytest
from plugin_checks import PluginChecks

from vllm_fl import BackendImplKind
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.loading import load_settings
from vllm_fl.settings.names import check_names
from vllm_fl_flaggems import plugin


class TestPlugin(PluginChecks):
    plugin, impl_id, kind = plugin, "default.flagos", BackendImplKind.DEFAULT
    platforms, asks = ("cuda",), True


def test_what_it_orders_on_hopper_is_there_and_has_its_figure() -> None:
    policy = plugin.policy("cuda")
    assert policy is not None
    files = [("vllm-fl-flaggems", policy.path)]
    settings = load_settings({}, platform="cuda", platform_files=files)
    assert not check_names(settings, op=known_contracts().contracts).warnings
    orders = settings.by_device
    gated = {"linear_gelu_tanh_and_mul", "linear_silu_and_mul"}
    ordered = {"fused_experts", "linear", "linear_fp8", *gated, "qk_norm_rope", "reshape_and_cache"}
    assert ordered <= {impl.op_name for impl in plugin.register_ops()}
    assert set(orders) == {"attention_backend", *ordered}
    assert all(o.measured for each in orders.values() for o in each)

    def first(device: str, op: str, tokens: int) -> str:
        there = settings.with_devices(device, "compiled").policy
        return str(there.order(op, "compiled", engine=True, tokens=tokens)[0])

    ends = dict.fromkeys(("linear", *gated), 64) | {"linear_fp8": 32}
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20"):
        first_there = partial(first, device)
        assert {first_there(op, end) for op, end in ends.items()} == {"impl:default.flagos"}
        assert {first_there(op, end + 1) for op, end in ends.items()} == {"stock"}
        assert first_there("qk_norm_rope", 16384) == "impl:default.flagos"
        assert first_there("reshape_and_cache", 2049) == "impl:default.flagos"
        assert first_there("reshape_and_cache", 2048) == "stock"
        assert first_there("fused_experts", 2) == "impl:flagos.few_tokens"
        assert first_there("fused_experts", 3) == "stock"
        assert first_there("attention_backend", 1) == "impl:flagos.decode"


def test_attention_backends_are_where_their_paths_say() -> None:
    pytest.importorskip("vllm")
    for impl in plugin.attention_backend():
        assert pkgutil.resolve_name(impl.class_path).get_name() == "FLASH_ATTN"
