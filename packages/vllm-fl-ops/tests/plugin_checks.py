"""Core's requirements on a backend's plugin: each backend's tests derive from `PluginChecks`."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import yaml

from vllm_fl import BackendImplKind
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import NAMED_CLASSES

CODE = """
import sys, {module} as plugin
impls = [*plugin.register_ops(), *getattr(plugin, "attention_backend", list)()]
if hasattr(plugin, "device"):
    plugin.device().detection()
for platform in ("ascend", "cpu", "cuda"):
    getattr(plugin, "policy", print)(platform)
[impl.availability() for impl in impls if {asks}]
heavy = {{"vllm", "triton", "flag_gems", "torch_npu"}}
print(sorted(heavy & {{name.partition(".")[0] for name in sys.modules}}))
"""


def alone(code: str) -> str:
    """The last line that `code` prints in a process without emulated hardware."""
    env = {key: value for key, value in os.environ.items() if key != "VLLM_FL_PLUGIN_MODULES"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def have(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **versions: str) -> None:
    """Let `version` of this module find exactly these distributions (`_` means `-`)."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(module, "version", version)


class PluginChecks:
    """Checks of one installed plugin, with the id, vendor and kind of all its implementations, and
    the platforms of its policies. `asks`: whether availability is also determined without importing
    vLLM."""

    plugin: ClassVar[ModuleType]
    impl_id: ClassVar[str]
    vendor: ClassVar[str | None] = None
    kind: ClassVar[BackendImplKind] = BackendImplKind.VENDOR
    platforms: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[bool] = False

    @property
    def impls(self) -> dict[str, Any]:
        return {impl.op_name: impl for impl in self.plugin.register_ops()}

    def test_the_installed_entry_point_is_this_plugin(self) -> None:
        package = self.plugin.__name__.partition(".")[0]
        found = distribution(package.replace("_", "-")).entry_points
        (entry,) = found.select(group="vllm_fl.plugin")
        assert entry.name == package.removeprefix("vllm_fl_")
        assert entry.load() is self.plugin

    def test_hooks_import_no_vllm(self) -> None:
        assert alone(CODE.format(module=self.plugin.__name__, asks=self.asks)) == "[]"

    def test_identity(self) -> None:
        assert self.impls and set(self.impls) <= set(known_contracts().contracts)
        for impl in (*self.impls.values(), *getattr(self.plugin, "attention_backend", list)()[:1]):
            assert (impl.impl_id, impl.vendor) == (self.impl_id, self.vendor)
            assert impl.kind is self.kind

    def test_functions_have_the_contracts_parameters(self) -> None:
        for op, impl in self.impls.items():
            wanted = known_contracts().contracts[op].signature.parameters.values()
            for fn in filter(None, (impl.fn, impl.supports)):
                found = inspect.signature(fn).parameters.values()
                assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in wanted]
            assert impl.consumes <= known_contracts().contracts[op].consumable
            assert not impl.traceable or self.kind is BackendImplKind.REFERENCE

    def test_a_policy_is_for_its_platforms_and_excludes_no_kind(self) -> None:
        policy = getattr(self.plugin, "policy", lambda platform: None)
        found = {platform: policy(platform) for platform in ("ascend", "cpu", "cuda")}
        assert {name for name, defaults in found.items() if defaults} == set(self.platforms)
        for defaults in filter(None, found.values()):
            orders = yaml.safe_load(Path(defaults.path).read_text("utf-8")).get("op_backends", {})
            assert set(orders) <= {*known_contracts().contracts, *NAMED_CLASSES}
            for order in orders.values():
                for selectors in [order] if isinstance(order, list) else order.values():
                    assert {"flagos", "vendor", "reference"} <= set(selectors)
                    assert set(selectors) <= {"flagos", "vendor", "reference", "stock"}
