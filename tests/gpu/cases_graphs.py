"""Implementations in captured graphs, verified as at startup, and some wrong ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

__all__ = ["cases"]

TOKENS = 256
"""Tokens of a captured batch."""

CORPUS = Path(__file__).parents[2] / "packages" / "vllm-fl-tools" / "tests"
"""Folder of the wrong kernels of docs/wrong-kernels."""

ALWAYS = ("rms_norm", "rotary_embedding", "silu_and_mul")
"""For these ops every backend's implementation must have been captured."""


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(implementation, the problem or ""); also each wrong kernel, and the device after it."""
    import torch

    import vllm_fl_cuda.plugin
    import vllm_fl_flaggems.plugin
    import vllm_fl_reference.plugin
    from vllm_fl.contracts import ModelSizes
    from vllm_fl.contracts.binding import IrTarget, LayerTarget
    from vllm_fl.plugins.registry import known_contracts
    from vllm_fl.plugins.signatures import fitted
    from vllm_fl_ops.contracts.rules import typical_sizes
    from vllm_fl_verify import graphs
    from vllm_fl_verify.preflight import find_faults
    from vllm_fl_verify.trials import Request, Role

    device = torch.device("cuda")
    torch.zeros(1, device=device)  # initialises the device, like a worker
    yield from wrong_ones()
    yield from corpus_in_graphs()
    more = typical_sizes(known_contracts().bindings.values()).more
    served = ModelSizes(4096, 12288, 32, 8, 128, 128, tokens=(1, 16384), more=more)
    served = replace(served, max_position=40960)
    plugins = (vllm_fl_cuda.plugin, vllm_fl_flaggems.plugin, vllm_fl_reference.plugin)
    specs = known_contracts().contracts
    for given in (impl for plugin in plugins for impl in plugin.register_ops()):
        impl = fitted(given, specs[given.op_name]) if given.op_name in specs else given
        binding = known_contracts().bindings.get(impl.op_name)
        in_layers = binding and any(isinstance(p, LayerTarget | IrTarget) for p in binding.targets)
        if not in_layers or impl.availability() is not True:
            continue
        took: list[float] = []
        role = Role(impl, captured=TOKENS)
        with patch.object(graphs, "captured", timed(graphs.captured, took)):
            found = find_faults(Request([role], torch.bfloat16, device, served, seed=0))
        problem = "; ".join(each.reason for each in found.objections.values())
        if impl.op_name in ALWAYS and not took:
            problem = problem or "it was not captured"
        case = f"{impl.op_name} {impl.impl_id}: {len(took)} forms captured and replayed twice"
        yield f"{case} in {sum(took):.3f} s", problem


def timed(captured: Callable[..., Any], took: list[float]) -> Callable[..., Any]:
    """`captured`; the seconds of each capture and its replays are appended to `took`."""

    def timing(*given: Any) -> Any:
        begun = time.perf_counter()
        replay, result = captured(*given)
        took.append(time.perf_counter() - begun)

        def replaying() -> None:
            begun = time.perf_counter()
            replay()
            took[-1] += time.perf_counter() - begun

        return replaying, result

    return timing


def wrong_ones() -> Iterator[tuple[str, str]]:
    """Kernels that are wrong only in a graph: each is detected, and the device stays usable."""
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    from vllm_fl import BackendImplKind, OpImpl
    from vllm_fl.contracts import ModelSizes
    from vllm_fl_verify.preflight import find_faults
    from vllm_fl_verify.trials import Request, Role

    kept: list[Tensor] = []

    def right(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def keeps(x: Tensor) -> Tensor:
        """In a graph, returns the result of an earlier call."""
        if torch.cuda.is_current_stream_capturing():
            return kept[0].clone()
        kept[:] = [right(x)]
        return kept[0].clone()

    def reads(x: Tensor) -> Tensor:
        """Synchronises with the device; not allowed in a capture."""
        top = float(x.abs().nan_to_num(nan=float("inf")).max()) if x.numel() else 0.0
        return right(x.clamp(-top, top))

    def raises(x: Tensor) -> Tensor:
        """Raises before it calls any kernel."""
        if torch.cuda.is_current_stream_capturing():
            raise ZeroDivisionError("only in a graph")
        return right(x)

    expected = {
        keeps: "it is incorrect when a graph is replayed",
        reads: "it cannot be captured in a graph: ",
        raises: "it cannot be captured in a graph: ZeroDivisionError",
    }
    device, key = torch.device("cuda"), ("silu_and_mul", "vendor.acme")
    sizes = ModelSizes(4096, 12288, 32, 8, 128, 128, tokens=(1, 512))
    for fn, said in expected.items():
        impl = OpImpl(*key, BackendImplKind.VENDOR, fn, "acme")
        stream = torch.cuda.current_stream()
        role = Role(impl, captured=TOKENS)
        found = find_faults(Request([role], torch.bfloat16, device, sizes, seed=0)).objections
        why = found[key].reason if key in found else "not found"
        yield f"{fn.__name__}: {why[:150]}", "" if why.startswith(said) else why
        problem = "" if torch.cuda.current_stream() == stream else "another stream is current"
        try:
            torch.rand(8, device=device)
            torch.cuda.empty_cache()
            role = Role(OpImpl(*key, BackendImplKind.VENDOR, right, "acme"), captured=TOKENS)
            again = find_faults(Request([role], torch.bfloat16, device, sizes, seed=0)).objections
        except Exception as error:
            yield f"after {fn.__name__}", f"{type(error).__name__}: {error}"
            continue
        problem = problem or "; ".join(each.reason for each in again.values())
        yield f"after {fn.__name__} the next one is captured", problem


def corpus_in_graphs() -> Iterator[tuple[str, str]]:
    """Kernels of the corpus that are wrong only in graphs: startup must report the outcome in the
    table of docs/wrong-kernels, which was made without a device."""
    import torch

    from vllm_fl_verify.preflight import find_faults
    from vllm_fl_verify.trials import Request, Role

    sys.path.insert(0, str(CORPUS))
    from wrong_kernels.corpus import corpus
    from wrong_kernels.page import seen

    for wrong in (wrong for wrong in corpus().values() if wrong.kind == "graph"):
        key = wrong.op, wrong.impl().impl_id
        said = []
        for captured in (0, TOKENS):
            role, device = Role(wrong.impl(), captured=captured), torch.device("cuda")
            found = find_faults(Request([role], torch.bfloat16, device, wrong.sizes, seed=0))
            said.append(found.objections[key].reason if key in found.objections else "")
        eager, why = said
        outcome = "named" if why else "passes"
        problem = f"taken out without a graph: {eager}" if eager else ""
        if outcome != (expected := seen()[wrong.name]["graph"]):
            problem = problem or f"{outcome}, and the table says {expected}"
        yield f"{wrong.name}: {outcome} {why[:150]}".rstrip(), problem
