"""Profile a decode step of stock vLLM's CPU engine by operator, and map operators to our ops.

    python tools/model_operators.py              # every family, eager
    python tools/model_operators.py qwen3_moe deepseek_v3

Each family is a tiny model, which runs in its own process without vllm-fl. Each line of the output
is a row of the table in docs/measurements/models.md. Views and allocations are ignored. The
operators inside the model are in three groups:

- matrix products, and the kernel of the experts
- self time and calls in attention, or in a layer, function or operator that a binding refers to
- the rest, which is vLLM's
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from importlib import import_module
from inspect import getattr_static
from pathlib import Path
from typing import Any

import tiny_model
from engine_run import SMALL, STOCK

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "onednn_mm", "_scaled_mm")
"""Last parts of the names of operators that are only matrix products."""

ATTENTION = ("unified_attention", "unified_mla_attention", "unified_kv_cache_update")
"""Prefixes of vLLM's operators for whole attention (op `attention_backend`)."""

TOKENS, BATCH, STEPS = 16, 8, 8

OURS = "vllm-fl: "


def main() -> int:
    """Profile the requested families; return 1 if an engine failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--into", help=argparse.SUPPRESS)  # used for the process of the engine
    options = parser.parse_args()
    if options.into:
        (family,) = options.families
        Path(options.into).write_text(json.dumps(profile(family)))
        return 0
    failed = False
    for family in options.families or tiny_model.FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            done = subprocess.run(
                [sys.executable, __file__, family, "--into", str(out)],
                env={**os.environ, **SMALL, **STOCK, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode or not out.exists():
                print(f"{family}: the engine failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
                failed = True
                continue
            print(row(family, json.loads(out.read_text())), flush=True)
    return int(failed)


def row(family: str, found: dict[str, dict[str, list[float]]]) -> str:
    """Format a row of the table.

    Columns: family; share of our ops; time and calls per op; the largest operators of the rest;
    shares of matrix products and of the experts (op `fused_experts`) in the whole step.
    """
    rest, products, experts = (found.pop(name, {}) for name in ("", "products", "fused_experts"))
    total_us = sum(us for names in (*found.values(), rest) for us, _ in names.values())
    total_calls = sum(calls for names in (*found.values(), rest) for _, calls in names.values())

    def share(names: dict[str, list[float]]) -> str:
        us, calls = (sum(column) for column in zip(*names.values(), strict=True))
        return f"{us / total_us:.0%} of time, {calls:.0f} calls"

    ops = sorted(found, key=lambda op: -sum(us for us, _ in found[op].values()))
    ours = sum(us for op in ops for us, _ in found[op].values())
    calls = sum(calls for op in ops for _, calls in found[op].values())
    shares = "; ".join(f"`{op}` {share(found[op])}" for op in ops)
    others = sorted(rest, key=lambda name: -rest[name][0])[:6]
    remains = ", ".join(f"`{name}` {rest[name][0] / total_us:.0%}" for name in others)
    gemms, experts_us = (sum(us for us, _ in names.values()) for names in (products, experts))
    whole = gemms + experts_us + total_us
    return (
        f"| {family} | {ours / total_us:.0%} of time, {calls:.0f} of {total_calls:.0f} calls "
        f"| {shares} | {remains} | {gemms / whole:.0%} | {experts_us / whole:.0%} |"
    )


def profile(family: str) -> dict[str, dict[str, list[float]]]:
    """Op, `products` or "" (the rest) -> operator -> [µs, calls] of one decode step."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.cpu_worker import CPUWorker

    operators: dict[str, str] = {}
    load = CPUWorker.load_model

    def load_marked(*args: Any, **named: Any) -> Any:
        # Not earlier, because vLLM inspects all loaded modules when it starts a worker.
        operators.update(mark_places())
        return load(*args, **named)

    CPUWorker.load_model = load_marked
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(tiny_model.make(Path(folder), family)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
        )
    for model in llm.apply_model(lambda model: model):
        model.forward = marked("model", model.forward)

    def generate(new: int) -> None:
        prompts: Any = [
            {"prompt_token_ids": [(7 * i + j) % 500 + 3 for j in range(TOKENS)]}
            for i in range(BATCH)
        ]
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        llm.generate(prompts, sampling, use_tqdm=False)

    generate(STEPS + 1)
    events = []
    with torch.inference_mode():
        for new in (STEPS + 1, 1):  # the second run is only the prefill, which is subtracted
            with profiler(activities=[ProfilerActivity.CPU]) as seen:
                generate(new)
            events.append(summed(seen.events(), operators))
    found: dict[str, dict[str, list[float]]] = {"products": {}, "": {}}
    for (op, name), (us, calls) in events[0].items():
        less_us, less_calls = events[1].get((op, name), (0.0, 0.0))
        if calls > less_calls:
            step = [max(0.0, us - less_us) / STEPS, (calls - less_calls) / STEPS]
            found.setdefault(op, {})[name] = step
    return found


def summed(events: Any, operators: dict[str, str]) -> dict[tuple[str, str], tuple[float, float]]:
    """(op, operator) -> (self time in µs, calls), for events inside the model."""
    us: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for event in events:
        above = [event, *ancestors(event)]
        if "::" not in event.name or f"{OURS}model" not in {parent.name for parent in above}:
            continue
        op = next((op for parent in above if (op := op_of(parent.name, operators))), "")
        # Use the outermost operator; vLLM's wrappers contain whole parts of a model.
        called = [e for e in above if "::" in e.name and not e.name.startswith("vllm::")]
        outermost = called[-1] if called else event
        if computes_nothing(outermost.name):
            continue
        if is_product(outermost.name) and op != "fused_experts":
            op = "products"
        us[op, outermost.name] += event.self_cpu_time_total
        calls[op, outermost.name] += outermost is event
    return {key: (us[key], calls[key]) for key in us}


def ancestors(event: Any) -> Iterator[Any]:
    """The enclosing events of an event, innermost first."""
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def op_of(name: str, operators: dict[str, str]) -> str:
    """Op of a profiled range or operator; "" if no binding refers to it."""
    if name.startswith(OURS) and name != f"{OURS}model":
        return name.removeprefix(OURS)
    if name.rpartition("::")[2].startswith(ATTENTION):
        return "attention_backend"
    return operators.get(name, "")


def is_product(name: str) -> bool:
    return name.rpartition("::")[2] in PRODUCTS or name.startswith("mkldnn::")


def computes_nothing(name: str) -> bool:
    """Whether an operator only creates a view or uninitialised memory."""
    import torch

    namespace, _, operator = name.partition("::")
    if operator.startswith(("empty", "resize")):
        return True
    with suppress(AttributeError, RuntimeError):
        packet = getattr(getattr(torch.ops, namespace), operator)
        schema = getattr(packet, packet.overloads()[0])._schema
        results = [result.alias_info for result in schema.returns]
        return bool(results) and all(info is not None and not info.is_write for info in results)
    return False


def mark_places() -> dict[str, str]:
    """Add profiler ranges to the layers and functions of our bindings; return operator -> op.

    Call it before the model is built, because layers store the method that they find then.
    """
    from vllm_fl.contracts.binding import FunctionTarget, LayerTarget, OperatorTarget
    from vllm_fl.integration.patchers.layers import FORWARDS
    from vllm_fl.integration.targets import targets
    from vllm_fl.plugins.registry import known_contracts

    for op, layer in targets(known_contracts().bindings, LayerTarget):
        for forward in FORWARDS:
            mark(op, f"{layer.path}.{forward}")
    for op, function in targets(known_contracts().bindings, FunctionTarget):
        for path in function.paths:
            mark(op, path)
    return {target.name: op for op, target in targets(known_contracts().bindings, OperatorTarget)}


def mark(op: str, path: str) -> None:
    """Wrap the function at `path` in a profiler range; do nothing if this vLLM does not have it."""
    with suppress(ImportError, AttributeError):
        owner_path, _, name = path.rpartition(".")
        try:
            owner: Any = import_module(owner_path)
        except ModuleNotFoundError:
            module, _, cls = owner_path.rpartition(".")
            owner = getattr(import_module(module), cls)
        held = getattr_static(owner, name)
        if isinstance(held, staticmethod):
            setattr(owner, name, staticmethod(marked(op, held.__func__)))
            return
        seen = marked(op, held)
        setattr(owner, name, seen)
        for module_name, there in list(sys.modules.items()):
            if module_name.startswith("vllm.") and getattr(there, name, None) is held:
                setattr(there, name, seen)


def marked(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` in a profiler range with the op's name."""
    from torch.profiler import record_function

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with record_function(f"{OURS}{op}"):
            return function(*args, **named)

    return call


if __name__ == "__main__":
    sys.exit(main())
