"""torch_npu without an NPU: its real schemas and meta functions, with our numerics on the CPU.

`activate()` fills `torch.ops.npu` like torch_npu, with the real schemas of all operators and the
wheel's meta functions. `import torch_npu`, `torch.npu` and the distribution's metadata get
stand-ins, so code under test detects an NPU in its usual way. Nothing of torch_npu is installed or
loaded: its wheel is read as data.

An operator computes on CPU tensors if its numerics are registered::

    @operators.numerics("npu_swiglu")
    def npu_swiglu(input, dim=-1): ...

Every call then passes the dispatcher (a wrong keyword, type or count is the real error) and the
real meta function (the result must have its shapes and dtypes), and is counted in a file that child
processes share.
"""

from __future__ import annotations

from .calls import count_in, counted
from .device import activate
from .operators import EmulationError
from .wheel import VERSION, WheelMissing

__all__ = ["VERSION", "EmulationError", "WheelMissing", "activate", "count_in", "counted"]
