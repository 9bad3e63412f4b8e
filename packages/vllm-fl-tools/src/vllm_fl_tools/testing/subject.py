"""The subject of the checks: one implementation on one device, with its inputs."""

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
from vllm_fl.plugins.registry import SCRIPT, OpRegistry, known_contracts
from vllm_fl.plugins.signatures import verdict_of
from vllm_fl.plugins.snapshot import EMPTY, RegistrySnapshot
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.policy import SelectionPolicy
from vllm_fl_ops.contracts.rules import typical_sizes
from vllm_fl_verify.expected import ascending
from vllm_fl_verify.layouts import relaid
from vllm_fl_verify.oracle import parts
from vllm_fl_verify.verification import as_call

from .mistakes import mistaken_calls

HIDE_FRAMES = methodcaller("errisinstance", AssertionError)
"""Value of `__tracebackhide__`: pytest hides a function's frames of AssertionErrors. The message is
sufficient for a backend's author."""

__tracebackhide__ = HIDE_FRAMES

SIZES = dataclasses.replace(typical_sizes(), tokens=(1, 7, 300))
"""Default sizes. The largest batch exceeds one block of rows of all usual kernels."""


class Refused(Exception):
    """An unsupported call, with a reason: neither a pass nor a failure."""


def expect(holds: object, why: str) -> None:
    """Raise AssertionError with `why` unless this is true. `python -O` would skip an `assert`."""
    if not holds:
        raise AssertionError(why)


@dataclass(frozen=True)
class Subject:
    """One implementation under test.

    Args:
        impl: called with the contract's parameters, or with a layer and the other parameters.
        device: of the inputs.
        sizes: of the model. A plugin's binding provides typical values for missing sizes.
        left_out: (op, dtype, sample) with known deviations: only `values` uses them.
        deadline: time limit of a child process, in seconds.
    """

    impl: OpImpl
    device: torch.device
    sizes: ModelSizes = SIZES
    left_out: frozenset[tuple[str, str, str]] = frozenset()
    deadline: float = 120.0

    @property
    def spec(self) -> OpSpec:
        return contract_of(self.impl.op_name)

    def all_samples(self, dtype: str) -> tuple[Sample, ...]:
        """Return the contract's samples, some also in other layouts, and the model's calls.

        They are shared: copy before use.
        """
        op = self.spec.name
        own = _samples(op, None, dtype, self.device)
        others = _relaid(op, dtype, self.device)
        return own + others + _samples(op, self.all_sizes, dtype, self.device)

    def sample(self, dtype: str, name: str) -> Sample:
        """Return a copy of one sample with its layout: views of one buffer remain views."""
        return fresh(next(s for s in self.all_samples(dtype) if s.name == name))

    def samples(self, dtype: str) -> Iterator[Sample]:
        """Yield copies of samples from the contract, without `left_out`."""
        for sample in _samples(self.spec.name, None, dtype, self.device):
            if (self.spec.name, dtype, sample.name) not in self.left_out:
                yield fresh(sample)

    def patterns(self, dtype: str) -> Iterator[Sample]:
        """Yield copies of supported samples, one for each pattern of None, flags and dimensions."""
        seen = set()
        for sample in self.samples(dtype):
            found = pattern(sample)
            if found not in seen and sample.args[0].numel() and self.accepts(sample):
                seen.add(found)
                yield sample

    def served(self, dtype: str, tokens: int) -> tuple[Sample, ...]:
        sizes = dataclasses.replace(self.all_sizes, tokens=(tokens,))
        return tuple(self.spec.served(sizes, getattr(torch, dtype), self.device))

    @property
    def all_sizes(self) -> ModelSizes:
        """The model's sizes, including sizes that the op's binding needs."""
        binding = _installed(self.impl.op_name).bindings[self.impl.op_name]
        rules = tuple(rule for rule in binding.sizes if rule.in_kit)
        own = typical_sizes([dataclasses.replace(binding, sizes=rules)]).more
        return dataclasses.replace(self.sizes, more={**own, **self.sizes.more})

    def bad_inputs(self, dtype: str) -> tuple[BadInput, ...]:
        return tuple(mistaken_calls(self.spec, getattr(torch, dtype), self.device))

    def accepts(self, sample: Sample) -> bool:
        each = fresh(sample)
        if verdict_of(self.impl, self.spec, each.args) is not True:
            return False
        try:
            self.call(each)
        except NotImplementedError:
            return False
        return True

    def call(self, sample: Sample) -> Any:
        """Return the implementation's result. The call may overwrite tensors of `sample`.

        An implementation that takes a layer gets one from the contract.
        """
        return as_call(self.impl, self.spec)(*sample.args)

    def bits(self, sample: Sample) -> str:
        """Return a hash of the result. The call may overwrite tensors of `sample`.

        The hash does not depend on the order of an expert's rows, which the contract leaves open.
        """
        args = fresh(sample).args  # the call may overwrite the sample
        return result_hash(_promised(self.spec, self.call(sample), args))

    def needs_no_layer(self) -> None:
        """Raise Refused for an implementation that takes a layer."""
        if self.impl.needs_layer:
            raise Refused("it needs a layer, so call_op and compiled mode do not use it")

    def manager(self) -> OpManager:
        return OpManager(self.registry(), SelectionPolicy())

    def registry(self) -> OpRegistry:
        """Return a registry with only this implementation and its contract.

        Raises:
            PluginError: the registry rejects the implementation.
        """
        registry = OpRegistry(EMPTY)
        registry.add_contract(Contract(self.spec), Binding(), SCRIPT)
        registry.register_impl(self.impl)
        return registry


def contract_of(op: str) -> OpSpec:
    """Return the contract of an op, or raise KeyError."""
    return _installed(op).contracts[op]


def _installed(op: str) -> RegistrySnapshot:
    """Return a snapshot with the contract of `op`. All plugins are loaded only if necessary."""
    known = known_contracts()
    return known if op in known.contracts else get_default_manager().registry.snapshot()


def fresh(sample: Sample) -> Sample:
    """Copy a sample.

    The copies share memory with each other like the originals, but not with the originals.
    """
    return dataclasses.replace(sample, args=copy.deepcopy(sample.args))


def pattern(sample: Sample) -> tuple[object, ...]:
    """Return the properties that code may branch on: dimensions, dtypes, None and flags."""
    return tuple(
        (arg.ndim, arg.dtype)
        if isinstance(arg, torch.Tensor)
        else arg
        if arg is None or isinstance(arg, str | bool)
        else type(arg)
        for arg in sample.args
    )


def result_hash(result: Any) -> str:
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
    """Return a contract's samples, or the calls of a model with these sizes."""
    spec, kind = contract_of(op), getattr(torch, dtype)
    return tuple(spec.samples(kind, device) if sizes is None else spec.served(sizes, kind, device))


@cache
def _relaid(op: str, dtype: str, device: torch.device) -> tuple[Sample, ...]:
    return tuple(relaid(contract_of(op), _samples(op, None, dtype, device)))


def _promised(spec: OpSpec, got: Any, args: Sequence[Any]) -> Any:
    """Return the results in a normal form, equal for results that the contract treats as equal.

    `got` is structured like a result of `spec.fake`.
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
