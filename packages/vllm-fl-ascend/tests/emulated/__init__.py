"""torch_npu without an NPU: its real schemas and meta functions, and our numerics on the CPU.

`activate()` makes `torch.ops.npu` what torch_npu registers: every operator by its real schema, and
the wheel's own meta functions. It also gives `import torch_npu`, `torch.npu` and the distribution's
metadata a stand-in, so that code under test finds an NPU by its usual way. Nothing of torch_npu is
installed or loaded: its wheel is read as data.

An operator computes on CPU tensors once somebody wrote what it does::

    @emulated.numerics("npu_swiglu")
    def npu_swiglu(input, dim=-1): ...

Every call then goes by the dispatcher (so a wrong keyword, type or count is the real error), by the
real meta function (whose shapes and dtypes the result must have), and is counted in a file that
child processes share.
"""

from __future__ import annotations

from .calls import count_in, counted
from .device import activate
from .operators import EmulationError, numerics
from .wheel import VARIABLE, VERSION, WheelMissing

__all__ = [
    "VARIABLE",
    "VERSION",
    "EmulationError",
    "WheelMissing",
    "activate",
    "count_in",
    "counted",
    "numerics",
]
