"""Helpers for the contracts of several families of ops."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Argument, Tensor, declared
from vllm_fl.contracts.sampling import Source, peak
from vllm_fl.contracts.spec import ModelSizes, OpSpec, Sample, Tolerance

if TYPE_CHECKING:
    import torch


def contract(
    oracle: Callable[..., Any],
    arguments: Mapping[str, Argument],
    results: tuple[Tensor, ...] | Callable[..., Any],
    *,
    samples: Callable[[Source], Iterable[Sample]],
    served: Callable[..., Iterable[Sample]],
    **more: Any,
) -> OpSpec:
    """Return the contract of an op with inputs from a `Source`.

    Args:
        oracle, arguments, results, more: see `declared`.
        samples: source -> the calls that every implementation must compute correctly.
        served: (source, model sizes, size, ...) -> the calls of a served model. The name of each
            `size` is a field of `ModelSizes`, or a key of its `more`. If such a size is unknown,
            the result is empty.
    """
    asked = list(inspect.signature(served).parameters)[2:]

    def of_model(
        sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
    ) -> Iterable[Sample]:
        values = [getattr(sizes, name, sizes.more.get(name)) for name in asked]
        if None in values:
            return ()
        return served(Source(dtype, device, large), sizes, *(int(size or 0) for size in values))

    def of_all(dtype: torch.dtype, device: torch.device) -> Iterable[Sample]:
        return samples(Source(dtype, device))

    return declared(oracle, arguments, results, samples=of_all, served=of_model, **more)


ROUNDED = {
    "float32": (1.3e-6, "PyTorch's fp32 default, also vLLM's"),
    "float16": (2e-3, "4 roundings of 2^-11"),
    "bfloat16": (1.6e-2, "4 roundings of 2^-8, vLLM's bf16 default"),
}
"""Relative tolerances of results that were rounded a few times, with reasons."""


def rounded(**beside: tuple[float, str]) -> dict[str, Tolerance]:
    """Return tolerances of results that were rounded a few times.

    Args:
        beside: dtype -> (atol, text after the reason in `ROUNDED`).
    """
    return {
        dtype: Tolerance(ROUNDED[dtype][0], atol, ROUNDED[dtype][1] + why)
        for dtype, (atol, why) in beside.items()
    }


def of_layer(*same: str, **other: str) -> dict[str, Any]:
    """Return the `OpSpec` fields of parameters that are attributes of a layer.

    Args:
        same: parameters with the same name as their attribute.
        other: parameter -> attribute, such as `weight.data`.
    """
    attributes = {**dict(zip(same, same, strict=True)), **other}

    def layer(**given: Any) -> object:
        return SimpleNamespace(
            **{attributes[name].partition(".")[0]: value for name, value in given.items()}
        )

    return {"from_layer": {n: _reader(a) for n, a in attributes.items()}, "layer": layer}


def _reader(attribute: str) -> Callable[[Any], Any]:
    """Return a function that PyTorch's compiler can trace, unlike an `attrgetter`."""
    first, _, second = attribute.partition(".")
    if second:
        return lambda layer: getattr(getattr(layer, first), second)
    return lambda layer: getattr(layer, first)


def activations(source: Source, *shape: int, scale: float) -> torch.Tensor:
    """Normally distributed x; with `source.large`, some features are as large as real outliers."""
    x = source.normal(*shape)
    return source.spiked(*shape, scale=scale, peak=peak(source.dtype)) if source.large else x


def beyond(good: Mapping[str, Any], name: str, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield bad inputs with indices of at least `count`, and below 0.

    On an accelerator, yield none, because bad indices make it unusable.
    """
    at = good[name]
    if at.device.type == "cpu":
        yield f"{name} beyond the last one", {name: at + count}
        yield f"{name} below the first one", {name: at - count}


def not_finite(*names: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield bad inputs with NaN and infinity in numbers that implementations read before they
    compute."""
    for name in names:
        yield from ((f"{name}: {value}", {name: value}) for value in (math.nan, math.inf))
