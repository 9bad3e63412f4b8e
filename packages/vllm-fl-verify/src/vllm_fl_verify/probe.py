"""One uncompiled forward of the loaded model with a realistic batch of tokens.

It is vLLM's dummy run with different inputs. vLLM passes id 0 and position 0 for every token.
Attention does not run in it, so attention's result is 0 or uninitialised memory.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.vllm import set_current_vllm_config

from vllm_fl.contracts.sampling import positions
from vllm_fl.integration.patchers.attention import uncompiled

from .batches import tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TOKENS = 256
"""Tokens of the largest forward. Only some rows of each call are compared."""

FORWARD_SIZES = (TOKENS, 17, 16, 1)
"""Tokens of the forwards: prompts, a step with some decoding sequences, the step after a request
has finished, and one token. There are several, because kernels are chosen by number of tokens.
Just-in-time compilation then happens at startup.
"""

SEED = 20261122
"""Seed of random tokens, which must be equal on all ranks of an engine."""


_NAMES_OF_POSITIONS = re.compile(r"wpe|pos_emb.*|.*position.*")
"""Matches models' names for learned tables with a row for each position."""


def positions_of(model: torch.nn.Module, length: int) -> int:
    """Return the number of positions that every table of the model has, at most `length`. With
    VLLM_ALLOW_LONG_MAX_MODEL_LEN an engine's length may exceed that of its model. Kernels of vLLM
    would then read beyond a table."""
    rows = [length]
    for module in _text_part(model).modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("cos_sin_cache") and buffer.ndim > 1:
                # If two tables are in one, the second has the remaining rows.
                first = getattr(module, "original_max_position_embeddings", 0)
                rows.append(len(buffer) - (first if "long_short" in name else 0))
        for name, child in module.named_children():
            table = getattr(child, "num_embeddings", None)
            if isinstance(table, int) and _NAMES_OF_POSITIONS.fullmatch(name):
                # Some tables begin after the row for padding.
                padding = getattr(module, "padding_idx", None)
                begin = padding + 1 if isinstance(padding, int) else getattr(child, "offset", 0)
                rows.append(table - begin)
    return max(1, min(rows))


def _text_part(model: torch.nn.Module) -> torch.nn.Module:
    """Return the language model, because encoders of images have their own tables."""
    try:
        part = model.get_language_model()  # type: ignore[operator]
    except Exception:  # most models do not support it, and some raise
        return model
    return part if isinstance(part, torch.nn.Module) else model


def forward(
    runner: Any, models: Mapping[str, torch.nn.Module], vllm_config: VllmConfig, tokens: int
) -> str:
    """Run the loaded models once, eagerly, without attention and without a cache.

    Args:
        models: `Engine.models`. The same dummy run calls the model and its draft model.
        tokens: number of tokens, at most the engine's largest batch.

    Returns:
        Why no forward ran, or an empty string.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    run = getattr(runner, "_dummy_run", None)
    if run is None:
        return "the model runner has no dummy run"
    options = {"is_profile": True, "skip_eplb": True}
    if "skip_attn" in inspect.signature(run).parameters:
        options["skip_attn"] = True
    inputs = {prefix: _Inputs(model, vllm_config) for prefix, model in models.items()}
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(uncompiled())
        for prefix, model in models.items():
            stack.enter_context(inputs[prefix].given())
            for module in model.modules():
                if isinstance(module, AttentionLayerBase):
                    stack.enter_context(module.register_forward_hook(inputs[prefix].attended))
        run(tokens, **options)
    return "" if inputs[""].seen else "vLLM ran no forward pass"


class _Inputs:
    """Inputs of one model that replace zeros and uninitialised memory."""

    def __init__(self, model: torch.nn.Module, vllm_config: VllmConfig) -> None:
        config, drafting = vllm_config.model_config, vllm_config.speculative_config
        configs = [config, drafting.draft_model_config if drafting else None]
        self.model, self.seen = model, False
        self.vocabulary = min(each.get_vocab_size() for each in configs if each is not None)
        self.length = positions_of(model, config.max_model_len)
        self._generator = torch.Generator("cpu").manual_seed(SEED)
        self._noise: dict[tuple[int, ...], torch.Tensor] = {}

    @contextmanager
    def given(self) -> Iterator[None]:
        own: Callable[..., Any] = self.model.forward
        held = vars(self.model)
        before = held.get("forward")

        def forward(*args: Any, **named: Any) -> Any:
            self.seen = True
            return own(*args, **self._varied(named))

        held["forward"] = forward
        try:
            yield
        finally:
            del held["forward"]
            if before is not None:
                held["forward"] = before

    def _varied(self, named: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Callable[[Any], Any]] = {
            "input_ids": lambda ids: self._tokens(len(ids)).to(ids),
            "inputs_embeds": self._embedded,
            "positions": self._positions,
            "hidden_states": self._normal,  # of the target, for the draft model
            "intermediate_tensors": self._between,
        }
        given = {name: named[name] for name in changes if named.get(name) is not None}
        return named | {name: changes[name](value) for name, value in given.items()}

    def _between(self, like: Any) -> Any:
        """Return tensors of the pipeline's previous rank."""
        return type(like)({name: self._normal(tensor) for name, tensor in like.tensors.items()})

    def _embedded(self, like: torch.Tensor) -> torch.Tensor:
        """Return embeddings of random tokens, if the model computes embeddings beforehand."""
        embed = getattr(self.model, "embed_input_ids", None)
        if embed is None:
            return self._normal(like)
        embedded: torch.Tensor = embed(self._tokens(len(like)).to(like.device))
        return embedded.to(like) if embedded.shape == like.shape else self._normal(like)

    def _tokens(self, count: int) -> torch.Tensor:
        return tokens(count, self.vocabulary, self._generator)

    def _positions(self, like: torch.Tensor) -> torch.Tensor:
        count, axes = like.shape[-1], like.shape[:-1].numel()
        drawn = [positions(count, self.length, self._generator) for _ in range(axes)]
        return torch.stack(drawn).view(like.shape).to(like)

    def _normal(self, like: torch.Tensor) -> torch.Tensor:
        """Return normally distributed numbers, which are equal in all layers with this shape."""
        shape = tuple(like.shape)
        if shape not in self._noise:
            drawn = torch.randn(shape, generator=self._generator, dtype=torch.float32)
            self._noise[shape] = drawn.to(like.device, like.dtype)
        return self._noise[shape].to(like).clone()

    def attended(self, _: torch.nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        """Replace the result of attention, which does not run, by noise of its input's size."""
        given = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not isinstance(result, torch.Tensor) or not result.is_floating_point() or not given:
            return None
        size = given[-1].float().std().nan_to_num(1.0, 1.0, 1.0)
        return self._normal(result) * size.to(result)
