"""Our pass for norms with ropes, on graphs of this process: run by test_fusions.py."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from builders import engine_of, managing, planning
from torch._dynamo.backends.common import aot_autograd

from vllm_fl.contracts import contracts
from vllm_fl.integration.graphs.state import in_graphs
from vllm_fl.plugins.types import BackendImplKind, OpImpl

HEADS, KV_HEADS, TOKENS = 4, 2, 5


def oracle_of(op: str, **fields: Any) -> OpImpl:
    spec = contracts()[op]

    def oracle(*args: Any) -> Any:
        result = spec.oracle(*args)
        return result if isinstance(result, tuple) else result.to(args[0].dtype)

    oracle.__signature__ = spec.signature  # type: ignore[attr-defined]
    return OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, oracle, "acme", **fields)


CASES: dict[str, dict[str, Any]] = {
    "as Qwen3 has it": {},
    "heads of another size": {"size": 48},
    "half of each head turned, in pairs": {"rotary": 32, "interleaved": True},
    "columns of the projection that come one by one": {"one_by_one": True},
    "a key that is normed otherwise": {"k_epsilon": 1e-5},
    "a key that is not normed": {"norms_key": False},
    "a norm without weight": {"weighs": False},
    "a norm of all heads at once": {"by_head": False},
    "a key of another projection": {"own_key": True},
    "key before query": {"swapped": True},
    "a table of two parts": {"cosine_again": True},
}


def attention(
    rope: Any,
    qkv: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor,
    other: torch.Tensor,
    *,
    size: int,
    k_epsilon: float = 1e-6,
    norms_key: bool = True,
    weighs: bool = True,
    by_head: bool = True,
    own_key: bool = False,
    swapped: bool = False,
    one_by_one: bool = False,
) -> tuple[torch.Tensor, ...]:
    """What precedes the attention of a model with norms of heads."""
    from vllm import ir

    def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, size) if by_head else x
        whole = weight if by_head else weight.repeat(x.shape[-1] // size)
        return ir.ops.rms_norm(heads, whole if weighs else None, epsilon).view(x.shape)

    widths = [HEADS * size, KV_HEADS * size, KV_HEADS * size]
    if one_by_one:
        q, k, v = qkv[:, : widths[0]], qkv[:, widths[0] : -widths[2]], qkv[:, -widths[2] :]
    elif swapped:
        k, q, v = qkv.split([widths[1], widths[0], widths[2]], dim=-1)
    else:
        q, k, v = qkv.split(widths, dim=-1)
    if own_key:
        k = other.split(widths, dim=-1)[1]
    q = normed(q, weights[0], 1e-6)
    k = normed(k, weights[1], k_epsilon) if norms_key else k
    return *rope(positions, q, k, table), v


def main() -> None:
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from vllm import ir
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.config.utils import Range

    from vllm_fl.integration import engines
    from vllm_fl.integration.graphs import passes
    from vllm_fl.integration.patchers import fusions

    impls = oracle_of("qk_norm_rope"), oracle_of("rotary_embedding", consumes={"query", "key"})
    plan = planning(managing(*impls, prefer="vendor"), "compiled")
    name = passes.manager_path(fusions.VLLMS_MANAGER).rpartition(".")[2]
    manager_class = getattr(passes, name)
    plan = replace(plan, whole=frozenset({"rotary_embedding"}))
    turn = plan.bind("rotary_embedding", None, frozenset({"query", "key"}))
    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE  # as on a plugin's device
    config.compilation_config.backend = "inductor"
    config.model_config = SimpleNamespace(dtype=torch.float32, using_transformers_backend=bool)
    torch.manual_seed(0)

    def run(fuses: bool, **case: Any) -> tuple[tuple[torch.Tensor, ...], str]:
        """(the results, the graph's code) with vLLM's own passes, and with ours if it `fuses`."""
        size, interleaved = case["size"], case.pop("interleaved", False)
        rotary, again = case.pop("rotary", size), case.pop("cosine_again", False)
        codes: list[str] = []

        def rope(positions: Any, q: Any, k: Any, table: Any) -> tuple[torch.Tensor, ...]:
            cos, sin = table.chunk(2, dim=-1)
            heads = (positions.shape[0], -1, size)
            turned = turn(
                q.view(heads), k.view(heads), cos, cos if again else sin, positions, interleaved
            )
            return tuple(x.reshape(x.shape[0], -1) for x in turned)

        def lower(gm: torch.fx.GraphModule, _: Any) -> Any:
            view_to_reshape(gm)
            manager = manager_class()
            with engines.calling(engine_of(plan) if fuses else None):
                manager.configure(config)
            with pass_context(Range(1, 64)):
                manager(gm.graph)
                assert len(manager.uuid()) == 64
            gm.recompile()
            codes.append(gm.code)
            return gm.forward

        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *args: attention(rope, *args, **case),
            backend=aot_autograd(fw_compiler=lower),
            fullgraph=True,
        )
        generator = torch.Generator().manual_seed(1)
        width = (HEADS + 2 * KV_HEADS) * size
        qkv, other = torch.randn(2, TOKENS, width, generator=generator)
        weights = torch.randn(2, size, generator=generator)
        table = torch.randn(16, rotary, generator=generator)
        before, positions = qkv.clone(), torch.arange(TOKENS)
        for by_token in (qkv, other, positions):
            torch._dynamo.mark_dynamic(by_token, 0)
        results = compiled(qkv, positions, weights, table, other)
        assert torch.equal(qkv, before), "the projection is not the pass's to write to"
        return results, codes[0]

    told = {}
    with set_current_vllm_config(config), ir.enable_torch_wrap(), torch.no_grad():
        for name, case in CASES.items():
            fusions.Fusions().apply(engine_of(plan))
            fields = {"size": 64, **case}
            (alone, _), (fused, code) = (run(fuses, **fields) for fuses in (False, True))
            pairs = list(zip(alone, fused, strict=True))
            assert all(a.shape == b.shape for a, b in pairs)
            told[name] = {
                "sites": vars(in_graphs(engine_of(plan)).sites["qk_norm_rope"]),
                "in_graph": [op in code for op in ("fl.qk_norm_rope", "fl.rotary_embedding")],
                "apart": max(float((a - b).abs().max()) for a, b in pairs),
            }
    print(json.dumps(told))


main()
