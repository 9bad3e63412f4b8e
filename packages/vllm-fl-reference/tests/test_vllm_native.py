"""Bitwise equality with vLLM's native forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fl.contracts import OpSpec, Sample
from vllm_fl.contracts.binding import LayerTarget
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.context import building
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan, make_plan
from vllm_fl.integration.targets import targets
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.settings.loading import load_settings
from vllm_fl_reference import plugin

pytest.importorskip("vllm", reason="vllm is not installed: there is no native form to compare with")

from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.utils import default_unquantized_gemm

from vllm_fl_verify.made_inputs import layer_for

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PER_DTYPE = [pytest.param(d, marks=[pytest.mark.slow] * (d is not DTYPES[2])) for d in DTYPES]


def rms_norm(x: Any, residual: Any, weight: Any, *rest: Any) -> Any:
    if residual is None:
        return ir.ops.rms_norm.impls["native"].impl_fn(x, weight, *rest)
    return ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, *rest)


def rotary_embedding(query: Any, key: Any, cos: Any, sin: Any, at: Any, interleaved: bool) -> Any:
    if not query.shape[0]:  # vLLM's view(0, -1, head_size) is ambiguous
        return torch.empty_like(query), None if key is None else torch.empty_like(key)
    cache = torch.cat((cos, sin), dim=-1)
    sizes = query.shape[-1], cache.shape[-1]
    return RotaryEmbedding.forward_static(at, query, key, *sizes, cache, not interleaved)


def quant_fp8(x: Tensor, scale: Any, scale_ub: Any, per_token: bool) -> Any:
    shape = GroupShape.PER_TOKEN if per_token else GroupShape.PER_TENSOR
    with set_current_vllm_config(VllmConfig()):
        layer = QuantFP8(static=scale is not None, group_shape=shape)
    return QuantFP8.forward_native(layer, x, scale, scale_ub)


def cpu_router() -> Any:
    return pytest.importorskip("vllm.model_executor.layers.fused_moe.router.cpu_router")


def moe_topk(x: Tensor, topk: int, renormalize: bool, by: str, factor: float, bias: Any) -> Any:
    """The CPU build's two forms, in fp32; the second with one group of all experts."""
    if by == "softmax" and bias is None:
        weights, ids = cpu_router()._softmax_topk(x.float(), topk, renormalize)
        return (weights if factor == 1.0 else weights * factor), ids
    return cpu_router()._grouped_topk(x, topk, renormalize, 1, 1, by, factor, bias)


def grouped_topk(gating_output: Tensor, *rest: Any) -> Any:
    if not gating_output.shape[0]:  # vLLM's view(0, groups, -1) is ambiguous
        return torch.empty(0, rest[0]), torch.empty(0, rest[0], dtype=torch.int32)
    return cpu_router()._grouped_topk(gating_output, *rest)


def moe_sum(input: Tensor, topk_ids: Tensor | None, expert_map: Tensor | None) -> Any:
    """vLLM's replacement for the operator in builds that lack it, over this rank's experts."""
    if topk_ids is not None:
        here = topk_ids >= 0
        if expert_map is not None:
            here &= expert_map[topk_ids.clamp(min=0).long()] >= 0
        input = torch.where(here.unsqueeze(-1), input, 0.0)
    return torch.sum(input, dim=1)


def multimodal_rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *how: Any
) -> Any:
    mrope_section, mrope_interleaved, rotary_interleaved = how
    if not query.shape[0]:  # as in rotary_embedding
        return torch.empty_like(query), torch.empty_like(key)
    sizes = (query.shape[-1], 2 * cos.shape[-1], len(cos), 10000.0)
    sections = {"mrope_section": mrope_section, "mrope_interleaved": mrope_interleaved}
    with set_current_vllm_config(VllmConfig()):
        layer: Any = MRotaryEmbedding(*sizes, not rotary_interleaved, cos.dtype, **sections)
    layer.cos_sin_cache = torch.cat((cos, sin), dim=-1)
    q, k = layer.forward_native(position_ids.t(), query.flatten(1), key.flatten(1))
    return q.view(query.shape), k.view(key.shape)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Any:
    spec = known_contracts().contracts["layer_norm"]
    layer: Any = layer_for(spec, {"weight": weight, "bias": bias, "epsilon": epsilon})
    layer.normalized_shape = x.shape[-1:]
    return layer.forward_native(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The function that an unquantised layer calls; it does not use the layer."""
    return default_unquantized_gemm(torch.nn.Module(), x, weight, bias)


def linear_gelu_tanh_and_mul(x: Tensor, weight: Tensor) -> Any:
    return GeluAndMul.forward_native(SimpleNamespace(approximate="tanh"), linear(x, weight, None))


def linear_silu_and_mul(x: Tensor, weight: Tensor) -> Any:
    return SiluAndMul.forward_native(linear(x, weight, None))


def merge_attn_states(prefix: Tensor, p_lse: Tensor, suffix: Tensor, s_lse: Tensor) -> Any:
    from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch

    output, sums = torch.empty_like(prefix), torch.empty_like(p_lse.T)
    _merge_attn_states_torch(output, prefix, p_lse.T, suffix, s_lse.T, sums)
    return output, sums.T


def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin_cache: Tensor, at: Tensor, *rest: Any
) -> Tensor:
    """The code that vLLM's pass replaces: two norms, then the rope of both."""
    heads, kv_heads, epsilon, interleaved = rest
    size, tokens = q_weight.shape[0], len(qkv)
    parts = (heads * size, kv_heads * size, qkv.shape[1] - (heads + kv_heads) * size)
    query, key, value = qkv.split(parts, dim=-1)
    query = rms_norm(query.view(tokens, heads, size), None, q_weight, epsilon, None)
    key = rms_norm(key.view(tokens, kv_heads, size), None, k_weight, epsilon, None)
    tables = cos_sin_cache.chunk(2, dim=-1)
    query, key = rotary_embedding(query, key, *tables, at, interleaved)
    return torch.cat((query.flatten(1), key.flatten(1), value), dim=-1)


def of_layer(spec: OpSpec) -> Callable[..., Any]:
    """`forward_native` of the layer in the op's binding, by the contract's parameters."""

    def native(*args: Any) -> Any:
        values = dict(zip(spec.parameters, args, strict=True))
        layer: Any = layer_for(spec, {p: values.pop(p) for p in spec.from_layer})
        assert type(layer).__module__.startswith("vllm."), "this vLLM has no such layer"
        return layer.forward_native(*values.values())

    return native


LAYERS = sorted(
    {op for op, _ in targets(known_contracts().bindings, LayerTarget)} - {"chunk_gated_delta_rule"}
)
"""The ops that layers run in PyTorch. The others have no native form in vLLM."""

# RMS norms are ops of vLLM's IR, layer_norm's layer needs the number of features, a rope and
# QuantFP8 take other arguments, and the others are functions; any other layer is called.
OWN = (
    grouped_topk,
    layer_norm,
    linear,
    linear_gelu_tanh_and_mul,
    linear_silu_and_mul,
    merge_attn_states,
    moe_sum,
    moe_topk,
    multimodal_rotary_embedding,
    qk_norm_rope,
    quant_fp8,
    rms_norm,
    rotary_embedding,
)
NATIVE = {op: of_layer(known_contracts().contracts[op]) for op in LAYERS} | {
    op.__name__: op for op in OWN
}

KERNELS_ONLY = {
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "concat_and_cache_mla",
    "fused_experts",
    "gdn_gating",
    "linear_fp8",
    "moe_align_block_size",
    "quant_fp8_group",
    "quant_int8",
    "recurrent_gated_delta_rule",
    "reshape_and_cache",
}
"""Ops without a PyTorch form in vLLM."""

CASES = [
    pytest.param(
        impl.op_name,
        impl.fn,
        sample,
        id=f"{impl.op_name}-{str(dtype)[6:]}-{sample.name}",
        marks=[pytest.mark.slow] * (dtype is not torch.bfloat16),
    )
    for impl in plugin.register_ops()
    if impl.op_name not in KERNELS_ONLY
    for dtype in DTYPES
    for sample in known_contracts().contracts[impl.op_name].samples(dtype, CPU)
    if not sample.kit_only  # vLLM's form is incorrect there
]


@pytest.mark.parametrize(("name", "function", "sample"), CASES)
def test_bit_equal(name: str, function: Callable[..., Any], sample: Sample) -> None:
    assert name in NATIVE, (
        f"vLLM has no layer of {name}: a function for OWN above calls vLLM's form, or KERNELS_ONLY "
        "names the op"
    )
    assert_same_bits(function(*sample.args), NATIVE[name](*sample.args))


@pytest.mark.parametrize("dtype", PER_DTYPE)
@pytest.mark.parametrize("op", LAYERS)
def test_what_runs_when_every_candidate_refused_is_bit_equal_too(
    op: str, dtype: torch.dtype
) -> None:
    natives = [
        p.native
        for p in known_contracts().bindings[op].targets
        if isinstance(p, LayerTarget) and p.native
    ]
    assert natives
    for sample in known_contracts().contracts[op].samples(dtype, CPU):
        if sample.name.startswith("0 tokens"):  # vLLM's view of a rope fails there
            continue
        want = NATIVE[op](*sample.args)
        for native in natives:
            assert_same_bits(native(*sample.args), want)


@pytest.mark.parametrize("dtype", PER_DTYPE)
def test_convolutions_are_bit_equal_to_those_of_vllms_cpu_build(dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d as native

    own = {impl.op_name: impl.fn for impl in plugin.register_ops()}
    for sample in known_contracts().contracts["causal_conv1d"].samples(dtype, CPU):
        x, weight, bias, states, *rest = sample.args
        cache = states.clone()
        out = native.causal_conv1d_fn_cpu(x.T, weight, bias, cache, *rest)
        assert_same_bits(own["causal_conv1d"](x, weight, bias, states, *rest), (out.T, cache))
    for sample in known_contracts().contracts["causal_conv1d_update"].samples(dtype, CPU):
        x, states, weight, bias, activation, slots = sample.args
        rows, taps = slots[slots != 0].long(), weight.shape[1] - 1
        if len(rows) != len(x) or not len(x):
            continue  # vLLM's PyTorch form does not support padding
        its = states[rows][:, :, :taps]
        out = native.causal_conv1d_update_torch(x[..., None], its, weight, bias, activation)
        got, after = own["causal_conv1d_update"](x, states, weight, bias, activation, slots)
        assert_same_bits((got, after[rows][:, :, :taps]), (out[..., 0], its))


def assert_same_bits(got: Any, want: Any) -> None:
    if not isinstance(got, tuple):
        got, want = (got,), (want,)
    for own, theirs in zip(got, want, strict=True):
        if theirs is None:
            assert own is None
            continue
        assert own.dtype == theirs.dtype
        assert own.shape == theirs.shape
        if theirs.element_size() == 1:
            assert torch.equal(own.view(torch.uint8), theirs.view(torch.uint8))
            continue
        torch.testing.assert_close(own, theirs, rtol=0, atol=0, equal_nan=True)
        numbers = ~theirs.isnan()
        assert torch.equal(own[numbers].signbit(), theirs[numbers].signbit())


@pytest.fixture(scope="module")
def plan() -> Iterator[Plan]:
    """The plan of an eager engine with only this package, with the layers replaced."""
    from vllm_fl.integration.patchers.layers import in_tables, ours

    with set_current_vllm_config(VllmConfig()), torch.no_grad(), in_tables(ours()):
        settings = load_settings({"VLLM_FL_PREFER": "reference"})
        yield make_plan(get_default_manager(), EngineFacts(settings, "eager"))


QUANTISERS = {
    "static": {"static": True, "group_shape": GroupShape.PER_TENSOR},
    "per tensor": {"static": False, "group_shape": GroupShape.PER_TENSOR},
    "per token": {"static": False, "group_shape": GroupShape.PER_TOKEN},
}
LEFT_TO_VLLM = {
    "a scale for each channel": {"static": True, "group_shape": GroupShape.PER_CHANNEL},
    "groups": {"static": False, "group_shape": GroupShape(1, 32)},
    "rows of padding": {
        "static": False,
        "group_shape": GroupShape.PER_TENSOR,
        "num_token_padding": 17,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUANTISERS, *LEFT_TO_VLLM])
def test_layers_that_quantise_to_fp8_are_ours_or_vllms_and_bit_equal(plan: Plan, name: str) -> None:
    options = (QUANTISERS | LEFT_TO_VLLM)[name]
    counting = dataclasses.replace(plan, counts_calls=True)
    before = counting.calls.total()
    with building(counting):
        layer = QuantFP8(**options)
    assert type(layer) is not QuantFP8
    torch.manual_seed(0)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    channels = options["group_shape"] == GroupShape.PER_CHANNEL
    scale = torch.full((64,) if channels else (1,), 0.01) if options["static"] else None
    assert_same_bits(layer(x, scale), QuantFP8.forward_native(layer, x, scale))
    assert counting.calls.total() - before == (name in QUANTISERS)
    assert counting.fallbacks == {}


NORMS = {
    "RMSNorm": (RMSNorm, {}),
    "of part of the features": (RMSNorm, {"var_hidden_size": 48}),
    "without weight": (RMSNorm, {"has_weight": False}),
    "GemmaRMSNorm": (GemmaRMSNorm, {}),
}


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", PER_DTYPE)
@pytest.mark.parametrize(("cls", "options"), NORMS.values(), ids=NORMS)
def test_norm_layers_are_bit_equal(
    plan: Plan, cls: Any, options: dict[str, Any], dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """If the contract does not support the weight, vLLM's code runs, also with equal bits."""
    before = plan.fallbacks.total()
    with building(plan):
        layer = cls(64, **options)
    assert type(layer) is not cls and plan.entries["rms_norm"].label == "reference.torch"
    torch.manual_seed(0)
    if options.get("has_weight", True):
        layer.weight = torch.nn.Parameter(torch.randn(64, dtype=weight_dtype))
    for x in (torch.randn(5, 64, dtype=dtype), torch.randn(5, 3 * 64, dtype=dtype)[:, 64:128]):
        residual = torch.randn(5, 64, dtype=dtype)
        own, theirs = layer(x.clone()), cls.forward_native(layer, x.clone())
        assert own.dtype == theirs.dtype == dtype and torch.equal(own, theirs)
        pair = layer(x.clone(), residual.clone())
        want = cls.forward_native(layer, x.clone(), residual.clone())
        assert all(torch.equal(one, other) for one, other in zip(pair, want, strict=True))
    has_weight = options.get("has_weight", True) and cls is RMSNorm  # Gemma's layer makes another
    is_ours = weight_dtype in (dtype, torch.float32) or not has_weight
    assert (plan.fallbacks.total() == before) is is_ours
