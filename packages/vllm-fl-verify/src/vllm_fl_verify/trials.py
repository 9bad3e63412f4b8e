"""Inputs of verification: calls of the served model in batches of many sizes.

A `Request` defines the verification for one model. It creates the `Trials` of each op: samples of
the contract, and a `Form` for each kind of call of the model.
"""

from __future__ import annotations

import ctypes
import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from vllm_fl.contracts import ModelSizes, OpSpec, Sample
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl

from . import launches
from .batches import FIXED_COUNTS, POOL, Order
from .batches import rows as drawn_rows
from .budget import Budget, Valve
from .expected import Expected
from .form import Form
from .guarded import Guarded, guarded
from .oracle import wanted_of
from .verification import LayerFactory, dtype_name, tried
from .warmup import warm_counts

CALLS = 400.0
"""Calls at further token counts. All implementations of a request share them equally."""

KEPT_POOL = 17
"""Distinct rows in batches for implementations that were verified before."""

Launches = Callable[[Callable[[], object], torch.device], launches.Launched]

ProvidedDtypes = Sequence[Mapping[str, torch.dtype]]
"""The dtypes of the parameters that layers provide. Each combination is listed once."""


@dataclass(frozen=True)
class Role:
    """One implementation, and how the engine will use it.

    Args:
        owner: the package that provides it, for the note that remains if a kernel crashes the
            process.
        compiled: the form for the compiler, with the contract's parameters. None if the model is
            not compiled with it.
        warm: token counts to run before the engine serves, the most important first.
        captured: token count that vLLM will capture in a graph; 0 for none.
        least, most: minimum and maximum tokens of its calls. An order by size may restrict them.
        kept: whether it passed the full verification of an earlier startup with the same key.
    """

    impl: OpImpl
    owner: str = ""
    compiled: Callable[..., Any] | None = None
    warm: Sequence[int] = ()
    captured: int = 0
    least: int = 1
    most: float = math.inf
    kept: bool = False

    @property
    def name(self) -> str:
        """Its name in a verdict. Each implementation is verified once with a name."""
        uses = {"compiled": self.compiled, "warm": self.warm, "captured": self.captured}
        used = (name for name, use in uses.items() if use)
        return ", ".join(["=".join(self.key), f"{self.least}-{self.most}", *used])

    @property
    def key(self) -> tuple[str, str]:
        return self.impl.op_name, self.impl.impl_id

    @property
    def calls(self) -> tuple[str, int, float]:
        return self.impl.op_name, self.least, self.most

    def running(self, what: str) -> AbstractContextManager[None]:
        """Note for the next process that the block runs the implementation's code for `what`."""
        of_owner = self.owner and f" of {self.owner}"
        noted = f"{what} of {self.impl.op_name}={self.impl.impl_id}{of_owner}"
        return breadcrumb.noting(noted, named=False)


@dataclass(frozen=True)
class Request:
    """Verification of implementations for one model.

    Args:
        compares: whether results are compared with the oracle. If not, calls only have to run.
        backend: the compiler of compiled forms: `inductor`, or `aot_eager`, which only traces.
        layer_for: creates the layer for an implementation that needs a layer; None for the
            contract's stand-in.
        seed: for random choices. It is logged.
        specs: op -> contract. By default from distributions that provide only contracts.
        calls: calls at further token counts, for all implementations together.
        provided: op -> dtypes of the values that layers provide (`EngineFacts.provided`).
        launched: returns the kernels of a call. By default `launches.launched`, which supports only
            Triton.
        requires: the setting that allows only batch-invariant implementations, for messages; or
            empty.
        valve: limits the seconds of the whole startup.
        keeper: keeps the call of an objection; `Record.keeper` of the plan.
    """

    roles: Sequence[Role]
    dtype: torch.dtype
    device: torch.device
    sizes: ModelSizes | None
    compares: bool = True
    backend: str = "inductor"
    layer_for: LayerFactory | None = None
    seed: int = field(default_factory=lambda: random.SystemRandom().randrange(1 << 32))
    specs: Mapping[str, OpSpec] = field(default_factory=lambda: known_contracts().contracts)
    calls: float = field(default_factory=lambda: CALLS)
    provided: Mapping[str, ProvidedDtypes] = field(default_factory=dict)
    launched: Launches = launches.launched
    requires: str = ""
    valve: Valve = field(default_factory=Valve)
    keeper: Any = None

    def share(self) -> Budget:
        return Budget(self.calls / max(1, len(self.roles)), self.valve)

    @contextmanager
    def trials(self) -> Iterator[dict[tuple[str, int, float], list[Trials]]]:
        """Provide `Role.calls` -> trials in each dtype of the op, inside the block. Their memory
        and compiled code are released afterwards."""
        made = {}
        for op, least, most in dict.fromkeys(role.calls for role in self.roles):
            sizes = self.sizes and _within(least, most, self.sizes)
            fixed, given = (self.device, sizes, self.seed), self.provided.get(op, ())
            kinds = dtypes_of(self.specs[op], self.dtype)
            all_kept = all(r.kept for r in self.roles if r.calls == (op, least, most))
            of_op = *fixed, given, KEPT_POOL if all_kept else POOL
            made[op, least, most] = [Trials(self.specs[op], kind, *of_op) for kind in kinds]
        yield made
        if any(role.compiled and not role.kept for role in self.roles):
            torch._dynamo.reset()  # vLLM compiles the model later, in a clean state
        made.clear()
        release(self.device)


def _within(least: int, most: float, sizes: ModelSizes) -> ModelSizes:
    counts = {int(max(least, min(n, most))) for n in sizes.tokens}
    return replace(sizes, tokens=tuple(sorted(counts)))


def lowered(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile the function with this backend, with one graph for all token counts."""
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, dynamic=True, backend=backend)


def dtypes_of(spec: OpSpec, dtype: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes for verifying an op in a model of `dtype`: that dtype, or all dtypes of an
    op with only integers. The result is empty if the op has only other floating dtypes, because the
    contract does not cover the model's calls."""
    if dtype_name(dtype) in spec.dtypes:
        return [dtype]
    known = [getattr(torch, name) for name in spec.dtypes]
    return [] if any(kind.is_floating_point for kind in known) else known


def token_counts(largest: int, seed: int, smallest: int = 1) -> tuple[list[int], list[int]]:
    """Return (token counts that are always tried, further ones to try within the budget). Counts
    that are always tried are also tried with one row less. The further ones are the counts around
    each power of two, followed in random order by small counts and five counts per interval of
    powers of two."""
    rng = random.Random(seed)
    always = {1, 2, 3, 4, 8, 12, 16, 17, 32, 33, 64, 65, 100, 256, 257, smallest, largest}
    always.add(rng.randint(smallest, largest))
    # Include counts with a few rows after whole tiles: 8, 16 or 32.
    edges = [
        (1 << n) + d
        for n in range(6, largest.bit_length() + 1)
        for d in (8 << (n + seed) % 3, 1, 0, -1)
    ]
    others = sorted({*range(1, 65), *warm_counts(largest, seed=seed)}.difference(edges))
    rng.shuffle(others)
    known = range(smallest, largest + 1)
    further = [n for n in (*edges, *others) if n in known and not {n, n + 1} & always]
    return sorted(n for n in always if n in known), further


@dataclass
class Trials:
    """Calls for the implementations of one op with the same range of sizes.

    The oracle computes their results once.

    Args:
        sizes: the model's sizes; None if they cannot be determined from its configuration.
        provided: dtypes of the values that layers provide; empty for the contract's dtypes.
        pool: number of distinct rows in batches.
    """

    spec: OpSpec
    dtype: torch.dtype
    device: torch.device
    sizes: ModelSizes | None
    seed: int
    provided: ProvidedDtypes = ()
    pool: int = POOL

    @cached_property
    def samples(self) -> list[Sample]:
        return [*tried(self.spec, self.dtype, self.device), *self.fixed_samples]

    @cached_property
    def fixed_samples(self) -> list[Sample]:
        if self.sizes is None or not self.spec.fixed_batch:
            return []
        counts = self.among(FIXED_COUNTS)
        return [*self._served(counts, False), *self._served(counts[-1:], True)]

    def _served(self, counts: Iterable[int], large: bool) -> Iterable[Sample]:
        assert self.sizes is not None
        sizes = replace(self.sizes, tokens=(*counts,))
        return self.spec.served(sizes, self.dtype, self.device, large)

    def shared(self) -> dict[int, Guarded]:
        """Return index of a fixed batch -> memory. Batches of equal shapes share memory, so even
        weights are overwritten, as in a weight update."""
        found: dict[Any, Guarded] = {}
        memories = {}
        for index in range(len(self.samples) - len(self.fixed_samples), len(self.samples)):
            args = self.samples[index].args
            shapes = tuple(
                (arg.shape, arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args
            )
            if shapes not in found:
                found[shapes] = guarded(self.spec.named(args), self.spec.by_token)
            memories[index] = found[shapes]
        return memories

    @cached_property
    def wanted(self) -> list[Expected]:
        return [wanted_of(self.spec, sample) for sample in self.samples]

    @cached_property
    def forms(self) -> list[Form]:
        if self.sizes is None or self.spec.fixed_batch:
            return []
        pool = (min(self.pool, self.largest),)
        ordinary = [*self._served(pool, False)]
        # Implementations that were verified before are not called with large values.
        large = ordinary if self.pool == KEPT_POOL else self._served(pool, True)
        pairs = [*zip(ordinary, large, strict=True)]
        passed: dict[tuple[int, str], list[Sample]] = {}
        for dtypes in self.provided:
            for number, pair in enumerate(pairs):
                given = [as_provided(self.spec, sample, dtypes) for sample in pair]
                # A layer's dtypes may be invalid for the op. Two layers may make equal calls.
                if self.spec.check(*given[0].args) is None:
                    passed.setdefault((number, given[0].name), given)
        return [Form(self.spec, *pair) for pair in (passed.values() or pairs)]

    def drawn_counts(self, largest: float = math.inf, number: int = 3) -> list[int]:
        """Return token counts of different magnitudes, drawn without the seed."""
        rng, least = random.SystemRandom(), self.smallest
        ends = math.log(least), math.log(max(least, min(self.largest, largest)) + 1)
        drawn = (math.exp(rng.uniform(*ends)) for _ in range(number))
        return [max(least, min(int(n), self.largest)) for n in drawn]

    def drawn_samples(self) -> list[Sample]:
        """Return calls with fixed batches, with sizes that are drawn. If the model's sizes are
        unknown, some samples of the contract."""
        served: list[Sample] = []
        if self.sizes is not None:
            for count in self.drawn_counts(FIXED_COUNTS[-1]):
                served += self._served((count,), False)
        if served:
            return served
        known = [s for s in self.spec.samples(self.dtype, self.device) if self.spec.tokens(s.args)]
        return random.SystemRandom().sample(known, min(3, len(known)))

    @cached_property
    def promises_nan(self) -> bool:
        named = (
            each
            for each in self.samples
            for x in self.spec.with_rows(each.args).values()
            if x.is_floating_point() and x.itemsize > 1 and bool(x.isnan().any())
        )
        return {bool(sample.open_rows) for sample in named} == {False}

    @property
    def calls(self) -> list[Sample]:
        return [*(form.samples[0] for form in self.forms), *self.fixed_samples]

    @property
    def smallest(self) -> int:
        return self.sizes.tokens[0] if self.sizes else 1

    @property
    def largest(self) -> int:
        return self.sizes.tokens[-1] if self.sizes else 1

    @property
    def few(self) -> int:
        """7 tokens, or the nearest possible number."""
        return min(max(7, self.smallest), self.largest)

    def among(self, counts: Iterable[int]) -> list[int]:
        """Return the possible token counts among these. If there are none, the smallest batch."""
        return [n for n in counts if self.smallest <= n <= self.largest] or [self.smallest]

    def rows(self, count: int, salt: int = 0, order: Order = "drawn") -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed(self.seed + 2 * count + salt)
        pool = min(self.pool, self.largest)
        return drawn_rows(count, pool, generator, order).to(self.device)


def as_provided(spec: OpSpec, sample: Sample, dtypes: Mapping[str, torch.dtype]) -> Sample:
    others = {
        name: dtypes[name]
        for name, arg in spec.named(sample.args).items()
        if isinstance(arg, torch.Tensor) and dtypes.get(name, arg.dtype) != arg.dtype
    }

    def changed(args: Sequence[Any]) -> tuple[Any, ...]:
        given = spec.named(args).items()
        return tuple(arg.to(others[name]) if name in others else arg for name, arg in given)

    suffix = "".join(f", {name} {dtype_name(dtype)}" for name, dtype in others.items())
    repeats = sample.repeats and (changed(sample.repeats[0]), sample.repeats[1])
    return replace(sample, name=sample.name + suffix, args=changed(sample.args), repeats=repeats)


@contextmanager
def without_old_objects() -> Iterator[None]:
    """Limit the garbage collector to new objects inside the block. Each graph capture, and the end
    of each verification, calls the collector. A process that has imported vLLM has a million
    objects. If the process is forked, the collector copies their memory.

    vLLM freezes its objects when an engine is ready. They remain frozen."""
    if freezes := not gc.get_freeze_count():
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


def release(device: torch.device) -> None:
    """Release memory, because vLLM sizes its KV cache by the memory that is free afterwards."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
        return
    # On a CPU the process's memory counts, and glibc keeps freed memory.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
