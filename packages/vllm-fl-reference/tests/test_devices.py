"""Where results are written into tensors, one on another device ends the call with an error.

PyTorch raises for most mixed devices, but of a tensor on meta, which stands for an accelerator
here, it writes nothing in silence. Elsewhere the result would be on meta, which is not silent.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vllm_fl import OpImpl
from vllm_fl.contracts import contracts
from vllm_fl_reference import plugin

CPU = torch.device("cpu")


def calls() -> Iterator[tuple[OpImpl, str, int]]:
    """(implementation, the sample with most tensors, where one is), of ops that write into some."""
    for impl in (i for i in plugin.register_ops() if i.consumes or not i.traceable):
        samples = [s for s in contracts()[impl.op_name].samples(torch.float32, CPU) if s.args]
        fullest = max(samples, key=lambda s: sum(isinstance(a, torch.Tensor) for a in s.args))
        for number, argument in enumerate(fullest.args):
            if isinstance(argument, torch.Tensor):
                yield impl, fullest.name, number


@pytest.mark.parametrize(
    ("impl", "name", "number"), calls(), ids=lambda part: getattr(part, "op_name", str(part))
)
def test_a_tensor_on_another_device_is_refused(impl: OpImpl, name: str, number: int) -> None:
    samples = contracts()[impl.op_name].samples(torch.float32, CPU)
    args = list(next(s for s in samples if s.name == name).args)
    args[number] = args[number].to("meta")
    with pytest.raises((RuntimeError, NotImplementedError, TypeError, ValueError)):
        impl.fn(*args)
