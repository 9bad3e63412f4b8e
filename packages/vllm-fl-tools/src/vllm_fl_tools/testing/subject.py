"""What is tested: one implementation on one device, and fresh inputs for it."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import methodcaller
from typing import Any

import torch

from vllm_fl.contracts import BadInput, ExpertBlocks, ModelSizes, OpSpec, Sample
from vllm_fl.contracts.binding import Binding, Contract
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.manager import OpManager
from vllm_fl.plugins.forms import verdict_of
from vllm_fl.plugins.registry import SCRIPT, OpRegistry, known_contracts
from vllm_fl.plugins.snapshot import EMPTY, RegistrySnapshot
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.policy import SelectionPolicy
from vllm_fl_ops.contracts.rules import typical_sizes
from vllm_fl_verify.layouts import relaid
from vllm_fl_verify.oracle import parts
from vllm_fl_verify.verification import as_call
from vllm_fl_verify.wanted import ascending

from .mistakes import bad_inputs

__all__ = [
    "HIDDEN",
    "SIZES",
    "Refused",
    "Subject",
    "digest",
    "expect",
    "fresh",
    "pattern",
]

HIDDEN = methodcaller("errisinstance", AssertionError)
"""Of which errors pytest shows no frames of a module or function that has this as
`__tracebackhide__`: of findings, whose message is all that a backend's author needs."""

__tracebackhide__ = HIDDEN

SIZES = dataclasses.replace(typical_sizes(), tokens=(1, 7, 300))
"""The largest batch is beyond one block of rows of any usual kernel."""


class Refused(Exception):
    """The implementation refused a call, with a reason: neither a pass nor a failure."""


def expect(holds: object, why: str) -> None:
    """Fail the check unless this holds. An `assert` would be nothing under `python -O`.

    Raises:
        AssertionError: it does not; with why that is a fault.
    """
    if not holds:
        raise AssertionError(why)


@dataclass(frozen=True)
class Subject:
    """One implementation under test.

    Args:
        impl: the implementation; it takes the contract's parameters, or a layer first and then
            those that the layer does not provide.
        device: where the inputs lie.
        sizes: the served model's sizes. Those that a plugin's binding asks beyond them are the
            binding's typical ones, unless they are given.
        left_out: (op, dtype, sample) that are known to be wrong: only `values` looks at them.
        deadline: seconds that a child process may take.
    """

    impl: OpImpl
    device: torch.device
    sizes: ModelSizes = SIZES
    left_out: frozenset[tuple[str, str, str]] = frozenset()
    deadline: float = 120.0

    @property
    def spec(self) -> OpSpec:
        """The contract."""
        return contract_of(self.impl.op_name)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the contract's inputs may be, by name."""
        return self.spec.dtypes

    def all_samples(self, dtype: str) -> tuple[Sample, ...]:
        """The contract's samples, some of them laid out otherwise, and the served model's.

        Shared: copy before use.
        """
        op = self.spec.name
        own = _samples(op, None, dtype, self.device)
        others = _relaid(op, dtype, self.device)
        return own + others + _samples(op, self.all_sizes, dtype, self.device)

    def sample(self, dtype: str, name: str) -> Sample:
        """A fresh copy of one sample, with its layout: views of one buffer stay that."""
        return fresh(next(s for s in self.all_samples(dtype) if s.name == name))

    def samples(self, dtype: str) -> Iterator[Sample]:
        """Fresh copies of the contract's own samples, without those that are left out."""
        for sample in _samples(self.spec.name, None, dtype, self.device):
            if (self.spec.name, dtype, sample.name) not in self.left_out:
                yield fresh(sample)

    def patterns(self, dtype: str) -> Iterator[Sample]:
        """Fresh copies of samples: the first of each pattern of None, flags and dimensions."""
        seen = set()
        for sample in self.samples(dtype):
            found = pattern(sample)
            if found not in seen and sample.args[0].numel() and self.accepts(sample):
                seen.add(found)
                yield sample

    def served(self, dtype: str, tokens: int) -> tuple[Sample, ...]:
        """The served model's calls with this many tokens."""
        sizes = dataclasses.replace(self.all_sizes, tokens=(tokens,))
        return tuple(self.spec.served(sizes, getattr(torch, dtype), self.device))

    @property
    def all_sizes(self) -> ModelSizes:
        """The served model's sizes, with those that the op's own binding asks."""
        binding = _installed(self.impl.op_name).bindings[self.impl.op_name]
        rules = tuple(rule for rule in binding.sizes if rule.in_kit)
        own = typical_sizes([dataclasses.replace(binding, sizes=rules)]).more
        return dataclasses.replace(self.sizes, more={**own, **self.sizes.more})

    def bad_inputs(self, dtype: str) -> tuple[BadInput, ...]:
        """The calls that break the contract."""
        return tuple(bad_inputs(self.spec, getattr(torch, dtype), self.device))

    def accepts(self, sample: Sample) -> bool:
        """Whether the implementation does not refuse `sample`."""
        each = fresh(sample)
        if verdict_of(self.impl, self.spec, each.args) is not True:
            return False
        try:
            self.call(each)
        except NotImplementedError:
            return False
        return True

    def call(self, sample: Sample) -> Any:
        """What the implementation gives for `sample`, whose tensors are used up.

        One that takes a layer first is given one of the contract's.
        """
        return as_call(self.impl, self.spec)(*sample.args)

    def bits(self, sample: Sample) -> str:
        """A hash of the result for `sample`, whose tensors are used up: of what is promised of it.

        What the contract leaves free, the order of an expert's rows, counts as one order.
        """
        args = fresh(sample).args  # an implementation may overwrite its own
        return digest(_promised(self.spec, self.call(sample), args))

    def needs_no_layer(self) -> None:
        """Raise Refused for an implementation that takes a layer first."""
        if self.impl.needs_layer:
            raise Refused("it takes a layer first: call_op and compiled mode leave it out")

    def manager(self) -> OpManager:
        """A manager that has this implementation and no other."""
        return OpManager(self.registry(), SelectionPolicy())

    def registry(self) -> OpRegistry:
        """A registry that has this implementation and its contract.

        Raises:
            PluginError: it does not take the implementation.
        """
        registry = OpRegistry(EMPTY)
        registry.add_contract(Contract(self.spec), Binding(), SCRIPT)
        registry.register_impl(self.impl)
        return registry


def contract_of(op: str) -> OpSpec:
    """The contract of an op.

    Raises:
        KeyError: there is none.
    """
    return _installed(op).contracts[op]


def _installed(op: str) -> RegistrySnapshot:
    """Where the contract of `op` is: in a distribution of contracts alone, or among plugins."""
    known = known_contracts()
    return known if op in known.contracts else get_default_manager().registry.snapshot()


def fresh(sample: Sample) -> Sample:
    """A copy whose tensors share memory among themselves as the sample's do, and with no others."""
    return dataclasses.replace(sample, args=copy.deepcopy(sample.args))


def pattern(sample: Sample) -> tuple[object, ...]:
    """What a program may branch on: dimensions, dtypes, None and flags; no sizes, no numbers."""
    return tuple(
        (arg.ndim, arg.dtype)
        if isinstance(arg, torch.Tensor)
        else arg
        if arg is None or isinstance(arg, str | bool)
        else type(arg)
        for arg in sample.args
    )


def digest(result: Any) -> str:
    """A hash of a result's bits."""
    hashed = hashlib.sha256()
    for part in parts(result):
        if not isinstance(part, torch.Tensor):
            hashed.update(repr(part).encode())
            continue
        host = part.detach().cpu().contiguous()
        hashed.update(f"{host.dtype} {tuple(host.shape)}".encode())
        hashed.update(ctypes.string_at(host.data_ptr(), host.nbytes))
    return hashed.hexdigest()


@cache
def _samples(
    op: str, sizes: ModelSizes | None, dtype: str, device: torch.device
) -> tuple[Sample, ...]:
    """A contract's own samples, or those of a served model."""
    spec, kind = contract_of(op), getattr(torch, dtype)
    return tuple(spec.samples(kind, device) if sizes is None else spec.served(sizes, kind, device))


@cache
def _relaid(op: str, dtype: str, device: torch.device) -> tuple[Sample, ...]:
    """A contract's own samples, laid out otherwise."""
    return tuple(relaid(contract_of(op), _samples(op, None, dtype, device)))


def _promised(spec: OpSpec, got: Any, args: Sequence[Any]) -> Any:
    """The results of a call in the one form that all have which are the same to the contract.

    Args:
        spec: the contract.
        got: the results, as its fake shapes them.
        args: the call's.
    """
    results, at = list(parts(got)), 0
    for output in spec.outputs_of(len(results)):
        if isinstance(output, ExpertBlocks):
            size, padding = output.block_size(*args), output.padding(*args)
            rows, experts, used = results[at : at + output.results]
            places = min(max(int(used), 0), len(rows)) // size * size
            rows, experts = rows.clone(), experts.clone()
            rows[:places] = ascending(rows[:places], experts[: places // size], size)
            rows[places:], experts[places // size :] = padding, -1
            results[at : at + output.results] = rows, experts, used
        at += output.results
    return tuple(results) if isinstance(got, tuple) else results[0]
