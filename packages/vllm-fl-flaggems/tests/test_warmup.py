"""After startup's warm-up no kernel needs compiling, according to the interpreter's launches."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from anywhere import registered

from vllm_fl import OpImpl
from vllm_fl.contracts import ModelSizes
from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.registry import known_contracts
from vllm_fl_flaggems.plugin import register_ops
from vllm_fl_ops.contracts.rules import typical_sizes
from vllm_fl_tools.testing.triton import to_compile
from vllm_fl_verify.warmup import warm_counts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("TRITON_INTERPRET"), reason="counts what the interpreter launches"
    ),
]

LARGEST = 2048
LATER = [17, 100, 1000, *random.Random(5).choices(range(1, LARGEST + 1), k=20)]
MORE = typical_sizes(known_contracts().bindings.values()).more
NARROW = ModelSizes(72, 75, 6, 2, 12, 12, max_position=64, more=MORE)
"""Widths not divisible by 16: the token count decides whether the products are."""

OF_SEQUENCES = {"recurrent_gated_delta_rule"}
NOT_WARMABLE = {"fused_experts"}
"""Ops without samples by token count; and ops with a kernel that may be compiled after the warm-up,
because FlagGems changes its tiles at token counts that end no bucket."""


@pytest.fixture(scope="module")
def impls() -> dict[str, OpImpl]:
    """The backend's implementations, on the interpreter, without the check of positions."""
    get_default_manager().ensure_initialized()
    from vllm_fl_flaggems.triton_kernels import qk_norm_rope_kernel

    rotary = sys.modules["flag_gems.fused.rotary_embedding"].apply_rotary_pos_emb_kernel
    for kernel in (qk_norm_rope_kernel, rotary):
        vars(kernel).pop("run", None)
    return registered(register_ops())


def call(impl: OpImpl, counts: Iterable[int]) -> int:
    """Call it at these token counts; return the number of calls."""
    spec, called = known_contracts().contracts[impl.op_name], 0
    sizes = replace(NARROW, tokens=tuple(counts))
    dtype = "bfloat16" if "bfloat16" in spec.dtypes else spec.dtypes[0]
    for sample in spec.served(sizes, getattr(torch, dtype), torch.device("cpu")):
        if impl.supports is None or impl.supports(*sample.args) is True:
            with suppress(NotImplementedError):  # unsupported call
                impl.fn(*sample.args)
                called += 1
    return called


def compiled_later(impl: OpImpl, counts: Iterable[int]) -> set[str]:
    """Kernels compiled for other counts after a warm-up with these."""
    with to_compile(runs=False) as found:
        assert call(impl, counts)
        assert found, "no launch was seen"
        before = set(found)
        call(impl, LATER)
    return found - before


@pytest.mark.parametrize(
    "op", sorted({impl.op_name for impl in register_ops()} - OF_SEQUENCES - NOT_WARMABLE)
)
def test_nothing_is_compiled_after_a_warm_up(op: str, impls: dict[str, OpImpl]) -> None:
    assert compiled_later(impls[op], warm_counts(LARGEST)) == set()


@pytest.mark.parametrize("op", sorted(NOT_WARMABLE))
def test_what_no_warm_up_helps_is_known(op: str, impls: dict[str, OpImpl]) -> None:
    """If this fails, move the op to the others and update the docs."""
    assert 0 < len(compiled_later(impls[op], warm_counts(LARGEST))) < 5
