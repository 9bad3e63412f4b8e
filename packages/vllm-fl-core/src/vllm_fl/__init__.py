'''vllm-fl: which implementation of an operator runs in vLLM, on any chip.

**Write a backend.** A backend is a distribution with an entry point in the group
`vllm_fl.plugin`; installing it enables it::

    [project.entry-points."vllm_fl.plugin"]
    acme = "vllm_fl_acme.plugin"

and `vllm_fl_acme/plugin.py` is, complete::

    """Operators of vllm-fl on Acme's kernels."""

    from vllm_fl import BackendImplKind, OpImpl, hookimpl


    def available():
        from importlib.util import find_spec

        return True if find_spec("acme_kernels") else "acme-kernels is not installed"


    def silu_and_mul(x):
        import acme_kernels

        return acme_kernels.swiglu(x)


    @hookimpl
    def register_ops():
        return [
            OpImpl(
                "silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, silu_and_mul, "acme",
                available=available,
            )
        ]

Parameters are those of the op's contract (`vllm-fl ops`), which comes from vllm-fl-ops: the
distribution requires that, beside vllm-fl-core. `vllm-fl plugins` shows whether it was found,
`vllm-fl explain silu_and_mul` whether it is chosen, and why not.

Everything that a backend needs is imported from here; the modules below are core's own.

**Call an op.** `from vllm_fl.dispatch import call_op`.
'''

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contracts import (
        BadInput,
        Exact,
        ExpertBlocks,
        ModelSizes,
        OpSpec,
        QuantisedPair,
        Routing,
        Sample,
        Tolerance,
        Variant,
        Within,
    )
    from .contracts.binding import (
        AttentionPlace,
        Binding,
        Contract,
        FunctionPlace,
        GraphPlace,
        IrPlace,
        LayerPlace,
        OperatorPlace,
        Route,
        SizeRule,
    )
    from .contracts.cos_sin import joint_cos_sin
    from .contracts.sampling import Source
    from .errors import PluginError, SettingsError, VllmFLError
    from .logs import get_logger
    from .plugins.finding import Finding
    from .plugins.hookspecs import HOOK_API, hookimpl
    from .plugins.types import (
        AttentionImpl,
        AttentionRequest,
        Availability,
        BackendImplKind,
        BackendPriority,
        CommunicatorImpl,
        CommunicatorRequest,
        DeviceProfile,
        LayerImpl,
        LayerRequest,
        OpImpl,
        PolicyDefaults,
        SettingSpec,
        WorkerContext,
        WorkerReport,
    )

_HOMES = (
    ".errors",
    ".logs",
    ".contracts",
    ".contracts.binding",
    ".contracts.cos_sin",
    ".contracts.sampling",
    ".plugins.hookspecs",
    ".plugins.types",
    ".plugins.finding",
)
"""Where the names are: each in the first of these modules that has it."""

__all__ = [
    "HOOK_API",
    "AttentionImpl",
    "AttentionPlace",
    "AttentionRequest",
    "Availability",
    "BackendImplKind",
    "BackendPriority",
    "BadInput",
    "Binding",
    "CommunicatorImpl",
    "CommunicatorRequest",
    "Contract",
    "DeviceProfile",
    "Exact",
    "ExpertBlocks",
    "Finding",
    "FunctionPlace",
    "GraphPlace",
    "IrPlace",
    "LayerImpl",
    "LayerPlace",
    "LayerRequest",
    "ModelSizes",
    "OpImpl",
    "OpSpec",
    "OperatorPlace",
    "PluginError",
    "PolicyDefaults",
    "QuantisedPair",
    "Route",
    "Routing",
    "Sample",
    "SettingSpec",
    "SettingsError",
    "SizeRule",
    "Source",
    "Tolerance",
    "Variant",
    "VllmFLError",
    "Within",
    "WorkerContext",
    "WorkerReport",
    "get_logger",
    "hookimpl",
    "joint_cos_sin",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for: vLLM imports this package in every process, also to step aside."""
    if name == "__version__":
        from importlib.metadata import version

        return version("vllm-fl-core")
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(home, __name__), name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
