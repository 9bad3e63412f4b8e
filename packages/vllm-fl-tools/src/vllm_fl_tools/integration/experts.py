"""vLLM's own routed experts by its Triton kernel, each call with the tiles that it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import ModelSizes, OpSpec, Sample
from vllm_fl.files import Draft
from vllm_fl.integration.places import stock_form

if TYPE_CHECKING:
    import torch

    from vllm_fl.plugins.types import OpImpl

__all__ = ["OP", "Experts"]

OP = "fused_experts"


@dataclass(frozen=True)
class Experts:
    """The experts of a model, on one rank.

    Args:
        count: how many there are.
        taken: how many a token takes.
        hidden: features of a token.
        inner: features of one half of an expert.
        dtype: of the model.
    """

    count: int
    taken: int
    hidden: int
    inner: int
    dtype: torch.dtype

    @classmethod
    def of(cls, sizes: ModelSizes, dtype: torch.dtype) -> Experts | None:
        """Those of a model with these sizes; None where it has none, or does not tell all."""
        names = ("experts", "experts_per_token", "expert_intermediate")
        count, taken, inner = (int(sizes.more.get(name) or 0) for name in names)
        if not (count and taken and inner and sizes.hidden):
            return None
        return cls(count, taken, sizes.hidden, inner, dtype)

    def own(self, tokens: int) -> Mapping[str, int]:
        """The configuration that vLLM takes for so many tokens, out of a file or by its rule."""
        from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

        w13 = self.count, 2 * self.inner, self.hidden
        w2 = self.count, self.hidden, self.inner
        found: Mapping[str, int] = try_get_optimal_moe_config(
            w13, w2, self.taken, self._dtype_in_names, tokens
        )
        return found

    @property
    def file_name(self) -> str:
        """Of the file in which vLLM looks for configurations of such experts."""
        from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

        return str(get_config_file_name(self.count, self.inner, self._dtype_in_names))

    @property
    def _dtype_in_names(self) -> str | None:
        import torch

        return "float32" if self.dtype == torch.float32 else None

    def write(self, folder: Path, entries: Mapping[int, Mapping[str, int]]) -> Path:
        """Write a file of vLLM's, for `VLLM_TUNED_CONFIG_FOLDER`. Raises OSError.

        Args:
            folder: where; it is made where it is not there.
            entries: tokens -> configuration.
        """
        import triton

        told = {"triton_version": triton.__version__, **{str(n): dict(entries[n]) for n in entries}}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        with Draft(path) as draft:
            draft.put((json.dumps(told, indent=4) + "\n").encode())
        return path

    def spec(self, contract: OpSpec, device: torch.device) -> OpSpec:
        """The contract, with calls of the model's own size in the place of smaller ones.

        The oracle is asked on the device, in fp64 as ever: for 128 experts the host of an H100 took
        most of two minutes.
        """
        import torch

        @wraps(contract.oracle)
        def oracle(*args: Any) -> torch.Tensor:
            there = (arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args)
            exact: torch.Tensor = contract.oracle(*there)
            return exact.cpu()

        def served(
            sizes: ModelSizes, dtype: torch.dtype, device: torch.device, large: bool = False
        ) -> Iterator[Sample]:
            smaller = self._as_sizes(sizes.tokens, narrow=True)
            for sample in contract.served(smaller, dtype, device, large):
                yield self._widened(sample, dtype, device, large)

        return replace(contract, served=served, oracle=oracle)

    def sizes(self, largest: int) -> ModelSizes:
        """The model's sizes, as contracts ask for them."""
        return self._as_sizes((1, largest))

    def _as_sizes(self, tokens: tuple[int, ...], *, narrow: bool = False) -> ModelSizes:
        inner, hidden = (32, 64) if narrow else (self.inner, self.hidden)
        more: dict[str, float | None] = {
            "experts": self.count,
            "experts_per_token": self.taken,
            "expert_intermediate": inner,
        }
        return ModelSizes(hidden=hidden, tokens=tokens, more=more)

    def _widened(
        self, sample: Sample, dtype: torch.dtype, device: torch.device, large: bool
    ) -> Sample:
        """The same call with all features of the model: routing is drawn as the contract has it."""
        from vllm_fl.contracts.sampling import Source

        _, _, _, weights, ids, *rest = sample.args
        source = Source(dtype, device, large)
        tokens = len(ids)
        x = source.normal(tokens, self.hidden)
        if large:
            x = source.spiked(tokens, self.hidden, scale=4.0, peak=100.0)
        rows = self.count * 2 * self.inner
        w13 = source.normal(rows, self.hidden, scale=self.hidden**-0.5)
        w2 = source.normal(self.count * self.hidden, self.inner, scale=self.inner**-0.5)
        args = (
            x,
            w13.view(self.count, 2 * self.inner, self.hidden),
            w2.view(self.count, self.hidden, self.inner),
            weights,
            ids,
            *rest,
        )
        name = f"{tokens} x {self.hidden} through {self.count} of {self.inner}"
        return replace(sample, name=name + ", large" * large, args=args, smaller="")

    def form(self, tiles: Mapping[str, int]) -> OpImpl:
        """vLLM's own experts with these tiles."""
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        found = stock_form(OP, _with(tiles), traceable=False)
        assert found is not None
        return found


def _with(tiles: Mapping[str, int]) -> Callable[..., Any]:
    def experts(
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
    ) -> Any:
        from vllm.model_executor.layers import fused_moe
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        before = fused_moe.get_config()
        try:
            with fused_moe.override_config(dict(tiles)):
                return fused_experts(hidden_states, w13, w2, topk_weights, topk_ids)
        finally:
            fused_moe._config = before  # vLLM leaves it after an exception

    return experts
