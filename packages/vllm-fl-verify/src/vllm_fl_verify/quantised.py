"""Verification of the planned classes for quantised layers.

A class computes a linear layer with made weights before the model is built. Then each layer of the
model is compared with its dequantised weights while vLLM loads it, and again when weights are
updated. For experts there is only this second comparison, on some experts of each layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from vllm_fl.engine.facts import KernelUse
from vllm_fl.integration.patchers.kernel_classes import chosen_for, kernel_of, refusal_of
from vllm_fl.integration.patchers.linear_kernels import (
    first_in_lists,
    kernel_class,
    planned_classes,
    planned_kernels,
)
from vllm_fl.plugins.inspection import FAILED, Key, Moment, Objection
from vllm_fl.plugins.types import EXPERT_OPS, LINEAR_OPS
from vllm_fl.text import quote

from .made_inputs import checks_of
from .stock.experts import OF_EXPERTS
from .stock.linear import GIVEN, RELOADED, Linears, new_models
from .stock.rows import StockRows
from .stock.weights import held_by

MADE_FEATURES, MADE_OUT = 512, 384
"""The sizes of a layer with made weights: multiples of the groups and blocks of all formats."""

QUANTISES = {"int8_linear": True, "fp8_linear": True, "fp8_block_linear": True}
QUANTISES |= {"wna16_linear": False, "wfp8a16_linear": False}
"""Op -> whether its checkpoints are for quantised activations."""

INEXACT = 0.01
"""Relative error of a product of rows with one large number. It is 0.004 with 16-bit activations,
and at least 0.02 with quantised activations."""


@dataclass
class _Quantised:
    """Verification state of one engine.

    Args:
        quantisation: a copy of vLLM's configuration of the quantisation, for the model's class.
        remarks: (op, impl id) of classes that need no further verification on made weights -> what
            the verification found.
        linears: (op, impl id) of a planned class -> its layers in one model.
    """

    quantisation: Any
    remarks: dict[Key, str] = field(default_factory=dict)
    linears: list[tuple[Key, Linears]] = field(default_factory=list)


def _state(engine: Any) -> _Quantised:
    found: _Quantised | None = engine.state.get(_Quantised)
    if found is None:
        from vllm.model_executor.model_loader.utils import get_model_architecture

        model, _ = get_model_architecture(engine.config.model_config)
        quantisation = copy.deepcopy(engine.config.quant_config)  # before vLLM changes it
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        if mapper is not None and quantisation is not None:
            older = "get_unstacked_mapper"  # in 0.26
            rename = getattr(mapper, "get_rename_mapper", None) or getattr(mapper, older)
            quantisation.apply_vllm_mapper(rename())
        if quantisation is not None:
            quantisation.packed_modules_mapping = getattr(model, "packed_modules_mapping", {})
        found = engine.state[_Quantised] = _Quantised(quantisation)
    return found


def compare_on_made_weights(engine: Any) -> dict[Key, Objection]:
    """Return (op, impl id) -> why a planned class is incorrect on made weights."""
    found: dict[Key, Objection] = {}
    planned = planned_kernels(engine.plan)
    for op, impls in ((op, planned[op]) for op in planned.keys() & LINEAR_OPS):
        state, seed = _state(engine), checks_of(engine).seed
        made = MadeLayer(engine.config, state.quantisation, engine.device, engine.facts.dtype, seed)
        for impl in impls:
            key = op, impl.impl_id
            if key in state.remarks or op in engine.unused:
                continue
            cls, _ = kernel_class(op, impl)
            problem, state.remarks[key] = made.compare(op, cls, engine.facts.kernels.get(op, ()))
            if problem:
                found[key] = Objection(FAILED, problem)
        remarks = (state.remarks.get((op, impl.impl_id)) for impl in impls[:1])
        engine.remarks[Moment.PLANNED] += [f"{op}: {each}" for each in remarks if each]
    return found


@dataclass(frozen=True)
class MadeLayer:
    """Layers of vLLM with made weights.

    Args:
        vllm_config: the engine's configuration.
        quantisation: the configuration of the quantisation, with the names of the model's class.
        reloads: whether the weights are also loaded again, as in `reload_weights`.
    """

    vllm_config: Any
    quantisation: Any
    device: torch.device
    dtype: torch.dtype
    seed: int
    reloads: bool = False

    def compare(self, op: str, cls: Any, uses: Iterable[KernelUse]) -> tuple[str, str]:
        """Compare a class on one layer of each kind in the model.

        Returns:
            (why the class is incorrect, a remark). Both may be empty.
        """
        names: dict[str, tuple[str, Any]] = {}
        for use in uses:
            for text, config in use.configs.items():
                kind = {name: each for name, each in vars(config).items() if "shape" not in name}
                names.setdefault(repr(kind), (use.layers[text][0], config))
        left = "" if names else "the model's layers are unknown"
        for name, config in names.values():
            rows = StockRows()
            linears = Linears(rows, seed=self.seed)
            try:
                chosen = self._converted(op, cls, name, linears)
            except Exception as error:  # a class may be third-party code
                return f"on made weights, it raised {quote(error)}", ""
            if chosen is not cls:
                left = refusal_of(cls, config) or f"vLLM chose {chosen.__name__}"
                continue
            for row in rows.to_json():
                if row["incorrect"] and row["against"] in (GIVEN, RELOADED):
                    again = " loaded again" * (row["against"] == RELOADED)
                    return f"on made weights{again}, {row['problems'][0]}", ""
                left = left or next(iter(row["skipped"]), "")
            exact = linears.roundings.get(name, 0.0) < INEXACT
            if linears.roundings and exact is QUANTISES.get(op):
                what = "16-bit" if exact else "quantised"
                other = "quantised" if exact else "16-bit"
                text = f"{cls.__name__} computes with {what} activations, "
                return "", f"{text}the checkpoint is for {other} activations"
        return "", left and f"{cls.__name__} is not verified on made weights: {left}"

    def _converted(self, op: str, cls: Any, name: str, linears: Linears) -> type:
        """Create a layer, convert its weights and compare it. Return the class that vLLM chose."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.linear import ReplicatedLinear
        from vllm.utils.torch_utils import set_default_torch_dtype

        # vLLM's kernels use AMX. A process must ask for it, which oneDNN does in its first product.
        getattr(torch.cpu, "_init_amx", bool)()
        with ExitStack() as stack:
            stack.enter_context(first_in_lists({op: [cls]}))
            stack.enter_context(set_current_vllm_config(self.vllm_config))
            stack.enter_context(set_default_torch_dtype(self.dtype))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.device)
            linear = partial(ReplicatedLinear, MADE_FEATURES, MADE_OUT, bias=False, prefix=name)
            layer: Any = linear(params_dtype=self.dtype, quant_config=self.quantisation)
            fill(layer, torch.Generator("cpu").manual_seed(self.seed))
            chosen = type(kernel_of(layer, layer.quant_method))
            if chosen is cls:
                linears.watch({layer: name})
                stack.enter_context(torch.device("cpu"))  # the default while vLLM loads weights
                convert = partial(layer.quant_method.process_weights_after_loading, layer)
                if self.reloads:
                    self._reload(layer, convert)
                    linears.compare_again()
                else:
                    convert()
        return chosen

    def _reload(self, layer: Any, convert: Callable[[], object]) -> None:
        """Convert the weights of a layer, and load them again, in the steps of vLLM."""
        from vllm.model_executor.model_loader import reload

        reload.record_metadata_for_reloading(layer)
        held = held_by(layer)
        convert()
        reload.initialize_layerwise_reload(layer)
        for name, value in held.items():
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, value)
        reload.finalize_layerwise_reload(layer, self.vllm_config.model_config)


def fill(layer: torch.nn.Module, generator: torch.Generator) -> None:
    """Set the parameters of a layer to random weights of their checkpoint format."""
    given: dict[str, Any] = {"generator": generator, "device": "cpu"}
    for name, parameter in layer.named_parameters():
        shape, dtype = parameter.shape, parameter.dtype
        if name.endswith("g_idx"):
            drawn = torch.zeros(shape, device="cpu")
        elif not dtype.is_floating_point:
            low = torch.iinfo(dtype).min
            drawn = torch.randint(low, torch.iinfo(torch.int32).max, shape, **given)
            drawn = drawn if dtype.itemsize > 1 else drawn % 255 - (127 if low else 0)
        elif "scale" in name:
            drawn = torch.rand(shape, dtype=torch.float32, **given) * 0.01 + 0.005
        else:
            drawn = torch.randn(shape, dtype=torch.float32, **given)
        parameter.data = drawn.to(parameter.device, dtype)


@contextmanager
def watching_layers(engine: Any) -> Iterator[None]:
    """Inside the block, compare the layers of new models that have planned classes."""

    def watch(_: Any, model: torch.nn.Module) -> None:
        planned = planned_classes(engine.plan)
        found: dict[Key, dict[torch.nn.Module, str]] = {}
        for name, layer in model.named_modules():
            chosen = chosen_for(layer)
            if chosen and (impl_id := planned.get(chosen[:2])):
                found.setdefault((chosen.op, impl_id), {})[layer] = name
        for key, named in found.items():
            linears = Linears(StockRows(), seed=checks_of(engine).seed)
            linears.watch(named)
            _state(engine).linears.append((key, linears))

    with new_models(watch):
        yield


def compare_layers_of_plan(engine: Any, moment: Moment) -> dict[Key, Objection]:
    """Return (op, impl id) -> why a planned class is incorrect in a layer whose weights vLLM has
    loaded since the last call. After an update, the layers are also called where vLLM has put their
    new weights."""
    found: dict[Key, Objection] = {}
    state: _Quantised | None = engine.state.get(_Quantised)
    layers: dict[Key, set[str]] = {}
    problems: dict[Key, dict[str, str]] = {}
    for key, linears in state.linears if state else ():
        if moment is Moment.UPDATED:
            with torch.inference_mode():
                linears.compare_again()
        for (*_, against), row in linears.rows.rows.items():
            if against in (GIVEN, RELOADED, OF_EXPERTS):
                layers.setdefault(key, set()).update(row.layers)
                problems.setdefault(key, {}).update(row.problems)
            for why, names in row.skipped.items() if key[0] in EXPERT_OPS else ():
                engine.remarks[moment].append(f"{key[0]}: {len(names)} layers not verified: {why}")
        linears.rows = StockRows()
        linears.kept.clear()
    for key, of_key in problems.items():
        for layer, problem in [*of_key.items()][:1]:
            many = f"in {len(of_key)} of {len(layers[key])} layers, such as {layer}"
            found[key] = Objection(FAILED, f"{many}: {problem}")
    if state and found and moment is not Moment.UPDATED:
        state.linears.clear()  # the layers are loaded again
    count = sum(map(len, layers.values()))
    if (count or moment is Moment.UPDATED) and not found:
        engine.remarks[moment].append(f"{count} quantised layers compared")
    return found
