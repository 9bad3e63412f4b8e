"""vendor.cuda without a GPU, on the kernels of vLLM's CPU build: a plugin module for the tests.
With VLLM_FL_PLUGIN_MODULES=on_cpu_kernels, and this folder on PYTHONPATH, every process that loads
plugins has it. The kernels have the CUDA build's names and signatures. For calls that a CPU kernel
does not support, the stand-in converts the call or rejects it; no result is hard-coded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_fl import OpImpl, hookimpl

LANES = 8
"""Elements per vector of the CPU kernels, which support no remainder."""

LAYERS = {"relu_squared": "relu2"}
"""Kernel -> vLLM's layer for it, if the name differs."""


@hookimpl
def register_ops() -> Iterable[OpImpl]:
    """Provide nothing; let the installed plugin's implementations run here."""
    import vllm_fl_cuda.impl as shared
    from vllm_fl_cuda.impl import linear, qk_norm_rope
    from vllm_fl_cuda.plugin import MODULES

    shared._no_cuda_build = shared._no_device = lambda: None
    for module in (shared, *MODULES):
        module.kernel = kernel
        for impl in getattr(module, "OPS", ()):
            device, *others = impl.takes
            object.__setattr__(impl, "takes", (device.replace(".is_cuda", ".is_cpu"), *others))
    qk_norm_rope.capability = lambda device: (8, 0)
    linear.capability = lambda device: (8, 9)
    return ()


@cache
def kernel(name: str) -> Callable[..., None]:
    """vLLM's CPU kernel `torch.ops._C.<name>`, with the CUDA kernel's requirements; AttributeError
    if neither the CPU build nor vLLM's layers have this name."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()
    if name in OTHERWISE:
        return OTHERWISE[name]
    if name == "fused_qk_norm_rope":
        return _norm_rope(kernel("rms_norm"), kernel("rotary_embedding"))
    if not hasattr(torch.ops._C, name):
        return _by_layer(name)
    overload = getattr(torch.ops._C, name).default
    return BEHIND.get(name, _activation)(overload)


def _by_layer(name: str) -> Callable[..., None]:
    """vLLM's PyTorch layer for a kernel that the CPU build lacks; it takes the kernel's numbers.
    Made from the class itself, to bypass layers that replace it."""
    from vllm.model_executor.custom_op import op_registry
    from vllm.model_executor.layers import activation  # noqa: F401 (registers its layers)

    name = LAYERS.get(name, name)
    if name not in op_registry:
        raise AttributeError(f"neither a CPU kernel nor a layer of vLLM's is called {name!r}")
    cls = op_registry[name]

    def call(out: Tensor, x: Tensor, *numbers: float) -> None:
        _reads_packed(x)
        out.copy_(cls.forward_native(_made(cls, *numbers), x))

    return call


@cache
def _made(cls: Any, *args: Any, **named: Any) -> Any:
    """A layer of exactly this class."""
    from vllm.config import VllmConfig, set_current_vllm_config

    layer = object.__new__(cls)
    with set_current_vllm_config(VllmConfig()):
        layer.__init__(*args, **named)
    return layer


def _fp8(static: bool, shape: tuple[int, int]) -> Callable[..., None]:
    def call(out: Tensor, x: Tensor, scale: Tensor, bound: Any = None) -> None:
        _reads_packed(x, scale)
        assert x.numel(), "an empty grid is a launch error"
        value, found = _quant_fp8(static, shape)(x, scale if static else None, bound)
        out.copy_(value)
        if not static:
            scale.copy_(found)

    return call


def _fp8_group(x: Tensor, out: Tensor, scale: Tensor, size: int, eps: float, *rest: Any) -> None:
    least, most, ue8m0, transposed, aligned = rest
    _reads_packed(x, out)
    assert x.numel(), "an empty grid is a launch error"
    assert (least, most, transposed, aligned) == (-448.0, 448.0, False, False)
    if x.unflatten(-1, (-1, size)).abs().amax(-1).min() < max(eps, 1 / 512):
        raise NotImplementedError("the layer has a least scale of its own, and no eps")
    value, found = _quant_fp8(False, (1, size), ue8m0)(x)
    out.copy_(value)
    # The kernel counts x's groups, and writes beyond `scale` if it has fewer elements.
    scale.view(-1).copy_(found.reshape(-1)[: scale.numel()])


_fp8_group._schema = torch._C.parse_schema(
    "_C::per_token_group_fp8_quant(Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, "
    "int group_size, float eps, float fp8_min, float fp8_max, bool scale_ue8m0, "
    "bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
)


def _quant_fp8(static: bool, shape: tuple[int, int], ue8m0: bool = False) -> Callable[..., Any]:
    """`forward_native` of vLLM's QuantFP8, bypassing layers that replace it."""
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8

    layer = _made(QuantFP8, static, GroupShape(*shape), use_ue8m0=ue8m0)
    return partial(QuantFP8.forward_native, layer)


def _activation(overload: Any) -> Callable[..., None]:
    """Of a row in one part, or in two if it is gated."""

    def call(out: Tensor, x: Tensor) -> None:
        _reads_packed(x)
        size = out.shape[-1]
        parts = F.pad(x.float().unflatten(-1, (-1, size)), (0, -size % LANES))
        result = parts.new_empty((*parts.shape[:-2], parts.shape[-1]))
        overload(result, parts.flatten(-2))
        out.copy_(result[..., :size])

    return call


def _norm(overload: Any) -> Callable[..., None]:
    def call(out: Tensor, x: Tensor, weight: Any, epsilon: float) -> None:
        assert 2 <= x.ndim <= 4, "the CUDA kernel takes two to four dimensions"
        assert x.stride(-1) == 1, "the CUDA kernel reads rows without gaps"
        _whole_vectors(x)
        wide = x.float().contiguous()  # the CUDA kernel supports row strides
        result = torch.empty_like(wide)
        overload(result, wide, _wide(weight, x), epsilon)
        out.copy_(result)

    return call


def _add_norm(overload: Any) -> Callable[..., None]:
    def call(x: Tensor, residual: Tensor, weight: Any, epsilon: float) -> None:
        _reads_packed(x, residual)
        _whole_vectors(x)
        wide = [each.float() for each in (x, residual)]
        overload(*wide, _wide(weight, x), epsilon)
        for each, result in zip((x, residual), wide, strict=True):
            each.copy_(result)

    return call


def _wide(weight: Tensor | None, x: Tensor) -> Tensor | None:
    assert weight is None or weight.dtype == x.dtype, "the CUDA kernel reads it as x's dtype"
    return None if weight is None else weight.float()


def _int8(overload: Any) -> Callable[..., None]:
    def call(out: Tensor, x: Tensor, *scales: Tensor | None) -> None:
        _reads_packed(x, *(scale for scale in scales if scale is not None))
        rows = x.view(-1, x.shape[-1])  # the CUDA kernels flatten leading dimensions
        assert scales[0].numel() in (1, len(rows)), "the kernel writes a scale for each row"
        overload(out.view(rows.shape), rows, *scales)

    return call


def _rotary(overload: Any) -> Callable[..., None]:
    def call(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        head_size: int,
        cache: Tensor,
        neox: bool,
    ) -> None:
        _reads_packed(positions, cache)
        if not all(0 <= position < len(cache) for position in positions.tolist()):
            raise IndexError("a position outside the tables, which on a GPU is undefined")
        # In float32 the CPU's kernel also supports any size and any tables.
        wide = [None if x is None else x.float() for x in (query, key)]
        overload(positions, *wide, head_size, cache.float(), neox)
        for x, turned in zip((query, key), wide, strict=True):
            if x is not None:
                x.copy_(turned)

    return call


def _norm_rope(norm: Callable[..., None], rotary: Callable[..., None]) -> Callable[..., None]:
    """The CPU build's two kernels, with the requirements of the CUDA build's fused kernel."""

    def call(
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        values: int,
        size: int,
        epsilon: float,
        q_weight: Tensor,
        k_weight: Tensor,
        cache: Tensor,
        neox: bool,
        positions: Tensor,
    ) -> None:
        _reads_packed(qkv, q_weight, k_weight, cache, positions)
        assert qkv.shape == (len(positions), (heads + kv_heads + values) * size)
        assert {q_weight.dtype, k_weight.dtype} == {qkv.dtype} <= {torch.float16, torch.bfloat16}
        assert size in (64, 128, 256) and positions.dtype is torch.int64
        parts = [part * size for part in (heads, kv_heads, values)]
        query, key, _ = (part.contiguous() for part in qkv.float().split(parts, dim=-1))
        for rows, weight in ((query, q_weight), (key, k_weight)):
            by_head = rows.view(-1, size)
            norm(by_head, by_head.clone(), weight.float(), epsilon)
        rotary(positions, query, key, size, cache, neox)
        for part, turned in zip(qkv.split(parts, dim=-1), (query, key), strict=False):
            part.copy_(turned)

    return call


def _whole_vectors(x: Tensor) -> None:
    if x.shape[-1] % LANES:
        raise NotImplementedError(f"the CPU kernel takes whole vectors of {LANES}: {x.shape[-1]}")


def _reads_packed(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.is_contiguous(), "the kernel reads it as if it were contiguous"


BEHIND = {
    "rms_norm": _norm,
    "fused_add_rms_norm": _add_norm,
    "rotary_embedding": _rotary,
    "static_scaled_int8_quant": _int8,
    "dynamic_scaled_int8_quant": _int8,
}
"""CUDA kernel -> its stand-in; every other kernel is an activation. All but int8 get fp32, the
CUDA kernels' precision: some CPU kernels truncate bfloat16 instead of rounding."""


def _concat_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kind: str, scale: Tensor
) -> None:
    _reads_packed(slot_mapping)
    assert kind == "auto" and scale.dtype == torch.float32, "of a cache without quantisation"
    assert kv_c.stride(1) == k_pe.stride(1) == kv_cache.stride(2) == 1, "rows in one piece"
    # In PyTorch, because the CPU build has this kernel only for processors with AVX-512.
    held = slot_mapping >= 0
    rows = torch.cat((kv_c, k_pe), dim=1)[: len(slot_mapping)]
    slots, size = slot_mapping[held], kv_cache.shape[1]
    kv_cache[slots // size, slots % size] = rows[held]


def _reshape(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kind: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    assert key_cache.stride() == value_cache.stride(), "the kernel writes both by one's strides"
    assert key_cache.stride(3) == 1, "heads in one piece"
    for x, held in ((key, key_cache), (value, value_cache)):
        rows = x.as_strided(key.shape, x.stride())  # the kernel assumes this shape
        assert rows.stride()[1:] == (rows.shape[2], 1), "the kernel reads heads side by side"
        sizes = (held.data_ptr(), *(step * held.itemsize for step in held.stride()[:3]))
        assert not any(size % 16 for size in sizes), "the kernel stores 16 bytes"
        # A row in two pieces, as for latents.
        whole, half = held.contiguous().flatten(2), rows.shape[1] * rows.shape[2] // 2
        pieces = rows.flatten(1)[:, :half], rows.flatten(1)[:, half:]
        _concat_mla(*pieces, whole, slot_mapping, kind, k_scale)
        held.copy_(whole.view(held.shape))


def _merge(
    output: Tensor,
    output_lse: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    prefill_tokens_with_context: int | None,
) -> None:
    from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch

    _reads_packed(output, output_lse, prefix_lse, suffix_lse)
    heads, side = prefix_output.shape[1], prefix_output.stride(1)
    for x in (prefix_output, suffix_output):
        assert x.stride() == (heads * side, side, 1), "the kernel reads both by one stride of heads"
        assert x.data_ptr() % 16 == (side * x.itemsize) % 16 == 0, "the kernel loads 16 bytes"
    args = (prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse)
    _merge_attn_states_torch(output, *args, prefill_tokens_with_context)


def _scaled_mm(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None
) -> None:
    """PyTorch's fp8 product with a scale for each row and column."""
    _reads_packed(out, a, b.t(), a_scales, b_scales)
    assert not any(size % 16 for size in b.shape), "the kernel loads 16 bytes"
    assert a.numel(), "an empty grid is a launch error"
    assert bias is None or (bias.is_contiguous() and bias.dtype == out.dtype)
    rows, columns = a_scales.reshape(-1, 1), b_scales.reshape(1, -1)
    scales = rows.expand(len(a), 1).contiguous(), columns.expand(1, b.shape[1]).contiguous()
    out.copy_(torch._scaled_mm(a, b, *scales, bias, out_dtype=out.dtype))


OTHERWISE = {
    "_C_cache_ops::concat_and_cache_mla": _concat_mla,
    "_C_cache_ops::reshape_and_cache_flash": _reshape,
    "dynamic_per_token_scaled_fp8_quant": _fp8(static=False, shape=(1, -1)),
    "dynamic_scaled_fp8_quant": _fp8(static=False, shape=(-1, -1)),
    "cutlass_scaled_mm": _scaled_mm,
    "merge_attn_states": _merge,
    "per_token_group_fp8_quant": _fp8_group,
    "static_scaled_fp8_quant": _fp8(static=True, shape=(-1, -1)),
}
"""Kernels with another name or other rows in the CPU build, or only in PyTorch (fp8: stubs)."""
