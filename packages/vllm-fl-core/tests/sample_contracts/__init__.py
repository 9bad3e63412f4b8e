"""Contracts of tests alone: a plugin of contracts like any other's. Each module is an op."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from vllm_fl import Contract, hookimpl
from vllm_fl.contracts.arguments import Problem


@hookimpl
def contracts() -> list[Contract]:
    return [Contract(import_module(f"{__name__}.{op.name}").SPEC) for op in iter_modules(__path__)]


def floating_tensor(name: str, value: Any) -> Problem:
    """(name, problem) if `value` is no floating-point tensor."""
    is_floating = getattr(value, "is_floating_point", bool)()
    return None if is_floating else (name, f"must be a floating tensor, got {value!r}")
