"""Builder of the contracts of activations, with their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.arguments import Argument, like, tensor
from vllm_fl.contracts.sampling import Source
from vllm_fl.contracts.spec import ModelSizes, OpSpec, Sample, Tolerance

from .common import contract

if TYPE_CHECKING:
    import torch

Oracle = Callable[..., "torch.Tensor"]
ServedInputs = Iterator[tuple[str, "torch.Tensor", float]]


def activation_spec(
    oracle: Oracle,
    second_form: Oracle,
    tolerances: Mapping[str, Tolerance],
    *,
    gated: bool = False,
    special: bool = True,
    beside: Mapping[str, Argument] = MappingProxyType({}),
    samples: Callable[[Source], Iterable[Sample]] | None = None,
    further: Callable[[Source], Iterable[Sample]] = lambda source: (),
    call: Callable[[torch.Tensor], tuple[Any, ...]] = lambda x: (x,),
    power: int = 1,
    **more: Any,
) -> OpSpec:
    """Return the contract of an activation.

    Args:
        oracle: (x, further arguments) -> the result in fp64.
        second_form: the same function by another formula.
        tolerances: dtype -> tolerance.
        gated: whether x has two halves, (..., 2 * d). The result is then (..., d).
        special: whether NaN must give NaN, and infinity must give infinity. If False, the result of
            a row with either is unspecified.
        beside: the contract's arguments other than x.
        samples: calls that every implementation must compute correctly; None: made from
            `activation_inputs`.
        further: source -> more such calls.
        call: x -> the arguments of a call.
        power: results of a served model's calls grow with this power of x's magnitude.
        more: see `contract`.
    """
    parts = 2 if gated else 1
    served_inputs = served_gated_inputs if gated else served_activation_inputs

    def of_x(source: Source) -> Iterator[Sample]:
        for name, x in activation_inputs(source, parts):
            yield Sample(name, call(x))
        yield from further(source)
        if special:
            broken = source.normal(5, parts * 256)
            broken[1, 7], broken[3, 200] = float("nan"), float("inf")
            yield Sample("NaN and infinity", call(broken))
        else:
            yield Sample("NaN in a row", call(broken_row(source, parts)), open_rows=(1,))

    def served(source: Source, sizes: ModelSizes) -> Iterator[Sample]:
        for name, x, scale in served_inputs(source, sizes):
            yield Sample(name, call(x), scale**power)

    return contract(
        oracle,
        {"x": tensor("..., 2 * d") if gated else tensor("..."), **beside},
        (tensor("..., d") if gated else like("x"),),
        group="activations",
        samples=samples or of_x,
        second_form=second_form,
        tolerances=tolerances,
        **{"served": served, **more},
    )


def gated_inputs(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, x) for an op of the form act(x[..., :d]) * x[..., d:]."""
    yield "1 token", source.normal(1, 2 * 3072)
    yield "16 tokens", source.normal(16, 2 * 3072)
    yield "0 tokens", source.normal(0, 2 * 3072)
    yield "1 feature", source.normal(3, 2)
    yield "odd sizes", source.normal(7, 2 * 37)
    yield "odd sizes beyond one block", source.normal(3, 2 * 1031)
    yield "wide", source.normal(2, 2 * 12288)
    yield "3-D", source.normal(2, 3, 2 * 64)
    yield "4-D", source.normal(2, 3, 2, 2 * 64)
    far = source.normal(5, 2 * 256)
    far[:, :256] *= 300.0  # act(x) is x or 0 here; exp(x) overflows
    yield "gate far from zero", far
    yield "small values", source.normal(4, 2 * 256, scale=1e-2)
    broken = source.normal(5, 2 * 256)
    broken[1, 7], broken[3, 300] = float("nan"), float("inf")
    yield "NaN and infinity", broken
    yield "slice of a wider buffer", source.normal(6, 2 * 96 + 32)[:, 16 : 16 + 2 * 96]
    yield "every other row", source.normal(8, 2 * 64)[::2]


def served_gated_inputs(source: Source, sizes: ModelSizes) -> ServedInputs:
    """Yield (name, x, scale) for the gated MLP of a served model."""
    if sizes.intermediate is None:
        return
    shared = int(sizes.more.get("shared_intermediate") or 0)  # of shared experts
    for tokens in sizes.tokens:
        for d in dict.fromkeys((sizes.intermediate, shared or sizes.intermediate)):
            x, scale = source.normal(tokens, 2 * d), 1.0
            if source.large:
                # The products stay below fp16's 65504; in wider dtypes they exceed it.
                most = 100.0 if str(source.dtype) == "torch.float16" else 1e3
                scale = 3 * most
                x[:, :d] = source.spiked(tokens, d, scale=4.0, peak=most)
                x[:, d:] = source.spiked(tokens, d, scale=most / 2, peak=scale)
            yield f"{tokens} x 2*{d}{', large' * source.large}", x, scale


def activation_inputs(source: Source, parts: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, x) for an activation of x, or of `parts` equal parts of x."""
    yield "1 token", source.normal(1, parts * 512)
    yield "16 tokens", source.normal(16, parts * 512)
    yield "0 tokens", source.normal(0, parts * 512)
    yield "1 feature", source.normal(3, parts)
    yield "odd sizes beyond one block", source.normal(3, parts * 1031)
    yield "3-D", source.normal(2, 3, parts * 64)
    # exp(x) overflows; x * x stays below fp16's 65504.
    yield "far from zero", source.normal(5, parts * 256, scale=40.0)
    yield "small values", source.normal(4, parts * 256, scale=1e-2)
    yield "slice of a wider buffer", source.normal(6, parts * 96 + 32)[:, 16 : 16 + parts * 96]
    yield "every other row", source.normal(8, parts * 64)[::2]


def broken_row(source: Source, parts: int = 1) -> torch.Tensor:
    """Return x with a NaN and an infinity in each part of row 1, and in no other row."""
    x = source.normal(5, parts * 256)
    x[1, 7::256], x[1, 200::256] = float("nan"), float("inf")
    return x


def served_activation_inputs(source: Source, sizes: ModelSizes) -> ServedInputs:
    """Yield (name, x, scale) for an MLP without a gate of a served model."""
    if sizes.intermediate is None:
        return
    for tokens in sizes.tokens:
        x = source.normal(tokens, sizes.intermediate)
        if source.large:  # the squares stay below fp16's 65504
            most = 100.0 if str(source.dtype) == "torch.float16" else 1e3
            x = source.spiked(tokens, sizes.intermediate, scale=4.0, peak=most)
        yield f"{tokens} x {sizes.intermediate}{', large' * source.large}", x, 1.0
