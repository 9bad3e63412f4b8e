"""A CPU as hardware unknown to vLLM, for builds without compiled operators: platform, worker,
attention on a paged cache, and Triton kernels of vLLM's runner, all in PyTorch."""

from __future__ import annotations

from vllm_fl import (
    AttentionImpl,
    AttentionRequest,
    Availability,
    BackendImplKind,
    DeviceProfile,
    hookimpl,
)


@hookimpl
def device() -> DeviceProfile:
    return DeviceProfile(
        "bare_cpu",
        platform_class="fl_bare_cpu.platform.BareCpuPlatform",
        worker_class="fl_bare_cpu.worker.BareCpuWorker",
        detect=lambda: True,
    )


@hookimpl
def attention_backend() -> list[AttentionImpl]:
    return [
        AttentionImpl(
            "vendor.bare_cpu",
            "fl_bare_cpu.attention.BareCpuAttentionBackend",
            BackendImplKind.VENDOR,
            "bare_cpu",
            supports=supports_attention,
        )
    ]


def supports_attention(request: AttentionRequest) -> Availability:
    if request.use_mla or request.use_sparse or request.has_sink:
        return "BareCpuAttentionBackend has no MLA, no sparse attention and no sinks"
    if request.kv_cache_dtype not in (None, "auto"):
        return f"BareCpuAttentionBackend has no {request.kv_cache_dtype} KV cache"
    return True
