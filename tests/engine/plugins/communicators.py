"""Communicators over gloo: counting reductions, and incorrect on rank 1."""

from __future__ import annotations

from vllm_fl import BackendImplKind, CommunicatorImpl, hookimpl

KIND = BackendImplKind.VENDOR


@hookimpl
def communicator() -> list[CommunicatorImpl]:
    return [
        CommunicatorImpl(f"vendor.{name}", f"communicator_classes.{cls}", KIND, name)
        for name, cls in (("wrong", "WrongCommunicator"), ("counting", "CountingCommunicator"))
    ]
