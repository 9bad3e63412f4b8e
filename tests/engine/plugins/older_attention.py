"""The older form: an attention backend as an OpImpl whose function returns a class path."""

from __future__ import annotations

from typing import Any

from vllm_fl import BackendImplKind, OpImpl


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    if use_mla or use_sparse:
        raise NotImplementedError("no MLA here")
    return "counting_backend.CountingBackend"


def register_builtins(registry: Any) -> None:
    kind = BackendImplKind.VENDOR
    registry.register_impl(
        OpImpl("attention_backend", "vendor.older", kind, attention_backend, vendor="older")
    )
