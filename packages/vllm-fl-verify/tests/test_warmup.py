"""After a warm-up no kernel that is specialised by integer kinds needs compiling."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from of_acme import acme, silu_and_mul
from torch import Tensor

from vllm_fl.contracts import ModelSizes
from vllm_fl_verify import run
from vllm_fl_verify.preflight import Findings, find_faults
from vllm_fl_verify.trials import Request, Role
from vllm_fl_verify.warmup import warm_counts

CPU = torch.device("cpu")
KEY = "silu_and_mul", "vendor.acme"
LARGEST = 3000
SIZES = ModelSizes(16, 12, 4, 2, 8, 8, tokens=(1, LARGEST))


def kind(number: int) -> str:
    """Triton's specialisation of an integer."""
    return "1" if number == 1 else "aligned" if number % 16 == 0 else "any"


def key(tokens: int, factor: int, ends: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """The specialisation of a kernel that selects by powers of two, and by `ends`."""
    bucket = (tokens - 1).bit_length(), sum(end < tokens for end in ends)
    return *bucket, kind(tokens), kind(tokens * factor)


@pytest.mark.parametrize("factor", [1, 3, 8, 16])
@pytest.mark.parametrize(("largest", "ends"), [(8192, ()), (3000, (40, 1000)), (1, ()), (23, (5,))])
def test_every_kind_of_number_in_every_bucket(
    largest: int, ends: tuple[int, ...], factor: int
) -> None:
    counts = warm_counts(largest, ceilings=(*ends, 10**6))
    assert {key(n, factor, ends) for n in range(1, largest + 1)} == {
        key(n, factor, ends) for n in counts
    }
    assert counts == sorted(set(counts)) and counts[-1] == largest


def test_counts_are_few_and_hold_what_graphs_are_captured_of() -> None:
    assert len(warm_counts(16384)) < 90
    counts = warm_counts(300, sizes=(1, 2, 24, 200, 304, 512))
    assert {1, 2, 24, 200} <= set(counts) and max(counts) == 300
    assert counts[: len(warm_counts(300))] == warm_counts(300)  # counts with new kinds are first


class Compiling:
    """A kernel that is compiled for each new key, and records it."""

    def __init__(self, raises_at: int = 0) -> None:
        self.keys: set[tuple[Any, ...]] = set()
        self.counts: set[int] = set()
        self.raises_at = raises_at

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim == 2 and x.shape[-1] == 24:  # the width of the served model
            self.keys.add(key(len(x), x.shape[-1] // 2))
            self.counts.add(len(x))
            if len(x) == self.raises_at:
                raise RuntimeError("out of shared memory")
        return silu_and_mul(x)

    def start(self, warm: bool, **options: Any) -> Findings:
        role = Role(acme(KEY[0], self), warm=warm_counts(LARGEST) if warm else ())
        given = {"seed": 1, "calls": 0, **options}
        return find_faults(Request([role], torch.bfloat16, CPU, SIZES, **given))

    def compiles_later(self) -> bool:
        """Whether a server's batches need compiling."""
        batches = (17, 100, 1000, *random.Random(3).choices(range(1, LARGEST + 1), k=500))
        return not {key(n, 12) for n in batches} <= self.keys


@pytest.fixture(autouse=True)
def calls_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WARM_CALLS", 1e9)


@pytest.mark.parametrize("compares", [True, False], ids=["verify", "run"])
def test_a_start_leaves_nothing_to_compile_of_what_serves(compares: bool) -> None:
    kernel = Compiling()
    found = kernel.start(warm=True, compares=compares)
    assert not found.objections and not any("warmed" in remark for remark in found.remarks)
    assert not kernel.compiles_later()


def test_what_was_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WARM_CALLS", 0)
    kernel = Compiling()
    (said,) = (each for each in kernel.start(warm=True).remarks if "warmed" in each)
    least = int(said.removesuffix(" tokens on").rpartition(" ")[2])
    assert said.startswith("not warmed up at some sizes: silu_and_mul of vendor.acme from ")
    assert least in warm_counts(LARGEST) and least not in kernel.counts


def test_what_raises_at_a_size_of_the_warm_up_is_a_fault() -> None:
    tokens = warm_counts(LARGEST)[-2]
    found = Compiling(raises_at=tokens).start(warm=True).objections
    assert found[KEY].reason == (
        f"it raised RuntimeError: out of shared memory ({tokens} x 2*12, bfloat16)"
    )
    assert not Compiling(raises_at=tokens).start(warm=False).objections


@pytest.mark.parametrize("wrong", [range(200, 201), range(1280, 1536), range(601, 768)])
def test_what_is_wrong_at_sizes_of_the_warm_up_is_a_fault(wrong: range) -> None:
    """A captured graph runs only its own size, for any batch."""

    def fn(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + (len(x) in wrong))

    role = Role(acme(KEY[0], fn), warm=warm_counts(2048, [200]))
    found = find_faults(Request([role], torch.bfloat16, CPU, SIZES, seed=5, calls=0)).objections
    assert "elements exceed the tolerance" in found[KEY].reason
