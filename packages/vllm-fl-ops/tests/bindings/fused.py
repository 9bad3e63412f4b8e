"""vLLM's own pass for norms with ropes, on a graph of this process: run by test_fusions.py.

vLLM's CPU build neither runs the pass nor has its operator, and imports the pass if some operators
are there. They are defined here, without a kernel.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from builders import engine_of, managing, planning
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor.virtualized import V
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from vllm_fl.engine.plan import Plan
from vllm_fl.integration.graphs.state import in_graphs
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 64, 5
FUSED = known_contracts().contracts["qk_norm_rope"]
QUANTISED = (
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "silu_and_mul_quant",
)


def define() -> torch.library.Library:
    """The operators that the pass's module reads when it is imported."""
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
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    table: torch.Tensor,
    epsilon: float,
    rope: bool = True,
) -> tuple[torch.Tensor, ...]:
    """What precedes the attention of a model with norms of heads, as vLLM's layers trace it."""
    from vllm import ir

    widths = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
    q, k, v = qkv.split(widths, dim=-1)
    q_by_head = q.view(*q.shape[:-1], q.shape[-1] // SIZE, SIZE)
    q = ir.ops.rms_norm(q_by_head, q_weight, epsilon).view(q.shape)
    k_by_head = k.view(*k.shape[:-1], k.shape[-1] // SIZE, SIZE)
    k = ir.ops.rms_norm(k_by_head, k_weight, epsilon).view(k.shape)
    if rope:
        torch.ops._C.rotary_embedding(positions, q, k, SIZE, table, True)
    return q, k, v


def take(plan: Plan) -> None:
    """Override the operator, as an engine's start does."""
    from vllm_fl.integration.patchers import operators

    cpu, of_op = torch.device("cpu"), {"qk_norm_rope": known_contracts().bindings["qk_norm_rope"]}
    engine = engine_of(plan)
    taken = operators.Operators().choice(plan, of_op, cpu, torch.bfloat16)
    operators.Operators().take(engine, taken)


def traced(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A traced form that writes over the projection: twice that, so that it is known again."""
    return qkv.mul_(2)


def traced_anew(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The same in a tensor of its own."""
    return 2 * qkv


def traced_forms(
    run: Any, config: Any, codes: list[str], impl: OpImpl, pass_: Any, qkv: torch.Tensor
) -> dict[str, dict[str, Any]]:
    """What becomes of a graph where the op's implementation has a traced form."""
    from vllm_fl.integration import engines
    from vllm_fl.integration.carried import Carried
    from vllm_fl.integration.graphs import base, launching, ranges
    from vllm_fl.integration.patchers import fusions

    said: list[str] = []
    base.log.addFilter(lambda record: bool(said.append(record.getMessage())))
    ranges.is_compiled_by_range = lambda config: True

    def broken(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    def of(**fields: Any) -> OpImpl:
        fields = {"consumes": frozenset({"qkv"}), "traced": traced, **fields}
        return dataclasses.replace(impl, **fields)

    asked: list[Any] = []
    turned = qkv[:, : (HEADS + KV_HEADS) * SIZE]

    def supporting(verdict: Any) -> Callable[..., Any]:
        def supports(*args: Any) -> Any:
            asked.append(args)
            # Two inputs of a graph, which does not know that they have as many rows.
            return verdict if args[0].shape[0] == args[4].shape[0] else "positions"

        supports.__signature__ = FUSED.signature  # type: ignore[attr-defined]
        return supports

    for each in (traced, traced_anew, broken):
        each.__signature__ = FUSED.signature  # type: ignore[attr-defined]
    both, rows = ["vendor", "reference"], {"<=16": "vendor", "rest": "reference"}
    reference = dataclasses.replace(
        impl, impl_id="reference.torch", kind=BackendImplKind.REFERENCE, vendor=None
    )
    cases: dict[str, tuple[tuple[OpImpl, ...], Any]] = {
        "taken": ((of(supports=supporting(True)),), both),
        "in a new tensor": ((of(traced=traced_anew),), both),
        "none": ((impl,), both),
        "refused": ((of(supports=supporting("heads of 64 are refused")), reference), both),
        "broken": ((of(traced=broken),), both),
        "one of two rows": ((of(), reference), rows),
    }
    told = {}
    for name, (impls, order) in cases.items():
        said.clear()
        plan = planning(managing(*impls, per_op_order={"qk_norm_rope": order}), "compiled")
        config.additional_config = {"vllm_fl": Carried(plan="0123", enabled=["+rotary_embedding"])}
        fusions.Fusions().apply(engine_of(plan))
        take(plan)
        with engines.calling(engine_of(plan)):
            passes = [pass_(config), launching.TracedForms(engine_of(plan), config)]
            sizes = [(1, 16), (1, 64)] if order is rows else [(1, 64)]
            # The values are a view of what is given, and vLLM's compiler returns that.
            results = [torch.cat(run(passes, 1e-6, each)[:2], dim=-1) for each in sizes]
        told[name] = {
            "twice": [torch.equal(result, 2 * turned) for result in results],
            "operators": ["fused_qk_norm_rope" in code for code in codes[-len(sizes) :]],
            "copies": sum(code.count("clone") for code in codes[-len(sizes) :]),
            "launched": in_graphs(engine_of(plan)).sites["qk_norm_rope"].launched,
            "said": [line for line in said if "call an operator" in line],
        }
        engine_of(plan).unbind()
    told["taken"]["asked"] = [asked[0][0].shape[1], [*asked[0][5:]]]
    return told


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
    from vllm_fl.integration.graphs import launching
    from vllm_fl.integration.patchers import fusions

    said: list[str] = []
    fusions.log.addFilter(lambda record: bool(said.append(record.getMessage())) or True)

    def oracle(*args: Any) -> torch.Tensor:
        return FUSED.oracle(*args).to(args[0].dtype)

    oracle.__signature__ = FUSED.signature  # type: ignore[attr-defined]
    impl = OpImpl("qk_norm_rope", "vendor.acme", BackendImplKind.VENDOR, oracle, "acme")
    plan = planning(managing(impl, prefer="vendor"), "compiled")
    assert plan.entries["qk_norm_rope"].label == "vendor.acme"

    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["+rotary_embedding"]))
    layer = SimpleNamespace(head_size=SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS)
    fusion.get_layers_from_vllm_config = lambda *_: {"layer": layer}
    bf16 = torch.bfloat16
    # vLLM makes the pattern's own inputs on a GPU.
    fusion.empty_bf16 = lambda *size: torch.empty(*size, dtype=bf16)
    fusion.empty_i64 = lambda *size: torch.empty(*size, dtype=torch.int64)
    config.model_config = SimpleNamespace(dtype=bf16)

    take(plan)
    torch.manual_seed(0)
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE, dtype=bf16)
    weights, table = torch.randn(2, SIZE, dtype=bf16), torch.randn(16, SIZE).to(bf16)
    codes: list[str] = []
    joined: set[str] = set()

    def run(
        passes: list[Any],
        epsilon: float,
        sizes: tuple[int, int] = (1, 64),
        model: Callable[..., tuple[torch.Tensor, ...]] = attention,
    ) -> tuple[torch.Tensor, ...]:
        """Compiled for these sizes with these passes, and those that vLLM has behind them."""

        def lower(gm: torch.fx.GraphModule, _: Any) -> Any:
            view_to_reshape(gm)
            values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
            unknowns = detect_fake_mode(values).shape_env  # type: ignore[union-attr]
            with V.set_fake_mode(detect_fake_mode(values)), pass_context(Range(*sizes)):
                for each in (*passes, VllmIRLoweringPass(config), FixFunctionalizationPass(config)):
                    known = len(unknowns.guards), dict(unknowns.replacements)
                    if each.is_applicable_for_range(Range(*sizes)):
                        each(gm.graph)
                    # vLLM has one table of unknowns for all graphs, and stores it with them: what
                    # is joined in it is one input to who loads them, and two in what was compiled.
                    if known != (len(unknowns.guards), dict(unknowns.replacements)):
                        joined.add(type(each).__name__)
                gm.recompile()
                # Inductor traces the graph again behind all passes.
                FakeTensorProp(gm, detect_fake_mode(values)).propagate_dont_convert_inputs(*values)
                if known != (len(unknowns.guards), dict(unknowns.replacements)):
                    joined.add("Inductor")
            codes.append(gm.code)
            return gm.forward

        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *args: model(*args, epsilon),
            backend=aot_autograd(fw_compiler=lower),
            fullgraph=True,
        )
        given = qkv.clone(), torch.arange(TOKENS)
        for each in given:
            torch._dynamo.mark_dynamic(each, 0)
        with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
            return compiled(*given, *weights, table)

    told = []
    with set_current_vllm_config(config), ir.enable_torch_wrap(), torch.no_grad():
        for epsilon in (1e-6, 3e-6):  # the pass looks for norms with the first
            fusions.Fusions().apply(engine_of(plan))
            with engines.calling(engine_of(plan)):
                alone = run([], epsilon)
                ours = launching.TracedForms(engine_of(plan), config)
                fused = run([fusion.QKNormRoPEFusionPass(config), ours], epsilon)
            fusions.Fusions().compiled(engine_of(plan))
            pairs = zip(alone, fused, strict=True)
            told.append(
                {
                    "sites": vars(in_graphs(engine_of(plan)).sites["qk_norm_rope"]),
                    "fused": ["fused_qk_norm_rope" in code for code in codes[-2:]],
                    "apart": max(float((a.float() - b.float()).abs().max()) for a, b in pairs),
                    "said": said.pop(),
                }
            )
        told.append(traced_forms(run, config, codes, impl, fusion.QKNormRoPEFusionPass, qkv))
    told.append(sorted(joined))
    print(json.dumps(told))
    engine_of(plan).unbind()
    library._destroy()


main()
