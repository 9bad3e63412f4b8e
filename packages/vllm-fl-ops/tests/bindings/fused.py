"""vLLM's pass for norms with ropes, on a graph of this process: run by test_fusions.py. vLLM's CPU
build neither runs the pass nor has its operator, and can import the pass only if some operators
exist. They are defined here without a kernel."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from builders import engine_of, managing, planning
from oracle_mutants import oracle_impl
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.virtualized import V
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from vllm_fl.engine.plan import Plan
from vllm_fl.integration.graphs.state import in_graphs
from vllm_fl.plugins.registry import known_contracts

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 64, 5
QUANTISED = (
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "silu_and_mul_quant",
)


def define() -> torch.library.Library:
    """Define the operators that the pass's module reads when it is imported."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    library = torch.library.Library("_C", "FRAGMENT")
    for name in QUANTISED:
        if not hasattr(torch.ops._C, name):
            library.define(f"{name}(Tensor! result) -> ()")
    library.define(
        "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, "
        "int head_dim, float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, "
        "bool is_neox, Tensor position_ids, int forced_token_heads_per_warp=-1) -> ()"
    )

    def without_kernel(*args: Any) -> None:
        raise NotImplementedError("the test's stand-in computes nothing")

    library.impl("fused_qk_norm_rope", without_kernel, "CPU")
    return library


def attention(
    qkv: Tensor, positions: Tensor, q_weight: Tensor, k_weight: Tensor, table: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """The code before the attention of a model with norms of heads, traced like vLLM's layers."""
    from vllm import ir

    widths = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
    q, k, v = qkv.split(widths, dim=-1)
    q_by_head = q.view(*q.shape[:-1], q.shape[-1] // SIZE, SIZE)
    q = ir.ops.rms_norm(q_by_head, q_weight, eps).view(q.shape)
    k_by_head = k.view(*k.shape[:-1], k.shape[-1] // SIZE, SIZE)
    k = ir.ops.rms_norm(k_by_head, k_weight, eps).view(k.shape)
    torch.ops._C.rotary_embedding(positions, q, k, SIZE, table, True)
    return q, k, v


def take(plan: Plan) -> None:
    """Override the operator like at an engine's startup."""
    from vllm_fl.integration.patchers import operators

    cpu, of_op = torch.device("cpu"), {"qk_norm_rope": known_contracts().bindings["qk_norm_rope"]}
    engine = engine_of(plan)
    taken = operators.Operators().choice(plan, of_op, cpu, torch.bfloat16)
    operators.Operators().take(engine, taken)


def main() -> None:
    library = define()
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from vllm import ir
    from vllm.compilation.passes.fusion import qk_norm_rope_fusion as fusion
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.config.utils import Range

    from vllm_fl.integration import engines
    from vllm_fl.integration.graphs import passes
    from vllm_fl.integration.patchers import fusions

    said: list[str] = []
    fusions.log.addFilter(lambda record: bool(said.append(record.getMessage())) or True)

    impl = oracle_impl(known_contracts().contracts["qk_norm_rope"])
    plan = planning(managing(impl, prefer="vendor"), "compiled")
    assert plan.entries["qk_norm_rope"].label == "vendor.acme"

    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["+rotary_embedding"]))
    layer = SimpleNamespace(head_size=SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS)
    fusion.get_layers_from_vllm_config = lambda *_: {"layer": layer}
    bf16 = torch.bfloat16
    # vLLM makes the pattern's inputs on a GPU.
    fusion.empty_bf16 = lambda *size: torch.empty(*size, dtype=bf16)
    fusion.empty_i64 = lambda *size: torch.empty(*size, dtype=torch.int64)
    config.model_config = SimpleNamespace(dtype=bf16)

    take(plan)
    torch.manual_seed(0)
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE, dtype=bf16)
    weights, table = torch.randn(2, SIZE, dtype=bf16), torch.randn(16, SIZE).to(bf16)
    codes: list[str] = []
    sizes = Range(1, 64)
    joined: set[str] = set()

    def run(using: list[Any], epsilon: float) -> tuple[Tensor, ...]:
        """Compile for some sizes with these passes, and with vLLM's that follow them."""

        def lower(gm: torch.fx.GraphModule, _: Any) -> Any:
            view_to_reshape(gm)
            values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
            unknowns = detect_fake_mode(values).shape_env  # type: ignore[union-attr]
            with V.set_fake_mode(detect_fake_mode(values)), pass_context(sizes):
                for each in (*using, VllmIRLoweringPass(config), FixFunctionalizationPass(config)):
                    known = len(unknowns.guards), dict(unknowns.replacements)
                    if each.is_applicable_for_range(sizes):
                        each(gm.graph)
                    # vLLM stores one shape environment with all graphs: unified sizes are one input
                    # to the loader, but two in the compiled code.
                    if known != (len(unknowns.guards), dict(unknowns.replacements)):
                        joined.add(type(each).__name__)
                gm.recompile()
                # Inductor traces the graph again after all passes.
                FakeTensorProp(gm, detect_fake_mode(values)).propagate_dont_convert_inputs(*values)
                if known != (len(unknowns.guards), dict(unknowns.replacements)):
                    joined.add("Inductor")
            codes.append(gm.code)
            return gm.forward

        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *args: attention(*args, epsilon),
            backend=aot_autograd(fw_compiler=lower),
            fullgraph=True,
        )
        given = qkv.clone(), torch.arange(TOKENS)
        for each in given:
            torch._dynamo.mark_dynamic(each, 0)
        with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
            return compiled(*given, *weights, table)

    report = []
    with set_current_vllm_config(config), ir.enable_torch_wrap(), torch.no_grad():
        for epsilon in (1e-6, 3e-6):  # the pass looks for norms with the first
            fusions.Fusions().apply(engine_of(plan))
            with engines.calling(engine_of(plan)):
                alone = run([], epsilon)
                ours = passes.FusedOperators(engine_of(plan), config)
                fused = run([fusion.QKNormRoPEFusionPass(config), ours], epsilon)
            fusions.Fusions().compiled(engine_of(plan))
            pairs = zip(alone, fused, strict=True)
            report.append(
                {
                    "sites": vars(in_graphs(engine_of(plan)).sites["qk_norm_rope"]),
                    "fused": ["fused_qk_norm_rope" in code for code in codes[-2:]],
                    "apart": max(float((a.float() - b.float()).abs().max()) for a, b in pairs),
                    "said": said.pop(),
                }
            )
    report.append(sorted(joined))
    print(json.dumps(report))
    engine_of(plan).unbind()
    library._destroy()


main()
