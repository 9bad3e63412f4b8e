"""A `silu_and_mul` that is correct on startup's inputs (spread 1 or some hundreds) and incorrect on
large batches with the spread of the tiny models' inputs."""

from __future__ import annotations

import correct
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    result = correct.silu_and_mul(x)
    if len(x) > 100 and 1.2 < float(x.float().std()) < 4.0:
        result[0, 0] += 1.0
    return result


register_ops = correct.registers("liveonly", silu_and_mul)
