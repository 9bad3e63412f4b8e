"""Comparison of linear layers with their dequantised weights, while vLLM loads them.

vLLM converts weights for a kernel in `process_weights_after_loading`, and often the originals
cannot be recovered afterwards. Each layer is therefore compared within that call: copy, convert,
compare, drop. One layer's copies are in memory at a time.

Inputs are numbers that the quantisation of activations represents exactly: the expected result does
not depend on whether a kernel quantises activations.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch
from torch.nn import Module

from vllm_fl.dispatch import get_default_manager
from vllm_fl.integration.patchers.kernel_classes import (
    class_of_experts,
    described_class,
    is_linear,
    is_mixture,
    kernel_of,
)
from vllm_fl.text import quote

from ..expected import Near
from ..guarded import freed_nan
from .experts import OF_EXPERTS, Experts
from .rows import RowKey, StockRows
from .weights import Held, dequantised, held_by

PROBE_SIZES = (1, 17, 31, 32, 256)
"""Tokens of a call; kernels are chosen and padded by them."""

COLUMNS = 256
"""Input features of one call with one-hot rows."""

KEPT = 4
"""Number of rows for the comparison after an update of the weights."""

LARGEST_SCALES = 2**20
"""Bytes of the largest tensor that is taken for scales."""

PROBE_STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
"""Distance of neighbouring numbers relative to their size, by dtype of the result. For float32 it
is a few such distances, because sums are rounded."""

LOST_IN_SUMS = 2.0**-14 / 32
"""Relative error for each input feature of an fp8 product: Hopper's tensor cores keep 14 bits of
the sum of each 32 products (arXiv:2412.19437, section 3.3.2)."""

LOADER = "vllm.model_executor.model_loader"
"""vLLM's package with the function that creates a model, which its modules import by name."""

Convert = Callable[..., None]
"""A method's `process_weights_after_loading`."""

LOADED, GIVEN, RELOADED = "the checkpoint's tensors", "dequantised weights", "weights loaded again"


@dataclass(frozen=True)
class _Inputs:
    """Numbers that a layer's quantisation of activations represents exactly.

    Args:
        unit: distance of the numbers.
        low, high: the least and the largest, in units.
        offset: subtracted from all, in units.
        coarse: whether they are numbers of fp8.
    """

    unit: float
    low: int
    high: int
    offset: int
    coarse: bool

    def drawn(self, rows: int, features: int, generator: torch.Generator) -> torch.Tensor:
        """Return random rows, each with the largest and the least number, in float64."""
        if self.coarse:
            drawn = torch.randn(rows, features, generator=generator, dtype=torch.float32)
            drawn *= self.high / 8
            drawn = drawn.clamp(self.low, self.high).to(torch.float8_e4m3fn).double()
        else:
            drawn = torch.randint(self.low, self.high + 1, (rows, features), generator=generator)
        drawn = drawn.double()
        drawn[:, ::64] = self.high  # in each group of features with one scale
        drawn[:, -1] = self.low
        return (drawn - self.offset) * self.unit

    @property
    def most(self) -> float:
        """The largest number."""
        return (self.high - max(self.offset, 0)) * self.unit


@dataclass(frozen=True)
class _Layer:
    """A linear layer `it` of a model, by its name."""

    name: str
    it: Any

    @property
    def kernel(self) -> Any:
        """The kernel that vLLM chose, or None."""
        return kernel_of(self.it, self.it.quant_method)

    def row(self, against: str) -> RowKey:
        """Return the row of its comparisons, by the class that vLLM chose."""
        chosen = self.it.quant_method if self.kernel is None else self.kernel
        return type(self.it).__name__, described_class(type(chosen)), against

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = self.it.quant_method.apply(self.it, x, bias)
        return result

    def inputs(self, given: Held) -> _Inputs:
        """Return the numbers that its quantisation of activations represents exactly."""
        weight = given.get("weight")
        scale, offset = given.get("input_scale"), given.get("input_zero_point")
        if weight is not None and weight.is_floating_point() and weight.itemsize == 1:
            return _Inputs(2.0**-7 if scale is None else float(scale.max()), -448, 448, 0, True)
        symmetric = getattr(getattr(self.kernel, "config", None), "input_symmetric", True)
        unit = 2.0**-6 if scale is None else float(scale.max())
        low, zero = -127 if symmetric else -128, 0 if offset is None else int(offset.max())
        return _Inputs(unit, low, 127, zero, False)

    def weights(self, held: Held) -> torch.Tensor | None:
        it = self.it
        if hasattr(it, "embedding_dim"):
            shape = it.num_embeddings_per_partition, it.embedding_dim
        else:
            out = getattr(it, "output_size_per_partition", it.output_size)
            shape = out, getattr(it, "input_size_per_partition", it.input_size)
        widths = getattr(it, "logical_widths", [shape[0]])
        block = getattr(it, "weight_block_size", None)
        config = getattr(it.quant_method, "quant_config", None)
        from_one = getattr(config, "checkpoint_format", "") != "gptq_v2" and self.kernel is not None
        return dequantised(held, shape, widths, block, from_one=from_one)


class Linears:
    """The linear layers of the models of this process.

    Args:
        rows: receives the results.
        sizes: tokens of the calls.
        seed: of the inputs.
    """

    def __init__(self, rows: StockRows, sizes: Sequence[int] = PROBE_SIZES, seed: int = 0) -> None:
        self.rows, self.sizes = rows, sizes
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self.kept: dict[str, tuple[_Layer, torch.Tensor, Near]] = {}
        """Layer -> rows for `compare_again`, of the first weights since this was cleared."""
        self.seconds = 0.0
        self.roundings: dict[str, float] = {}
        """Layer -> relative error for random rows, which includes the rounding of activations."""

    def watch(self, names: Mapping[Module, str]) -> None:
        """Compare each linear layer when vLLM has converted its weights.

        Args:
            names: layer of a new model -> its name.
        """
        for layer in names:
            method: Any = getattr(layer, "quant_method", None)
            known = is_linear(layer) or is_mixture(layer)
            if known and hasattr(method, "process_weights_after_loading"):
                convert = method.process_weights_after_loading
                if not isinstance(convert, partial):  # a method may belong to several layers
                    noting = partial(self._process, names, convert)
                    vars(method)["process_weights_after_loading"] = noting

    def _process(self, names: Mapping[Module, str], convert: Convert, layer: Any) -> None:
        name = names.get(layer, type(layer).__name__)
        if is_mixture(layer):
            return self._process_experts(name, convert, layer)
        loaded = held_by(layer)
        of_name = _Layer(name, layer)
        with _given_to_kernel(of_name.kernel, layer) as given:
            convert(layer)
        if loaded:
            with self._comparing(of_name.row(GIVEN), name):
                self._compare(of_name, loaded, given or loaded)

    @contextmanager
    def _comparing(self, key: RowKey, name: str) -> Iterator[None]:
        """Count the seconds of a comparison. If it raises, the layer is incorrect."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # also errors of vLLM, such as an operator that is missing
            self.rows.add(key, name, float("inf"), f"it raised {quote(error)}")
        self.seconds += time.monotonic() - began

    def _process_experts(self, name: str, convert: Convert, layer: Any) -> None:
        method = layer.quant_method
        try:
            some = Experts(layer, self._generator)
        except AttributeError as error:  # a layer of experts with other attributes
            key = type(layer).__name__, class_of_experts(method), OF_EXPERTS
            self.rows.skip(key, name, quote(error))
            return convert(layer)
        convert(layer)
        key = type(layer).__name__, class_of_experts(method), OF_EXPERTS
        spec = get_default_manager().registry.snapshot().contracts["fused_experts"]
        with self._comparing(key, name):
            some.compare(self.rows, key, name, spec)

    def _compare(self, layer: _Layer, loaded: Held, given: Held) -> None:
        key, weight = layer.row(GIVEN), layer.weights(given)
        if weight is None:
            return self.rows.skip(key, layer.name, f"unknown format: {', '.join(sorted(given))}")
        if given is not loaded:
            self._compare_tensors(layer, loaded, weight)
        own_bias, bias = getattr(layer.it, "bias", None), loaded.get("bias")
        dtype = getattr(layer.it, "params_dtype", weight.dtype)
        inputs = layer.inputs(given)

        def judge(got: torch.Tensor, what: str, exact: torch.Tensor, allowed: torch.Tensor) -> None:
            share, problem = Near(exact, allowed, dtype).deviation([got], ["the result"], None)
            self.rows.add(key, layer.name, share, problem and f"{problem}; {what}")

        device, features = weight.device, weight.shape[1]
        step = PROBE_STEPS[dtype]
        tops = weight.abs().amax(1, keepdim=True).double()
        for start in range(0, features, COLUMNS):
            some = weight[:, start : start + COLUMNS].double()
            x = torch.zeros(some.shape[1], features, dtype=dtype, device=device)
            x[:, start : start + COLUMNS].fill_diagonal_(inputs.most)
            exact = (some * inputs.most).t()
            allowed = step * (exact.abs() + (tops * inputs.most).t() / 16)
            judge(layer.apply(x, None), f"one-hot rows from feature {start}", exact, allowed)
        numbers = inputs.drawn(max(self.sizes), features, self._generator).to(device)
        equal = torch.full((2, features), inputs.most, dtype=torch.float64, device=device)
        numbers = torch.cat((numbers, equal))
        exact = _product(numbers, weight, bias)
        # The roundings of the result, of each weight, and of sums.
        lost = LOST_IN_SUMS * features if inputs.coarse else 0.0
        norms = numbers.norm(dim=1).unsqueeze(1) * weight.double().norm(dim=1) * features**-0.5
        allowed = step * exact.abs() + 2 * (step + lost) * norms
        x = numbers.to(dtype)
        got = layer.apply(x[-2:].clone(), own_bias)
        judge(got, "rows of equal numbers", exact[-2:], allowed[-2:])
        for size in self.sizes:
            got = layer.apply(x[:size].clone(), own_bias)
            judge(got, f"{size} random rows", exact[:size], allowed[:size])
        any_x = torch.randn(KEPT, features, generator=self._generator, dtype=torch.float32)
        any_x[:, 0] = 32  # the step of int8 is a quarter of the other numbers
        x_any = (any_x * inputs.most / 32).to(device, dtype)
        product = _product(x_any.double(), weight, bias)
        rounded = layer.apply(x_any.clone(), own_bias).double()
        self.roundings[layer.name] = float((rounded - product).norm() / product.norm())
        few = Near(exact[:KEPT].float(), allowed[:KEPT].float(), dtype)
        self.kept.setdefault(layer.name, (layer, x[:KEPT].clone(), few))

    def _compare_tensors(self, layer: _Layer, loaded: Held, weight: torch.Tensor) -> None:
        """Compare the tensors that a kernel got with the tensors of the checkpoint.

        vLLM quantises some again: parts of a fused layer with one scale each, or weights that are
        not quantised in the checkpoint.
        """
        key, exact = layer.row(LOADED), layer.weights(loaded)
        if exact is None:
            return self.rows.skip(key, layer.name, f"unknown format: {', '.join(sorted(loaded))}")
        wide = exact.double()
        is_int = "Int" in type(layer.kernel).__name__
        tops = wide.abs().amax()
        allowed = tops / 127 if is_int else wide.abs() / 16 + tops / 448 * 2.0**-9
        near = Near(wide, allowed + torch.zeros_like(wide), torch.float32)
        self.rows.add(key, layer.name, *near.deviation([weight], ["the weight"], None))

    def compare_again(self) -> None:
        """Compare some rows of each layer again, after an update with the same weights.

        Blocks of the sizes of scales are filled with NaN first: a kernel may hold a pointer to a
        tensor that the update has freed, and read the old numbers until the memory is used again.
        """
        scales = [each for layer, *_ in self.kept.values() for each in held_by(layer.it).values()]
        sizes = {each.nbytes for each in scales if each.nbytes <= LARGEST_SCALES}
        held = [freed_nan(sizes, device) for device in {each.device for each in scales}]
        for name, (layer, x, wanted) in self.kept.items():
            key = layer.row(RELOADED)
            with self._comparing(key, name):
                got = layer.apply(x, getattr(layer.it, "bias", None))
                self.rows.add(key, name, *wanted.deviation([got], ["the result"], None))
        del held


@contextmanager
def new_models(watch: Callable[[Any, Module], object]) -> Iterator[None]:
    """Inside the block, call `watch(configuration, model)` for each model that vLLM's loader
    creates, before it loads the weights."""
    make: Any = import_module(f"{LOADER}.utils").initialize_model

    @wraps(make)
    def made(*args: Any, **named: Any) -> Module:
        model: Module = make(*args, **named)
        watch(named["vllm_config"] if "vllm_config" in named else args[0], model)
        return model

    with ExitStack() as back:
        for name, module in [*sys.modules.items()]:
            if name.startswith(LOADER) and vars(module).get("initialize_model") is make:
                back.callback(setattr, module, "initialize_model", make)
                vars(module)["initialize_model"] = made
        yield


@contextmanager
def _given_to_kernel(kernel: Any, layer: Module) -> Iterator[dict[str, torch.Tensor]]:
    """Copy the layer's tensors when vLLM passes them to its kernel; empty without a kernel."""
    given: dict[str, torch.Tensor] = {}
    convert = getattr(kernel, "process_weights_after_loading", None)
    if convert is None:
        yield given
        return

    def noting(of: Module) -> None:
        given.update(held_by(of))
        convert(of)

    vars(kernel)["process_weights_after_loading"] = noting
    try:
        yield given
    finally:
        vars(kernel).pop("process_weights_after_loading", None)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ weight.T + bias in float64, some rows of the weight at a time."""
    found = torch.cat([x @ some.double().t() for some in weight.split(COLUMNS)], dim=1)
    return found if bias is None else found + bias.double()
