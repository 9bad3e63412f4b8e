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
    """Collect the `IMPL` of each module in `impl`."""
    names = [found.name for found in iter_modules(impl.__path__, f"{impl.__name__}.")]
    return [module.IMPL for module in map(import_module, names) if hasattr(module, "IMPL")]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """Return the default orders for the platform `acme`, None for others."""
    return PolicyDefaults(POLICY) if platform == "acme" else None
