"""The plugin that registers the contracts of vllm-fl's ops, through the hook `contracts`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from vllm_fl import OpSpec, hookimpl
from vllm_fl.contracts.binding import Contract

from . import bindings


@hookimpl
def contracts() -> list[Contract]:
    """Return the contracts of every module in `bindings`, from the module of the same name in
    `contracts`."""
    names = [found.name for found in iter_modules(bindings.__path__) if found.name[0] != "_"]
    found = (
        Contract(spec, f"{bindings.__name__}.{name}") for name in names for spec in _specs(name)
    )
    return sorted(found, key=lambda contract: contract.name)


def _specs(name: str) -> tuple[OpSpec, ...]:
    module = import_module(f"{__package__}.contracts.{name}")
    return module.SPECS if hasattr(module, "SPECS") else (module.SPEC,)
