"""vendor.cuda without a GPU, on the kernels of vLLM's CPU build: a plugin module for the tests.

VLLM_FL_PLUGIN_MODULES=on_cpu_kernels, with this folder on PYTHONPATH: every process that finds
plugins then has it. The kernels have the names and signatures of the CUDA build's. Where they take
less, the stand-in takes the call for them or refuses it; nothing here knows a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from vllm_fl import OpImpl, hookimpl

LANES = 8
"""Elements of one vector of the CPU kernels, which have no remainder."""


@hookimpl
def register_ops() -> Iterable[OpImpl]:
    """Nothing: what the installed plugin brings is let run here."""
    import vllm_fl_cuda.impl as shared
    from vllm_fl_cuda.impl import activation, normalization, qk_norm_rope, rotary

    shared._no_cuda_build = shared._no_device = lambda: None
    for module in (shared, activation, normalization, qk_norm_rope, rotary):
        module.kernel = kernel
    for module in (activation, normalization, qk_norm_rope, rotary):
        module.unsuitable = unsuitable
    qk_norm_rope._capability = lambda device: (8, 0)
    return ()


def unsuitable(name: str, x: torch.Tensor) -> str | None:
    """The backend's own question, with the CPU for the CUDA device."""
    from vllm_fl_cuda.impl import DTYPES

    if x.device.type != "cpu":
        return f"{name} is on {x.device}, not on the CPU"
    return None if x.dtype in DTYPES else f"no kernel for {name} of {x.dtype}"


@cache
def kernel(name: str) -> Callable[..., None]:
    """vLLM's CPU kernel `torch.ops._C.<name>` behind the CUDA kernel's demands.

    Raises:
        AttributeError: the CPU build has none, and vLLM no layer of that name.
    """
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()
    if name == "fused_qk_norm_rope":
        return _norm_rope(kernel("rms_norm"), kernel("rotary_embedding"))
    if not hasattr(torch.ops._C, name):
        return _by_layer(name)
    overload = getattr(torch.ops._C, name).default
    return {"rms_norm": _norm, "fused_add_rms_norm": _add_norm, "rotary_embedding": _rotary}.get(
        name, _gated
    )(overload)


def _by_layer(name: str) -> Callable[..., None]:
    """vLLM's layer of a kernel that the CPU build lacks, in PyTorch: the kernel's numbers are its.

    Made of the class itself, which knows nothing of the layers that stand in its place.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.custom_op import op_registry
    from vllm.model_executor.layers import activation  # noqa: F401 (registers its layers)

    if name not in op_registry:
        raise AttributeError(f"neither a CPU kernel nor a layer of vLLM's is called {name!r}")
    cls = op_registry[name]

    @cache
    def layer_with(*numbers: float) -> Any:
        layer = object.__new__(cls)
        with set_current_vllm_config(VllmConfig()):
            layer.__init__(*numbers)
        return layer

    def call(out: torch.Tensor, x: torch.Tensor, *numbers: float) -> None:
        _reads_packed(x)
        out.copy_(cls.forward_native(layer_with(*numbers), x))

    return call


def _gated(overload: Any) -> Callable[..., None]:
    def call(out: torch.Tensor, x: torch.Tensor) -> None:
        _reads_packed(x)
        size = out.shape[-1]
        whole = F.pad(x.unflatten(-1, (2, size)), (0, -size % LANES)).flatten(-2)
        result = whole.new_empty((*whole.shape[:-1], whole.shape[-1] // 2))
        overload(result, whole)
        out.copy_(result[..., :size])

    return call


def _norm(overload: Any) -> Callable[..., None]:
    def call(out: torch.Tensor, x: torch.Tensor, weight: Any, epsilon: float) -> None:
        assert 2 <= x.ndim <= 4, "the CUDA kernel takes two to four dimensions"
        assert x.stride(-1) == 1, "the CUDA kernel reads rows without gaps"
        _whole_vectors(x)
        overload(out, x.contiguous(), weight, epsilon)  # the CUDA kernel minds the rows' strides

    return call


def _add_norm(overload: Any) -> Callable[..., None]:
    def call(x: torch.Tensor, residual: torch.Tensor, weight: Any, epsilon: float) -> None:
        _reads_packed(x, residual)
        _whole_vectors(x)
        overload(x, residual, weight, epsilon)

    return call


def _rotary(overload: Any) -> Callable[..., None]:
    def call(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        head_size: int,
        cache: torch.Tensor,
        neox: bool,
    ) -> None:
        _reads_packed(positions, cache)
        if not all(0 <= position < len(cache) for position in positions.tolist()):
            raise IndexError("a position outside the tables, which on a GPU is undefined")
        # In fp32, as the CUDA kernel computes: there the CPU's takes any size, and any tables.
        wide = [None if x is None else x.float() for x in (query, key)]
        overload(positions, *wide, head_size, cache.float(), neox)
        for x, turned in zip((query, key), wide, strict=True):
            if x is not None:
                x.copy_(turned)

    return call


def _norm_rope(norm: Callable[..., None], rotary: Callable[..., None]) -> Callable[..., None]:
    """The CPU build's two kernels behind the demands of the CUDA build's one."""

    def call(
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        values: int,
        size: int,
        epsilon: float,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        cache: torch.Tensor,
        neox: bool,
        positions: torch.Tensor,
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


def _whole_vectors(x: torch.Tensor) -> None:
    if x.shape[-1] % LANES:
        raise NotImplementedError(f"the CPU kernel takes whole vectors of {LANES}: {x.shape[-1]}")


def _reads_packed(*tensors: torch.Tensor) -> None:
    for x in tensors:
        assert x.is_contiguous(), "the kernel reads it as if it were contiguous"
