'''vllm-fl chooses the implementations of operators in vLLM, on any chip.

**Write a backend.** A backend is a distribution with an entry point in the group
`vllm_fl.plugin`; installing it enables it::

    [project.entry-points."vllm_fl.plugin"]
    acme = "vllm_fl_acme.plugin"

and this is a complete `vllm_fl_acme/plugin.py`::

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

The parameters are defined by the op's contract (`vllm-fl explain silu_and_mul --contract`). The
distribution requires vllm-fl-core and vllm-fl-ops, which has the contracts. `vllm-fl doctor` shows
whether the plugin was found, and `vllm-fl explain silu_and_mul` whether the implementation is
chosen, or why not.

Backends import all names from `vllm_fl`; its submodules are internal.

**Call an op.** `from vllm_fl.dispatch import call_op`.
'''

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because vLLM imports this package in every process,
    even if vllm-fl is disabled."""
    if name == "__version__":
        from importlib.metadata import version

        return version("vllm-fl-core")
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    named = vars(import_module(".api", __name__))
    public = {key: named[key] for key in sorted(named) if key[0] != "_" and key != "annotations"}
    if name == "__all__":
        return [*public]
    if name not in public:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = public[name]
    return public[name]


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]
