"""What single checks accept, or skip with a reason."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_mutants import oracle_impl
from wrong_kernels import right

from vllm_fl.contracts import ModelSizes, Sample
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl_tools import testing
from vllm_fl_tools.testing import CHECKS, Failure, failures, processes
from vllm_fl_tools.testing.families import families_of
from vllm_fl_tools.testing.subject import Refused, Subject

SERVING = ("serving", "preflight")


def only(*dtypes: torch.dtype) -> Any:
    """`supports` of a kernel for these dtypes."""
    return lambda x: x.dtype in dtypes or f"no kernel for {x.dtype}"


def found(impl: Any, *checks: str) -> list[Failure]:
    return list(failures(impl, without=CHECKS.keys() - set(checks)))


def on_cpu(*args: Any) -> bool | str:
    """`supports` of a kernel that reads memory of the CPU."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return all(tensor.device.type == "cpu" for tensor in tensors) or "not all on the CPU"


def sound(op: str, **fields: Any) -> OpImpl:
    fn = right.of(op)
    fields = {"fn": fn, "supports": with_signature(on_cpu, fn)} | fields
    return OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, vendor="acme", **fields)


def with_signature(fn: Any, other: Any) -> Any:
    """`fn` with the signature of another function, for the registry's check."""

    def same(*args: Any) -> Any:
        return fn(*args)

    vars(same)["__signature__"] = inspect.signature(other)
    return same


@pytest.mark.parametrize(
    "change", [partial(torch.set_default_dtype, torch.float64), partial(torch.manual_seed, 3)]
)
def test_calls_of_other_checks_hide_no_change_of_the_process(change: Any) -> None:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        out = right.silu_and_mul(x)
        change()
        return out

    subject = Subject(sound("silu_and_mul", fn=silu_and_mul), torch.device("cpu"))
    (first, *_) = subject.all_samples("bfloat16")
    try:
        CHECKS["serving"].run(subject, "bfloat16", "")
        with pytest.raises(AssertionError, match="of the whole process"):
            CHECKS["values"].run(subject, "bfloat16", first.name)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("check", SERVING)
def test_it_is_skipped_with_its_reason(check: str) -> None:
    subject = Subject(sound("silu_and_mul", supports=only(torch.bfloat16)), torch.device("cpu"))
    for dtype in ("float32", "float16"):
        with pytest.raises(Refused, match=f"unsupported {dtype}: no kernel for torch.{dtype}"):
            CHECKS[check].function(subject, dtype, "")
    CHECKS[check].function(subject, "bfloat16", "")


@pytest.mark.parametrize("check", SERVING)
def test_one_that_refuses_every_dtype_fails(check: str) -> None:
    failed = found(sound("silu_and_mul", supports=only()), check)
    assert len(failed) == 3
    assert all("any dtype" in one.reason and "no kernel for" in one.reason for one in failed)


@pytest.mark.parametrize("check", SERVING)
def test_a_refusal_without_a_reason_fails(check: str) -> None:
    impl = sound("silu_and_mul", supports=lambda x: x.dtype != torch.float32 or "")
    assert ["call without a reason" in one.reason for one in found(impl, check)] == [True]


def test_a_dtype_that_is_accepted_and_wrong_still_fails_in_preflight() -> None:
    impl = sound("silu_and_mul", supports=only(torch.float32))
    wrong = dataclasses.replace(impl, fn=lambda x: impl.fn(x) + 1)
    assert [one.case.dtype for one in found(wrong, "preflight")] == ["float32"]


@pytest.mark.parametrize(
    "supports",
    [
        lambda x, *_: len(x) < 5 or "many tokens",
        lambda x, *_: len(x) % 4 == 0 or "an odd batch",
        lambda x, *_: not x.isnan().any() or "not a number",
        lambda x, *_: x.ndim > 2 or x.abs().sum() < 1e3 or "slow",
    ],
)
def test_a_refusal_by_values_or_by_the_batch_fails(supports: Any) -> None:
    def asked(*args: Any) -> bool | str:
        there = on_cpu(*args)
        return supports(*args) if there is True else there

    impl = sound("rms_norm", supports=with_signature(asked, right.rms_norm))
    assert found(sound("rms_norm"), "serving", "refusals") == []
    assert found(impl, "serving", "refusals")


@pytest.mark.parametrize(("op", "name"), [("rms_norm", "weight"), ("silu_and_mul", "x")])
def test_an_argument_that_no_contract_gives_up_is_none_to_consume(op: str, name: str) -> None:
    (failure,) = found(sound(op, consumes=frozenset({name})), "declaration")
    assert failure.case.check == "declaration"


@pytest.mark.parametrize(
    "in_child", [lambda: os._exit(3), lambda: time.sleep(60)], ids=["ends", "hangs"]
)
def test_a_kernel_that_ends_or_hangs_in_a_child_fails(in_child: Any) -> None:
    here = os.getpid()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        if os.getpid() != here:
            in_child()
        return right.silu_and_mul(x)

    wrong = dataclasses.replace(sound("silu_and_mul"), fn=kernel)
    failed = failures(wrong, without=CHECKS.keys() - {"fork"}, deadline=0.5)
    assert [each.case.check for each in failed] == ["fork"] * len(
        known_contracts().contracts["silu_and_mul"].dtypes
    )


def norm(self: Any, x: torch.Tensor, residual: Any = None) -> Any:
    """RMSNorm in the older form: the first argument is the layer, with the weight."""
    total = x.double() if residual is None else x.double() + residual.double()
    size = self.variance_size_override or x.shape[-1]
    scale = (total[..., :size].pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    out = total * scale * (1.0 if self.weight is None else self.weight.double())
    out, total = (part.to(x.dtype).contiguous() for part in (out, total))
    return out if residual is None else (out, total)


def layer_first(fn: Any = norm) -> OpImpl:
    return OpImpl("rms_norm", "vendor.toy", BackendImplKind.VENDOR, fn, "toy")


COMPUTING = ("serving", "values", "refusals", "determinism", "fork")
CALLED_PLAINLY = ("bad_inputs", "call_op", "opcheck", "tracing")


def test_one_that_takes_a_layer_first_is_computed_with() -> None:
    assert found(layer_first(), "declaration", *COMPUTING) == []


def test_one_that_takes_a_layer_first_and_is_wrong_fails() -> None:
    def sloppy(self: Any, x: torch.Tensor, residual: Any = None) -> Any:
        return norm(self, 1.5 * x, residual)

    def other_each_time(self: Any, x: torch.Tensor, residual: Any = None) -> Any:
        return norm(self, x + torch.rand_like(x), residual)

    def in_place(self: Any, x: torch.Tensor, residual: Any = None) -> Any:
        return x.copy_(norm(self, x)) if residual is None else norm(self, x, residual)

    assert len(found(layer_first(sloppy), "values")) > 20
    failed = found(layer_first(other_each_time), "values", "determinism")
    assert {one.case.check for one in failed} == {"values", "determinism"}
    assert any("memory with 'x'" in one.reason for one in found(layer_first(in_place), "values"))


@pytest.mark.parametrize("check", CALLED_PLAINLY)
def test_what_has_no_layer_to_give_is_skipped_with_that_reason(check: str) -> None:
    subject = Subject(layer_first(), torch.device("cpu"))
    with pytest.raises(Refused, match="needs a layer"):
        CHECKS[check].function(subject, "float32", "")


def test_rows_of_an_expert_in_another_order_each_time_are_the_same_result() -> None:
    spec = known_contracts().contracts["moe_align_block_size"]
    turns = itertools.count()

    def other_rows_first(results: Any, args: Any) -> Any:
        rows, experts, used = results
        swapped, turn = rows.clone(), next(turns)
        for block in range(int(used) // args[1]):
            own = slice(block * args[1], (block + 1) * args[1])
            found = rows[own][rows[own] < args[0].numel()]
            swapped[own][: len(found)] = found.roll(turn)
        swapped[int(used) :] = turn
        return swapped, experts, used

    def one_lost(results: Any, args: Any) -> Any:
        rows, experts, used = results
        return torch.where(rows == next(turns) % 8, args[0].numel(), rows), experts, used

    assert found(oracle_impl(spec, other_rows_first), "values", "determinism", "fork") == []
    failed = found(oracle_impl(spec, one_lost), "values", "determinism")
    assert {one.case.check for one in failed} == {"values", "determinism"}


def test_a_fresh_process_holds_no_op_to_account_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no luck")

    right = sound("gelu_and_mul")
    wrong = dataclasses.replace(sound("silu_and_mul"), fn=fails)
    monkeypatch.setattr(processes, "installed", lambda backend: (wrong, right))
    place = (right.impl_id, "cpu", ModelSizes(), frozenset())
    there = processes._answer_installed(*place, "bfloat16")
    assert "no luck" in there["silu_and_mul"]
    answers = there["gelu_and_mul"]
    assert isinstance(answers, dict) and answers
    assert all(name.startswith("gelu_and_mul, bfloat16, ") for name in answers)


def test_a_weight_of_integers_is_a_bad_input() -> None:
    def takes_them(x: Any, residual: Any, weight: Any, *rest: Any) -> Any:
        return right.rms_norm(x, residual, None if weight is None else weight.float(), *rest)

    silent = with_signature(takes_them, right.rms_norm)
    wrong = dataclasses.replace(sound("rms_norm", supports=None), fn=silent)
    failed = found(wrong, "bad_inputs")
    assert all("although 'weight' is invalid" in one.reason for one in failed)
    cases = [one.case for one in failed]
    dtypes = [case.dtype for case in cases if case.sample == "weight: of int64"]
    assert dtypes == ["float32", "float16", "bfloat16"]
    assert found(sound("rms_norm"), "bad_inputs") == []


def test_an_op_that_asks_for_what_no_public_model_has_is_of_none() -> None:
    def served(sizes: Any, *_: Any) -> Any:
        yield Sample("its own", (torch.zeros(1, int(sizes.more["capped"])),))

    own = dataclasses.replace(known_contracts().contracts["silu_and_mul"], served=served)
    assert families_of(own) == []
    assert len(families_of(known_contracts().contracts["silu_and_mul"])) >= 6


def test_numbers_that_are_right_are_packed_too() -> None:
    def silu(x: torch.Tensor) -> torch.Tensor:
        """In plain PyTorch, so the product has the strides of a transposed x."""
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    failed = found(dataclasses.replace(sound("silu_and_mul"), fn=silu), "values")
    assert {one.case.sample for one in failed} == {"16 tokens, x transposed in memory"}
    assert all("strides (1, 16)" in one.reason for one in failed)


def test_no_check_is_an_assert() -> None:
    """The kit's results are the same under `python -O`."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(testing.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
