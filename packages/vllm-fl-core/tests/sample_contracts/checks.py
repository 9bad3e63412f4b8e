"""A check of arguments, for contracts that have `check` as a function."""

from __future__ import annotations

from typing import Any

from vllm_fl.contracts.arguments import Problem, tensor

__all__ = ["floating_tensor"]


def floating_tensor(name: str, value: Any) -> Problem:
    """`value` must be a tensor of a dtype in which models are served."""
    return tensor("...").problem(name, value, {name: value})
