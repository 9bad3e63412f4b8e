"""A plugin's classes for quantised layers, with a fault in layers of the model."""

from __future__ import annotations

from vllm_fl import BackendImplKind, ExpertKernelImpl, LinearKernelImpl, hookimpl


@hookimpl
def linear_kernels() -> list[LinearKernelImpl]:
    kind = BackendImplKind.VENDOR
    return [
        LinearKernelImpl("int8", "faulty_linear_classes.Int8", kind, "faulty"),
        LinearKernelImpl("wna16", "faulty_linear_classes.WNA16", kind, "faulty"),
    ]


@hookimpl
def expert_kernels() -> list[ExpertKernelImpl]:
    path = "faulty_linear_classes.Experts"
    return [ExpertKernelImpl("int8", path, BackendImplKind.VENDOR, "faulty")]
