"""`vllm-fl verify --replay FILE`: repeats a call that VLLM_FL_KEEP_FAULTS has kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_fl.contracts import OpSpec, Sample
from vllm_fl.plugins.types import OpImpl
from vllm_fl_verify.oracle import paired, wanted_of, worst
from vllm_fl_verify.verification import Comparison, compare, dtype_name

from ..operate.faults import read, unpacked
from ._show import UsageError


class Replay:
    """The call of a file, with its expected outputs.

    Raises:
        UsageError: the file cannot be used.
    """

    def __init__(self, path: Path, specs: Mapping[str, OpSpec], device: torch.device) -> None:
        try:
            tensors, self.facts = read(path)
            if (op := self.facts["op"]) not in specs:
                raise ValueError(f"{path}: no installed distribution provides the op {op}")
            spec = specs[op]
            self.sample = unpacked(path, tensors, self.facts, spec, device)
            if problem := spec.check(*self.sample.args):
                raise ValueError(f"{path}: the call breaks the contract: {': '.join(problem)}")
            self.wanted = wanted_of(spec, self.sample)
        except (ImportError, ValueError) as error:
            raise UsageError(f"--replay: {error}") from error
        args = (arg for arg in self.sample.args if isinstance(arg, torch.Tensor))
        has = {dtype_name(arg.dtype) for arg in args}
        self.dtype = next((name for name in spec.dtypes if name in has), spec.dtypes[0])

    def compare(self, impl: OpImpl, spec: OpSpec, sample: Sample, dtype: torch.dtype) -> Comparison:
        """Compare the call. If it is correct, the reason describes the largest error."""
        got: list[Any] = []

        def deviation(result: Any) -> tuple[float, str]:
            got.append(result)
            return worst(result, self.wanted)

        found = compare(impl, spec, sample, dtype, deviation=deviation)
        if found.status == "ok":
            pairs = paired(got[0], self.wanted)
            texts = filter(None, (want.farthest(mine) for want, mine, _ in pairs))
            found = replace(found, reason=f"worst at {'; '.join(texts) or 'no element'}")
        return found


def heading(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that describe the kept call."""
    where = f"rank {facts['rank']}, {facts['date']}, {facts['device']}"
    yield f"{facts['op']} {facts['impl_id']}: {facts['reason']} ({where})"
    for name, about in facts["args"].items():
        text = f"{about.get('shape')} {about.get('dtype')}, strides {about.get('stride')}"
        text = f"{about.get('value', text)}{', shuffled' * ('shuffled' in about)}"
        yield f"  {name}: {text}{', maybe overwritten' * (name in facts['overwritten'])}"
    if len({*facts["tokens"]}) > 1:
        yield "  rows: {} of {}".format(*facts["tokens"])
