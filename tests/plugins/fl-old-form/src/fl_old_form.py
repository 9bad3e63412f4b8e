"""Plugin in the older form: its entry point is a callable that gets the registry."""

from __future__ import annotations

from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl


class OlderBackend:
    def is_available(self):
        return True

    def silu_and_mul(self, x):
        return x


def register_builtins(registry):
    backend = OlderBackend()
    registry.register_many(
        [
            OpImpl(
                op_name="silu_and_mul",
                impl_id="vendor.older",
                kind=BackendImplKind.VENDOR,
                fn=backend.silu_and_mul,
                vendor="older",
                priority=BackendPriority.VENDOR,
            )
        ]
    )
