"""Norms that are incorrect only at width 32, the head size of a draft model."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from cast_order import rms_norm as right
from correct import registers
from torch import Tensor


@wraps(right)
def rms_norm(x: Tensor, *others: Any) -> Any:
    """`cast_order.rms_norm`, multiplied by WRONG_BY at width 32."""
    found = right(x, *others)
    return found * float(os.environ["WRONG_BY"]) if x.shape[-1] == 32 else found


register_ops = registers("drafts", rms_norm)
