"""Small ops with every kind of output: contracts, correct and incorrect implementations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl

FOLDER = Path(__file__).with_name("sample_contracts")


@contextmanager
def sample_contracts() -> Iterator[None]:
    """Install the contracts of `sample_contracts/` in addition to those of other distributions."""
    with TemporaryDirectory() as folder:
        metadata = Path(folder, "sample_ops-1.dist-info")
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sample-ops\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text("[vllm_fl.contracts]\nops = sample_contracts\n")
        sys.path.append(folder)
        known_contracts.cache_clear()
        try:
            yield
        finally:
            sys.path.remove(folder)
            known_contracts.cache_clear()


def greedy_token(logits: Tensor) -> Tensor:
    return logits.float().argmax(-1)


def _steps(x: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """Values in steps of their scale, not yet rounded, and the scales."""
    wide = x.float() if group is None else x.float().unflatten(-1, (-1, group))
    scale = wide.abs().amax(-1).clamp(min=1e-10) / 127
    return (wide / scale.unsqueeze(-1)).contiguous().view(x.shape), scale.contiguous()


def quantise(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    value, scale = _steps(x, group)
    return value.round().to(torch.int8), scale


def quantise_down(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Round towards zero, as some hardware does: still within one step of the reference result."""
    value, scale = _steps(x, group)
    return value.to(torch.int8), scale


def quantise_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.contiguous().float()
    largest = wide.abs().amax() if x.numel() else wide.new_zeros(())
    scale = largest.clamp(min=1e-10).reshape(1) / 448
    return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def route(logits: Tensor, top_k: int, renormalise: bool = True) -> tuple[Tensor, Tensor]:
    weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


def route_last_first(logits: Tensor, top_k: int, renormalise: bool = True) -> tuple[Tensor, Tensor]:
    """Break ties in favour of the last expert; return experts in ascending order of weight."""
    flipped = logits.float().softmax(-1).flip(-1)
    weights, places = flipped.sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :top_k], logits.shape[-1] - 1 - places[:, :top_k]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.flip(-1).contiguous(), ids.int().flip(-1).contiguous()


RIGHT: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("greedy_token", greedy_token),
    ("quantise", quantise),
    ("quantise", quantise_down),
    ("quantise_tensor", quantise_tensor),
    ("route", route),
    ("route", route_last_first),
)


def _quantised(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    def wrong(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
        return change(*quantise(x, group))

    return wrong


def _last_row_off_by_one(value: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    value[-1:] += (value[-1:] < 127).to(torch.int8)
    return value, scale


def _scales_of_another_group(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    value, scale = quantise(x, group)
    return value, scale.roll(1, -1) if group else scale


def _fp8_off(x: Tensor) -> tuple[Tensor, Tensor]:
    value, scale = quantise_tensor(x)
    bits = value.view(torch.int8)
    return (bits + ((bits & 0x7F) < 0x70).to(torch.int8)).view(value.dtype), scale


def _scale_of_the_first_row(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantise_tensor(x)[0], quantise_tensor(x[:1])[1]


def _routed(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    def wrong(logits: Tensor, top_k: int, renormalise: bool = True) -> tuple[Tensor, Tensor]:
        weights, ids = change(logits, *route(logits, top_k, renormalise))
        return weights.contiguous(), ids.int().contiguous()

    return wrong


def _next_best(logits: Tensor, top_k: int, renormalise: bool = True) -> tuple[Tensor, Tensor]:
    """Return the (k+1)-th expert instead of the k-th."""
    weights, ids = logits.float().softmax(-1).topk(min(top_k + 1, logits.shape[-1]), dim=-1)
    keep = [*range(top_k - 1), weights.shape[-1] - 1]
    weights, ids = weights[:, keep], ids[:, keep]
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


def _one_expert_for_all(logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return weights, ids[:, :1].expand(ids.shape)


def _drops_the_best_of_ties(logits: Tensor, weights: Tensor, ids: Tensor) -> Any:
    """If two experts tie for the last place, return both and drop a clearly chosen one."""
    order = logits.float().softmax(-1).topk(min(ids.shape[-1] + 1, logits.shape[-1])).values
    tied = (order[:, -1] == order[:, ids.shape[-1] - 1]) & (order.shape[-1] > ids.shape[-1])
    others = logits.float().topk(min(ids.shape[-1] + 1, logits.shape[-1])).indices[:, -1]
    ids = ids.clone()
    ids[:, 0] = torch.where(tied, others, ids[:, 0])
    return weights, ids


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "an id off by one": ("greedy_token", lambda logits: greedy_token(logits) + 1),
    "one id off by one": (
        "greedy_token",
        lambda logits: greedy_token(logits) + (torch.arange(len(logits)) == len(logits) - 1),
    ),
    "the last of equal ones": (
        "greedy_token",
        lambda logits: logits.shape[-1] - 1 - logits.float().flip(-1).argmax(-1),
    ),
    "ids in int32": ("greedy_token", lambda logits: greedy_token(logits).int()),
    "a scale off by two": ("quantise", _quantised(lambda v, s: (v, s * 2))),
    "a scale off by a hundredth": ("quantise", _quantised(lambda v, s: (v, s * 1.01))),
    "values and scale off by two": (
        "quantise",
        _quantised(lambda v, s: (v.div(2, rounding_mode="floor"), s * 2)),
    ),
    "values off by one": ("quantise", _quantised(lambda v, s: (v + (v < 127).to(torch.int8), s))),
    "one row off by one": ("quantise", _quantised(_last_row_off_by_one)),
    "the scales of another row": ("quantise", _quantised(lambda v, s: (v, s.roll(1, 0)))),
    "the scales of another group": ("quantise", _scales_of_another_group),
    "values of another sign": ("quantise", _quantised(lambda v, s: (-v, s))),
    "floating values off by one": ("quantise_tensor", _fp8_off),
    "the scale of the first row": ("quantise_tensor", _scale_of_the_first_row),
    "half a scale": (
        "quantise_tensor",
        lambda x: (quantise_tensor(x)[0], quantise_tensor(x)[1] / 2),
    ),
    "an expert off by one": ("route", _routed(lambda x, w, i: (w, (i + 1) % x.shape[-1]))),
    "an expert that is none": ("route", _routed(lambda x, w, i: (w, i.masked_fill(i > 0, -1)))),
    "an expert beyond the last": ("route", _routed(lambda x, w, i: (w, i + x.shape[-1]))),
    "one expert twice": ("route", _routed(_one_expert_for_all)),
    "swapped weights": ("route", _routed(lambda x, w, i: (w.flip(-1), i))),
    "the weights of another token": ("route", _routed(lambda x, w, i: (w.roll(1, 0), i))),
    "the experts of another token": ("route", _routed(lambda x, w, i: (w, i.roll(1, 0)))),
    "never renormalised": (
        "route",
        lambda logits, top_k, renormalise=True: route(logits, top_k, False),
    ),
    "always renormalised": ("route", lambda logits, top_k, renormalise=True: route(logits, top_k)),
    "the next best expert": ("route", _next_best),
    "both of a tie and not the best": ("route", _routed(_drops_the_best_of_ties)),
}
"""Fault -> (op, an implementation with this fault)."""


def impl_of(op: str, fn: Callable[..., Any], **fields: Any) -> OpImpl:
    """An implementation that supports the calls that the contract allows, on the CPU."""

    spec = import_module(f"sample_contracts.{op}").SPEC

    def supports(*args: Any) -> Any:
        problem = spec.check(*args)
        if problem is None and args[0].device.type != "cpu":
            problem = "it", "runs on the CPU"
        return True if problem is None else " ".join(problem)

    supports.__signature__ = spec.signature  # type: ignore[attr-defined]
    options = {"supports": supports} | fields
    return OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, fn, "acme", **options)
