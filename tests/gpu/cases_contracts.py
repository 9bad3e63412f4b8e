"""Every implementation on the GPU against the reference result: all samples, Qwen3-8B's sizes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

__all__ = ["cases"]


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(implementation and dtype, the first problems or "")."""
    import torch

    import vllm_fl_cuda.plugin
    import vllm_fl_flaggems.plugin
    import vllm_fl_reference.plugin
    from vllm_fl.contracts import ModelSizes
    from vllm_fl.plugins.registry import known_contracts
    from vllm_fl.plugins.signatures import fitted
    from vllm_fl_ops.contracts.rules import typical_sizes
    from vllm_fl_verify.preflight import find_faults
    from vllm_fl_verify.trials import Request, Role
    from vllm_fl_verify.verification import Comparison, compare, dtype_name, tried

    device = torch.device("cuda")
    torch.zeros(1, device=device)  # initialises the device, like a worker
    more = typical_sizes(known_contracts().bindings.values()).more
    qwen3 = ModelSizes(4096, 12288, 32, 8, 128, 128, more=more)
    served = replace(qwen3, tokens=(1, 16384), max_position=40960)
    sizes = replace(qwen3, tokens=(1, 16, 4096))
    plugins = (vllm_fl_cuda.plugin, vllm_fl_flaggems.plugin, vllm_fl_reference.plugin)
    for given in (impl for plugin in plugins for impl in plugin.register_ops()):
        impl = fitted(given, known_contracts().contracts[given.op_name])
        name = f"{impl.op_name} {impl.impl_id}"
        verdict = impl.availability()
        if verdict is not True:
            yield name, f"not available: {verdict}"
            continue
        spec = known_contracts().contracts[impl.op_name]
        kinds = [getattr(torch, kind) for kind in spec.dtypes]
        for dtype in kinds:
            results: list[Comparison] = []
            for samples in (tried(spec, dtype, device), spec.served(sizes, dtype, device)):
                results += [compare(impl, spec, sample, dtype) for sample in samples]
            refused = [r for r in results if r.status == "refused"]
            wrong = [f"{r.sample}: {r.reason}" for r in results if r.status in ("wrong", "raised")]
            needed = torch.bfloat16 if torch.bfloat16 in kinds else kinds[0]
            if len(refused) == len(results) and dtype is needed:
                wrong.append(f"all {len(results)} refused: {refused[0].reason}")
            worst = max((r.share for r in results if r.status == "ok"), default=0.0)
            case = f"{name} {dtype_name(dtype)}: {len(results)} samples, {len(refused)} refused"
            yield f"{case}, worst {worst:.2f} of the tolerance", "; ".join(wrong[:3])
            torch.cuda.empty_cache()
        start = time.perf_counter()
        found = find_faults(Request([Role(impl)], torch.bfloat16, device, served, seed=0))
        seconds = time.perf_counter() - start
        faults = "; ".join(each.reason for each in found.objections.values())
        said = f", {'; '.join(found.remarks)}" * bool(found.remarks)
        yield f"{name} as it will serve: {seconds:.2f} s{said}", faults
