"""Third-party attention backend; its class and the requests that it rejects are variables."""

from __future__ import annotations

import os

from vllm_fl import AttentionImpl, AttentionRequest, BackendImplKind, hookimpl


def supports(request: AttentionRequest) -> bool | str:
    if request.use_mla or request.has_sink:
        return "no MLA and no sinks"
    wanted = os.environ.get("COUNTING_HEAD_SIZE")
    if wanted and request.head_size != int(wanted):
        return f"head size {request.head_size}, only {wanted}"
    return True


def class_path(request: AttentionRequest) -> str:
    return os.environ.get("COUNTING_CLASS", "counting_backend.CountingBackend")


@hookimpl
def attention_backend() -> list[AttentionImpl]:
    kind = BackendImplKind.VENDOR
    return [AttentionImpl("vendor.counting", class_path, kind, "counting", supports=supports)]
