"""Registration in the older form: bound methods of the backend, each with its availability."""

from __future__ import annotations

from functools import wraps

from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl


def _bind_is_available(fn, is_available):
    @wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    wrapper._is_available = is_available
    return wrapper


def register_builtins(registry) -> None:
    from .musa import MusaBackend

    backend = MusaBackend()
    is_available = backend.is_available
    registry.register_many(
        [
            OpImpl(
                op_name=name,
                impl_id="vendor.musa",
                kind=BackendImplKind.VENDOR,
                fn=_bind_is_available(getattr(backend, name), is_available),
                vendor="musa",
                priority=BackendPriority.VENDOR,
            )
            for name in ("silu_and_mul", "rms_norm", "rotary_embedding", "attention_backend")
        ]
    )
