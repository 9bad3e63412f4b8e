"""The plugin: its results, and that the contracts agree with them."""

from __future__ import annotations

from plugin_checks import PluginChecks

from vllm_fl import BackendImplKind
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_reference import plugin


class TestPlugin(PluginChecks):
    plugin, impl_id, kind = plugin, "reference.torch", BackendImplKind.REFERENCE
    platforms = ("cpu", "cuda")

    def test_every_contract_has_an_implementation(self) -> None:
        assert set(self.impls) == set(known_contracts().contracts)
        assert all(impl.is_available() for impl in self.impls.values())
