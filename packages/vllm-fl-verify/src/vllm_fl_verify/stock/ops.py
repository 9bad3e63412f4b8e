"""Comparison of vLLM's layers with the contracts, on live tensors, and of its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.patchers.layers import LayerClass, layer_table
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl.text import quote

from .. import probe
from ..expected import Near
from ..live import Live
from ..oracle import parts
from ..preflight import host_threads
from .rows import StockRows

CONTRACT, LOGITS = "its contract", "the hidden states' product"

TOKENS = 33
"""Number of random hidden states for the comparison of logits."""


def compare_layers(worker: Any, models: Mapping[str, Any], rows: StockRows) -> None:
    """Compare every layer that has an op's contract, in eager forwards of the loaded models.

    Args:
        worker: vLLM's worker.
        models: prefix of layer names -> model.
        rows: receives the results.
    """
    specs = get_default_manager().registry.snapshot().contracts
    live = Live(Plan("eager", {}, contracts=specs), models, worker.device)
    config = worker.vllm_config
    most = config.scheduler_config.max_num_batched_tokens
    with live.watching(), _compared(live, rows), host_threads(worker.device):
        for tokens in sorted({min(count, most) for count in probe.FORWARD_SIZES}, reverse=True):
            why = probe.forward(worker.model_runner, models, config, tokens)
            if why:
                return rows.skip(("layers", "", CONTRACT), "", why)
    for op, why in live.left_out.items():
        rows.skip((f"layers of {op}", "", CONTRACT), "", why)


@contextmanager
def _compared(live: Live, rows: StockRows) -> Iterator[None]:
    """Inside the block, compare the calls of layers that have a contract."""
    table = {layer.base: layer for layer in layer_table()}
    with ExitStack() as back:
        for prefix, model in live.models.items():
            for name, module in model.named_modules():
                layer = table.get(type(module))
                if layer is not None and "forward" not in vars(module):
                    compare = partial(_compare, live, layer, module, prefix + name, rows)
                    vars(module)["forward"] = partial(compare, module.forward)
                    back.callback(vars(module).pop, "forward")
        yield


def _compare(
    live: Live,
    layer: LayerClass,
    module: Any,
    name: str,
    rows: StockRows,
    own: Callable[..., Any],
    *args: Any,
    **named: Any,
) -> Any:
    """Call a layer's method `own`, and compare the call."""
    spec, target = live.plan.contracts[layer.op], layer.target
    provider = target.stand_in(module) if target.stand_in else module
    method = getattr(module, "_forward_method", own)
    key = layer.base.__name__, getattr(method, "__name__", type(method).__name__), CONTRACT

    def op(*given: Any, **by_name: Any) -> Any:
        left = [p for p in spec.parameters if p not in spec.from_layer]
        values = dict(zip(left, given, strict=False)) | by_name
        values |= {p: read(provider) for p, read in spec.from_layer.items()}
        call = spec.signature.bind_partial(**values)
        call.apply_defaults()
        arguments = tuple(call.arguments.get(p) for p in spec.parameters)
        shapes = spec.fake(*arguments)
        result: list[Any] = []

        def run(*_: Any) -> Any:
            result.append(own(*args, **named))
            as_parts = zip(parts(result[0]), parts(shapes), strict=True)
            shaped = [a if a is None else a.reshape(b.shape).contiguous() for a, b in as_parts]
            return tuple(shaped) if isinstance(shapes, tuple) else shaped[0]

        # Each layer has an id, since `Live` stops comparing an incorrect implementation.
        kind, consumes = BackendImplKind.REFERENCE, frozenset(target.grants) & spec.consumable
        impl = OpImpl(layer.op, f"stock.{name}", kind, run, consumes=consumes)
        before, live.worst = live.compared, 0.0
        found = live.call(spec, impl, arguments)
        if live.compared > before:
            objection = live.objections.get((layer.op, impl.impl_id))
            share = live.worst if objection is None else max(live.worst, 1.0)
            rows.add(key, name, share, "" if objection is None else objection.reason)
        return found

    return (target.adapt(module, op) if target.adapt else op)(*args, **named)


def compare_logits(worker: Any, model: Any, rows: StockRows, seed: int) -> None:
    """Compare the logits of random hidden states: product, soft cap, scale, and the kept columns.

    All ranks must call it.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    size = worker.vllm_config.model_config.get_hidden_size()
    dtype = worker.vllm_config.model_config.dtype
    hidden = torch.randn(TOKENS, size, generator=generator, dtype=torch.float32)
    hidden = hidden.to(worker.device, dtype)
    seen: list[tuple[Any, Any, Any]] = []
    processors = [m for m in model.modules() if type(m).__name__ == "LogitsProcessor"]
    key = "LogitsProcessor", type(model).__name__, LOGITS
    try:
        with ExitStack() as hooks:
            for each in processors:
                hooks.enter_context(each.register_forward_hook(lambda *call: seen.append(call)))
            got = model.compute_logits(hidden.clone())
    except Exception as error:
        return rows.add(key, "logits", float("inf"), f"it raised {quote(error)}")
    if len(seen) != 1 or got is None:
        why = "another rank has the logits" if got is None else "the model computes them otherwise"
        return rows.skip(key, "logits", why)
    layer, (head, x, *rest), returned = seen[0]
    if got is not returned:
        return rows.skip(key, "logits", "the model changes them afterwards")
    weight = getattr(head, "weight", None)
    if weight is None or weight.ndim != 2 or weight.dtype != dtype or head.tp_size > 1:
        exact = head.quant_method.apply(head, x, bias=rest[0] if rest else None).double()
        norms = exact.abs()
    else:
        exact = torch.cat([x.double() @ some.double().t() for some in weight.split(256)], 1)
        norms = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
        norms = norms * size**-0.5
        if rest and rest[0] is not None:
            exact = exact + rest[0].double()
    start = head.shard_indices.padded_org_vocab_start_index if head.tp_size > 1 else 0
    count = max(0, min(exact.shape[1], layer.org_vocab_size - start))
    exact, norms = exact[:, :count], norms[:, :count]
    if layer.soft_cap is not None:
        exact = (exact / layer.soft_cap).tanh() * layer.soft_cap
    exact, norms = exact * layer.scale, norms * abs(layer.scale)
    allowed = 2 * torch.finfo(got.dtype).eps * (exact.abs() + 2 * norms)
    mine = got[:, start : start + count]
    columns = got.shape[1] - layer.org_vocab_size
    share, problem = Near(exact, allowed, got.dtype).deviation([mine], ["the logits"], None)
    if columns:
        share, problem = float("inf"), f"{columns} more columns than tokens of the vocabulary"
    rows.add(key, "logits", share, problem)
