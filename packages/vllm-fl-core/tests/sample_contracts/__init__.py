"""Contracts of tests alone: a plugin of contracts like any other's. Each module is an op."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from vllm_fl import Contract, hookimpl


@hookimpl
def contracts() -> list[Contract]:
    return [Contract(import_module(f"{__name__}.{op.name}").SPEC) for op in iter_modules(__path__)]
