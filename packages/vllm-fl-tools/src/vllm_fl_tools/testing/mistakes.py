"""Calls that violate a contract: from the contract, or derived from its argument declarations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_fl.contracts import BadInput, OpSpec
from vllm_fl.contracts.arguments import Tensor, has_rows


def mistaken_calls(spec: OpSpec, dtype: torch.dtype, device: torch.device) -> Iterator[BadInput]:
    """Yield calls that `check` must reject: `spec.bad_inputs`, and a mistake in each argument.

    `dtype` and `device` are those of the samples that are changed.
    """
    yield from spec.bad_inputs(dtype, device)
    missing = dict(spec.arguments)
    for sample in spec.samples(dtype, device) if missing else ():
        good = spec.named(sample.args)
        if not has_rows(next(x for x in sample.args if isinstance(x, torch.Tensor))):
            continue
        for name in [name for name in missing if good[name] is not None]:
            of = _of_tensors if isinstance(missing.pop(name), Tensor) else _of_values
            for what, value in of(name, spec.arguments[name], good[name]):
                args = tuple((good | {name: value}).values())
                # Skip mistakes that only values show, because such a call can make a device
                # unusable.
                if problem := spec.check(*map(_valueless, args)):
                    yield BadInput(f"{name}: {what}", args, problem[0])


def _valueless(argument: Any) -> Any:
    return argument.to("meta") if isinstance(argument, torch.Tensor) else argument


def _of_values(_: str, __: object, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (description, value that a caller may pass by mistake); some may be valid."""
    if isinstance(value, bool):  # any value is true or false
        return
    wrong: tuple[Any, ...] = None, "another", True
    if isinstance(value, int | float):
        wrong = None, str(value), value + 0.5, 0, -1, value + 1, 4096 * value
    yield from {repr(each): each for each in wrong}.items()


def _of_tensors(name: str, argument: Tensor, value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Yield mistakes for a tensor, like `_of_values`.

    Integers are a mistake for a float argument of one dtype, and for a weight, because a kernel
    would read their bytes as floats. Other arguments of several dtypes may be integers.
    """
    yield from (("None", None), ("a list", [1.0]))
    others = [] if value.is_floating_point() else ["float32"]
    if value.is_floating_point() and (len(argument.dtypes) < 2 or name == "weight"):
        others.append("int64")
    if len(argument.dtypes) == 1:
        others.append("float32" if value.dtype != torch.float32 else "bfloat16")
    for other in dict.fromkeys(others):
        yield f"of {other}", value.to(getattr(torch, other))
    yield "of a dimension more", value[None]
    for at, size in enumerate(value.shape):
        for few in sorted({1, size - 1} - {0, size}):
            yield f"of {few} in dimension {at}", value.narrow(at, 0, few).contiguous()
