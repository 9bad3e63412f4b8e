"""Checks of arguments, for contracts of 0.2 and 0.3 that have `check` as a function.

Each returns None, or (parameter, problem), so that `a(...) or b(...)` gives the first problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm_fl.contracts.arguments import FLOATING, Problem, on_device_of

from .activations import gated_tensor

__all__ = [
    "Problem",
    "finite_number",
    "floating_tensor",
    "gated_tensor",
    "matrix",
    "on_device_of",
    "one_number",
    "shaped",
]


def floating_tensor(name: str, value: Any) -> Problem:
    """`value` must be a tensor of a dtype in which models are served."""
    import torch

    if not isinstance(value, torch.Tensor):
        return name, f"must be a torch.Tensor, got {type(value).__name__}"
    if str(value.dtype).removeprefix("torch.") not in FLOATING:
        return name, f"must be float32, float16 or bfloat16, got {value.dtype}"
    return None


def finite_number(name: str, value: Any, above: float = -math.inf) -> Problem:
    """`value` must be a finite number, and above `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return name, f"must be a number, got {type(value).__name__}"
    if not above < value < math.inf:
        bound = "" if above == -math.inf else f" and above {above:g}"
        return name, f"must be finite{bound}, got {value}"
    return None


def shaped(name: str, value: Any, shape: Sequence[int], meaning: str) -> Problem:
    """The tensor `value` must have exactly `shape`; `meaning` says where that comes from."""
    if tuple(value.shape) == tuple(shape):
        return None
    return name, f"must have {meaning} {tuple(shape)}, got {tuple(value.shape)}"


def matrix(name: str, value: Any) -> Problem:
    """`value` must be a floating tensor of shape (tokens, features), with at least one feature."""
    problem = floating_tensor(name, value)
    if problem is None and (value.ndim != 2 or not value.shape[1]):
        return name, f"must be (tokens, features), got {tuple(value.shape)}"
    return problem


def one_number(name: str, value: Any, dtype: str) -> Problem:
    """`value` must be a tensor of one element, of this dtype."""
    import torch

    if not isinstance(value, torch.Tensor):
        return name, f"must be a torch.Tensor or None, got {type(value).__name__}"
    if str(value.dtype).removeprefix("torch.") != dtype or value.numel() != 1:
        return name, f"must be one number of {dtype}, got {value.dtype} of {tuple(value.shape)}"
    return None
