"""The plugin as it is installed: its entry point, and what its hooks return."""

from __future__ import annotations

import inspect
from importlib.metadata import distribution

from vllm_fl.contracts import contracts
from vllm_fl_flaggems import plugin


def test_the_installed_entry_point_is_this_plugin() -> None:
    (entry,) = distribution("vllm-fl-flaggems").entry_points.select(group="vllm_fl.plugin")
    assert entry.name == "flaggems"
    assert entry.load() is plugin


def test_every_hook_is_marked() -> None:
    for hook in (plugin.register_ops, plugin.attention_backend, plugin.worker_start):
        assert hasattr(hook, "vllm_fl_impl")


def test_what_it_brings_has_the_contracts_parameters() -> None:
    impls = {impl.op_name: impl for impl in plugin.register_ops()}
    assert impls and set(impls) <= set(contracts())
    for op, impl in impls.items():
        wanted = contracts()[op].signature.parameters.values()
        for fn in (impl.fn, impl.supports):
            found = inspect.signature(fn).parameters.values()
            assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in wanted]
        assert impl.consumes <= contracts()[op].consumable
        assert impl.traceable is False


def test_the_attention_backend_is_where_its_path_says() -> None:
    (impl,) = plugin.attention_backend()
    module, _, name = impl.class_path.rpartition(".")
    assert module == f"{plugin.__name__.rpartition('.')[0]}.impl.attention"
    assert name == "AttentionFLBackend"
