"""Traced forms: an implementation as code that stands in a compiled graph, its kernel included.

An opaque implementation is an operator to a compiler, and a call of it runs Python and Triton's own
launching: tens of microseconds of the host, where no graph was captured. Of a traced form the
compiler sees the launch (`torch.library.wrap_triton`), and its code launches the kernel as it does
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..contracts import OpSpec
from ..plugins.forms import verdict_of
from ..plugins.types import OpImpl, answered


def functional(code: Callable[..., Any]) -> Callable[..., Any]:
    """`code` with results in new tensors in the place of what it writes over."""
    pure: Callable[..., Any] = torch.func.functionalize(code, remove="mutations")
    return pure


def refused(impl: OpImpl, spec: OpSpec, args: Sequence[Any]) -> str:
    """Why an implementation takes no such call; empty where it does.

    Args:
        impl, spec: the implementation, and its op's contract.
        args: the contract's arguments, as a graph has them: tensors without memory.
    """
    verdict = answered("its supports", lambda: verdict_of(impl, spec, args))
    return "" if verdict is True else verdict
