"""Registration in the older form: functions with the layer as first parameter `self`."""

from __future__ import annotations

import functools

from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl


def _bind_is_available(fn, is_available):
    bound = functools.partial(fn)
    bound._is_available = is_available
    return bound


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    return "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


def register_builtins(registry) -> None:
    from .iluvatar import IluvatarBackend

    is_available = IluvatarBackend().is_available
    registered = {"attention_backend": attention_backend}
    if is_available():
        from .impl import ops

        registered["silu_and_mul"] = ops.silu_and_mul_iluvatar
        registered["rms_norm"] = ops.rms_norm_iluvatar
        registered["rotary_embedding"] = ops.rotary_embedding_iluvatar
    for name, fn in registered.items():
        if registry.get_implementation(name, "vendor.iluvatar") is None:
            registry.register_impl(
                OpImpl(
                    op_name=name,
                    impl_id="vendor.iluvatar",
                    kind=BackendImplKind.VENDOR,
                    fn=_bind_is_available(fn, is_available),
                    vendor="iluvatar",
                    priority=BackendPriority.VENDOR,
                )
            )
