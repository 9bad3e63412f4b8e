"""For an implementation with fewer parameters, the kit requires only its contract's promises."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from older_forms import LACKS, held, of, rms_norm, rotary_embedding
from sample_ops import sample_contracts

from vllm_fl_tools.testing.checks import (
    declaration,
    determinism,
    refusals,
    states_support,
    unchanged_arguments,
)
from vllm_fl_tools.testing.compiling import opcheck, tracing
from vllm_fl_tools.testing.subject import Refused, Subject

CPU = torch.device("cpu")


@pytest.mark.parametrize("op_fn", [("rms_norm", rms_norm), ("rotary_embedding", rotary_embedding)])
def test_the_kit_asks_for_no_more_than_it_said(op_fn: Any) -> None:
    op, fn = op_fn
    subject = Subject(held(of(op, fn)), CPU)
    for check in (refusals, unchanged_arguments, determinism, declaration):
        check(subject, "float32", "")
    own = held(of(op, fn, supports=fn))  # with the same parameters
    assert states_support(own) and not states_support(subject.impl)


@pytest.mark.parametrize("fn", [fn for fn, _ in LACKS], ids=lambda fn: fn.__name__)
def test_the_kit_takes_every_form(fn: Any) -> None:
    with sample_contracts():
        subject = Subject(held(of("grown", fn)), CPU)
        for check in (refusals, unchanged_arguments, determinism, declaration, tracing, opcheck):
            with suppress(Refused):
                check(subject, "float32", "")
