"""What implementations are verified with: calls of the served model, in batches of many sizes.

A `Request` says what is verified and for which model. It makes the `Trials` of each op: the
contract's own samples, and a `Form` for each kind of call that the model makes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from vllm_fl.contracts import ModelSizes, OpSpec, Sample
from vllm_fl.plugins import breadcrumb
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl

from . import launches
from .batches import POOL, STANDING_COUNTS, Order
from .batches import rows as drawn_rows
from .budget import Budget, Valve
from .form import Form
from .guarded import Guarded, guarded
from .oracle import wanted_of
from .verification import LayerFactory, dtype_name, tried
from .wanted import Wanted
from .warmup import warm_counts

CALLS = 400.0
"""How many calls all implementations of a request may have beyond the token counts that are always
tried; each has an equal share."""

Launches = Callable[[Callable[[], object], torch.device], launches.Launched]

Provided = Sequence[Mapping[str, torch.dtype]]
"""The dtypes of what layers provide, by parameter: each set of them once."""


@dataclass(frozen=True)
class Role:
    """One implementation, and how it will serve.

    Args:
        impl: the implementation.
        owner: who brought it, for the note that is left by a process which a kernel ends.
        compiled: the implementation as it is handed to the compiler, a function of the contract's
            parameters; None where the model will not be compiled with it.
        warm: the token counts at which it must have run once before it serves, in the order of
            their weight.
        captured: the token count at which vLLM will capture it in a graph; 0 for none.
        least, most: the fewest and the most tokens of a call that it may serve: where the op is
            ordered by size, those of its rows.
    """

    impl: OpImpl
    owner: str = ""
    compiled: Callable[..., Any] | None = None
    warm: Sequence[int] = ()
    captured: int = 0
    least: int = 1
    most: float = math.inf

    @property
    def key(self) -> tuple[str, str]:
        """(op, impl id)."""
        return self.impl.op_name, self.impl.impl_id

    @property
    def calls(self) -> tuple[str, int, float]:
        """Of which op, and of how many tokens, the calls are that it may serve."""
        return self.impl.op_name, self.least, self.most

    def running(self, what: str) -> AbstractContextManager[None]:
        """The block runs its code for `what`, which is noted for the next process."""
        whose = self.owner and f" of {self.owner}"
        noted = f"{what} of {self.impl.op_name}={self.impl.impl_id}{whose}"
        return breadcrumb.running(noted, named=False)


@dataclass(frozen=True)
class Request:
    """What is verified, and for which model.

    Args:
        roles: every implementation that may take over a call.
        dtype: the model's dtype.
        device: the worker's device.
        sizes: the model's sizes; None where its configuration does not tell them.
        compares: whether results are compared with the oracle; otherwise they must only run.
        backend: what lowers compiled forms: `inductor`, or `aot_eager`, which traces only.
        layer_for: who makes the layer for an implementation that needs one; None takes the
            contract's stand-in.
        seed: for what is drawn; it is logged.
        specs: the contracts by op; by default those of the distributions that bring contracts and
            nothing else.
        calls: how many calls with further token counts are made, for all implementations together.
        provided: op -> the dtypes of what the model's layers provide (`EngineFacts.provided`).
        launched: what a call launches on a device, as `launches.launched`, which knows Triton's
            kernels alone.
        requires: the setting that allows only batch-invariant implementations, for messages; empty
            if there is none.
        valve: the limit in seconds of the whole startup.
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
    provided: Mapping[str, Provided] = field(default_factory=dict)
    launched: Launches = launches.launched
    requires: str = ""
    valve: Valve = field(default_factory=Valve)

    def share(self) -> Budget:
        """The calls of one implementation with further token counts."""
        return Budget(self.calls / max(1, len(self.roles)), self.valve)

    @contextmanager
    def trials(self) -> Iterator[dict[tuple[str, int, float], list[Trials]]]:
        """Inside the block, `Role.calls` -> what is tried with them, in each dtype of the op.

        Nothing of them is left afterwards, nor of what was compiled.
        """
        made = {}
        for op, least, most in dict.fromkeys(role.calls for role in self.roles):
            sizes = self.sizes and _within(least, most, self.sizes)
            fixed, given = (self.device, sizes, self.seed), self.provided.get(op, ())
            kinds = dtypes_of(self.specs[op], self.dtype)
            made[op, least, most] = [Trials(self.specs[op], kind, *fixed, given) for kind in kinds]
        yield made
        if any(role.compiled for role in self.roles):
            torch._dynamo.reset()  # vLLM compiles the model afterwards, and finds nothing of this
        made.clear()
        release(self.device)


def _within(least: int, most: float, sizes: ModelSizes) -> ModelSizes:
    """The sizes with batches of so many tokens."""
    counts = {int(max(least, min(n, most))) for n in sizes.tokens}
    return dataclasses.replace(sizes, tokens=tuple(sorted(counts)))


def lowered(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """The function as this backend compiles it: one graph for every number of tokens."""
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, dynamic=True, backend=backend)


def dtypes_of(spec: OpSpec, dtype: torch.dtype) -> list[torch.dtype]:
    """In which an op is run for a model of `dtype`: that, or every one of an op of integers alone.

    None where the op has other floating dtypes only: the model's calls are none of its contract.
    """
    if dtype_name(dtype) in spec.dtypes:
        return [dtype]
    known = [getattr(torch, name) for name in spec.dtypes]
    return [] if any(kind.is_floating_point for kind in known) else known


def token_counts(largest: int, seed: int, smallest: int = 1) -> tuple[list[int], list[int]]:
    """(counts that are always tried, further ones that are tried while calls are left).

    Those that are always tried are tried with one row less, too. The further ones are those around
    each power of two, then, in drawn order, the small ones and five between two powers of two.

    Args:
        largest: the largest batch, in tokens.
        seed: for those that are drawn anew.
        smallest: the smallest batch, in tokens.
    """
    rng = random.Random(seed)
    always = {1, 2, 3, 4, 8, 12, 16, 17, 32, 33, 64, 65, 100, 256, 257, smallest, largest}
    always.add(rng.randint(smallest, largest))
    # Behind whole tiles, too, a few rows are left in turn: 8, 16 or 32.
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
    """What the implementations of one op are tried with that serve the same sizes. The oracle is
    asked once.

    Args:
        spec: the op's contract.
        dtype: the model's.
        device: where it runs.
        sizes: the model's; None where its configuration does not tell them.
        seed: for what is drawn.
        provided: the dtypes of what the model's layers provide; none where nothing is known of
            them: then all is of the contract's own choice.
    """

    spec: OpSpec
    dtype: torch.dtype
    device: torch.device
    sizes: ModelSizes | None
    seed: int
    provided: Provided = ()

    @cached_property
    def samples(self) -> list[Sample]:
        """The contract's own samples, some of them laid out otherwise, and the served model's
        calls that stand."""
        return [*tried(self.spec, self.dtype, self.device), *self.standing]

    @cached_property
    def standing(self) -> list[Sample]:
        """The served model's calls of a contract whose batches cannot be rearranged."""
        if self.sizes is None or not self.spec.stands:
            return []
        counts = self.among(STANDING_COUNTS)
        usual, last = (dataclasses.replace(self.sizes, tokens=(*n,)) for n in (counts, counts[-1:]))
        return [
            *self.spec.served(usual, self.dtype, self.device, False),
            *self.spec.served(last, self.dtype, self.device, True),
        ]

    def shared(self) -> dict[int, Guarded]:
        """Index of a standing call -> memory, one for all of equal shapes: what is written anew
        there are weights, too, as after an update."""
        found: dict[Any, Guarded] = {}
        memories = {}
        for index in range(len(self.samples) - len(self.standing), len(self.samples)):
            args = self.samples[index].args
            shapes = tuple(
                (arg.shape, arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args
            )
            if shapes not in found:
                found[shapes] = guarded(self.spec.named(args), self.spec.by_token)
            memories[index] = found[shapes]
        return memories

    @cached_property
    def wanted(self) -> list[list[Wanted | None]]:
        """What each of the samples must give."""
        return [wanted_of(self.spec, sample) for sample in self.samples]

    @cached_property
    def forms(self) -> list[Form]:
        """The calls of the served model."""
        if self.sizes is None or self.spec.stands:
            return []
        pool = dataclasses.replace(self.sizes, tokens=(min(POOL, self.largest),))
        kinds = (self.spec.served(pool, self.dtype, self.device, big) for big in (False, True))
        pairs = [*zip(*kinds, strict=True)]
        passed: dict[tuple[int, str], list[Sample]] = {}
        for dtypes in self.provided:
            for number, pair in enumerate(pairs):
                given = [as_provided(self.spec, sample, dtypes) for sample in pair]
                # A layer may pass what is no call of the op; two may make the same calls.
                if self.spec.check(*given[0].args) is None:
                    passed.setdefault((number, given[0].name), given)
        return [Form(self.spec, *pair) for pair in (passed.values() or pairs)]

    @cached_property
    def promises_nan(self) -> bool:
        """Whether the contract says what a row with NaN gives."""
        named = (
            each
            for each in self.samples
            for x in self.spec.with_rows(each.args).values()
            if x.is_floating_point() and x.itemsize > 1 and bool(x.isnan().any())
        )
        return {bool(sample.open_rows) for sample in named} == {False}

    @property
    def calls(self) -> list[Sample]:
        """The served model's calls, one of each form."""
        return [*(form.samples[0] for form in self.forms), *self.standing]

    @property
    def smallest(self) -> int:
        """The smallest batch, in tokens."""
        return self.sizes.tokens[0] if self.sizes else 1

    @property
    def largest(self) -> int:
        """The largest batch, in tokens."""
        return self.sizes.tokens[-1] if self.sizes else 1

    @property
    def few(self) -> int:
        """A batch of a few tokens, where there is one."""
        return min(max(7, self.smallest), self.largest)

    def among(self, counts: Iterable[int]) -> list[int]:
        """Those of the token counts that batches have; the smallest batch where there is none."""
        return [n for n in counts if self.smallest <= n <= self.largest] or [self.smallest]

    def rows(self, count: int, salt: int = 0, order: Order = "drawn") -> torch.Tensor:
        """The rows of the pool that make a batch of `count` tokens, in this order, drawn for it."""
        generator = torch.Generator("cpu").manual_seed(self.seed + 2 * count + salt)
        pool = min(POOL, self.largest)
        return drawn_rows(count, pool, generator, order).to(self.device)


def as_provided(spec: OpSpec, sample: Sample, dtypes: Mapping[str, torch.dtype]) -> Sample:
    """A call with what layers provide in the dtypes that theirs has."""
    others = {
        name: dtypes[name]
        for name, arg in spec.named(sample.args).items()
        if isinstance(arg, torch.Tensor) and dtypes.get(name, arg.dtype) != arg.dtype
    }

    def changed(args: Sequence[Any]) -> tuple[Any, ...]:
        given = spec.named(args).items()
        return tuple(arg.to(others[name]) if name in others else arg for name, arg in given)

    told = "".join(f", {name} {dtype_name(dtype)}" for name, dtype in others.items())
    repeats = sample.repeats and (changed(sample.repeats[0]), sample.repeats[1])
    return dataclasses.replace(
        sample, name=sample.name + told, args=changed(sample.args), repeats=repeats
    )


@contextmanager
def without_old_objects() -> Iterator[None]:
    """In the block the collector of garbage looks at new objects alone.

    Each capture of a graph and each end of a verification calls it. A process that has imported
    vLLM has a million objects, and one that was forked copies the memory in which they lie.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release(device: torch.device) -> None:
    """Leave nothing allocated: vLLM sizes its KV cache by what is free afterwards."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
        return
    # Of the CPU's memory it is what the process holds, and glibc keeps what is given back.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
