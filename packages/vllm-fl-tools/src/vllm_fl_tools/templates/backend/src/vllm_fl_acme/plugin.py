"""What this distribution brings: the plugin that the entry point `acme` names."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from vllm_fl import OpImpl, PolicyDefaults, hookimpl

from . import impl

POLICY = Path(__file__).with_name("acme.yaml")


@hookimpl
def register_ops() -> list[OpImpl]:
    """The op of each module in `impl` that has one, as `vendor.acme`."""
    names = [found.name for found in iter_modules(impl.__path__, f"{impl.__name__}.")]
    return [module.IMPL for module in map(import_module, names) if hasattr(module, "IMPL")]


@hookimpl
def policy(platform: str) -> PolicyDefaults | None:
    """The order per op on the platform `acme`; nothing for another one."""
    return PolicyDefaults(POLICY) if platform == "acme" else None
