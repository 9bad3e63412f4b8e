"""Build faulty kernels of any op by changing the result or the arguments of a correct one."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_fl.plugins.registry import known_contracts

from . import right
from .corpus import wrong_kernel


def damaged(op: str, spoil: Callable[..., Any], **fields: Any) -> Any:
    """Build a correct kernel whose result is replaced by `spoil(result, *arguments)`."""
    kernel = right.of(op)

    @functools.wraps(kernel)
    def kernel_of_op(*args: Any) -> Any:
        return spoil(kernel(*args), *args)

    return kernel_of_op, fields


def changed(op: str, change: Callable[[dict[str, Any]], Any], **fields: Any) -> Any:
    """Build a correct kernel whose arguments `change(arguments by name)` edits in place, except in
    calls that break the contract."""
    kernel, spec = right.of(op), known_contracts().contracts[op]

    @functools.wraps(kernel)
    def kernel_of_op(*args: Any) -> Any:
        if spec.check(*args) is None:
            arguments = {name: arg for name, arg in zip(spec.parameters, args, strict=False)}
            change(arguments)
            args = tuple(arguments.values())
        return kernel(*args)

    return kernel_of_op, fields


def with_arguments(op: str, args: tuple[Any, ...], **others: Any) -> Any:
    """Return the result of the correct kernel, with `others` instead of arguments of `args`."""
    arguments = dict(zip(known_contracts().contracts[op].parameters, args, strict=False))
    return right.of(op)(*{**arguments, **others}.values())


def each(result: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """Apply `act` to each tensor of a result."""
    if isinstance(result, tuple):
        return tuple(None if part is None else act(part) for part in result)
    return act(result)


def taken(result: Any, order: Tensor) -> Any:
    """Reorder the rows of a result: token i gets the rows of token `order[i]`."""
    tokens = len(order)
    return each(result, lambda part: part[order] if part.shape[:1] == (tokens,) else part)


def packed(x: Any) -> Any:
    """Return x read as if it were contiguous, or x itself if its storage is too small."""
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.numel() or x.is_contiguous():
        return x
    behind = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    if behind < x.numel():
        return x
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def unchecked(op: str, change: Callable[[dict[str, Any]], Any], **fields: Any) -> Any:
    """Like `changed`, but also for calls that break the contract."""
    kernel, spec = right.of(op), known_contracts().contracts[op]

    @functools.wraps(kernel)
    def kernel_of_op(*args: Any) -> Any:
        arguments = dict(spec.signature.bind(*args).arguments)
        arguments = {n: arguments.get(n, p.default) for n, p in spec.signature.parameters.items()}
        change(arguments)
        return kernel(*arguments.values())

    return kernel_of_op, fields


def remembers(by: Callable[..., Any]) -> Callable[..., Any]:
    """Like `by`, for functions with one more argument, the first: the memory of the kernel, a dict
    that is empty at first. Its counts begin at 0."""
    return lambda op, function: by(op, functools.partial(function, defaultdict(int)))


wrong_arguments = functools.partial(wrong_kernel, by=changed)
"""Add a kernel to the corpus: the decorated function is the change of `changed`."""

wrong_result = functools.partial(wrong_kernel, by=damaged)
"""Add a kernel to the corpus: the decorated function is the change of `damaged`."""

wrong_arguments_later = functools.partial(wrong_kernel, by=remembers(changed))
wrong_result_later = functools.partial(wrong_kernel, by=remembers(damaged))
"""The same, for functions with a memory of earlier calls; see `remembers`."""
