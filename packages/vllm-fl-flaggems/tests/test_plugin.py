"""The plugin as it is installed: its entry point, and what its hooks return."""

from __future__ import annotations

from importlib.metadata import distribution

from vllm_fl_flaggems import plugin


def test_the_installed_entry_point_is_this_plugin() -> None:
    (entry,) = distribution("vllm-fl-flaggems").entry_points.select(group="vllm_fl.plugin")
    assert entry.name == "flaggems"
    assert entry.load() is plugin


def test_register_ops_is_marked_as_a_hook_and_brings_nothing_yet() -> None:
    assert hasattr(plugin.register_ops, "vllm_fl_impl")
    assert plugin.register_ops() == ()
