"""The Acme plugin: one function for each hook."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from . import impl

POLICY = Path(__file__).with_name("acme.yaml")


@hookimpl
def register_ops() -> list[OpImpl]:
    """Collect the `IMPL` of each module in `impl`, except names with a leading `_`."""
    names = [found.name for found in iter_modules(impl.__path__) if found.name[0] != "_"]
    return [import_module(f"{impl.__name__}.{name}").IMPL for name in names]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """Return the default orders for the platform `acme`, None for others."""
    return PolicyDefaults(POLICY) if platform == "acme" else None
