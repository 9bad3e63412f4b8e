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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import Any

import torch

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
from .rows import StockRows
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
"""Distance of neighbouring numbers relative to their size, by dtype of the result. Of float32 a
few, because sums are rounded."""

LOST_IN_SUMS = 2.0**-14 / 32
"""Relative error for each input feature of an fp8 product: Hopper's tensor cores keep 14 bits of
the sum of each 32 products (arXiv:2412.19437, section 3.3.2)."""

LOADER = "vllm.model_executor.model_loader"
"""vLLM's package with the function that creates a model, which its modules import by name."""

LOADED, GIVEN, RELOADED = "the checkpoint's tensors", "dequantised weights", "weights loaded again"

RowKey = tuple[str, str, str]


@dataclass(frozen=True)
class _Kept:
    """Some rows of a compared layer, to compare again after an update of the weights."""

    kind: str
    cls: str
    layer: torch.nn.Module
    x: torch.Tensor
    wanted: Near


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


class Linears:
    """The linear layers of the models of this process.

    Args:
        rows: receives the results.
        sizes: tokens of the calls.
        seed: of the inputs.
    """

    def __init__(
        self, rows: StockRows, sizes: tuple[int, ...] = PROBE_SIZES, seed: int = 0
    ) -> None:
        self.rows, self.sizes = rows, sizes
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self.kept: dict[str, _Kept] = {}
        """Layer -> rows for `compare_again`, of the first weights since this was cleared."""
        self.seconds = 0.0
        self.roundings: dict[str, float] = {}
        """Layer -> relative error for random rows, which includes the rounding of activations."""

    def watch(
        self, model: torch.nn.Module, names: dict[torch.nn.Module, str] | None = None
    ) -> None:
        """Compare each linear layer of a new model when vLLM has converted its weights.

        Args:
            names: layer -> its name, for the layers to compare. None: all layers.
        """
        if names is None:
            names = {module: name for name, module in model.named_modules()}
        for layer in names:
            method: Any = getattr(layer, "quant_method", None)
            known = is_linear(layer) or is_mixture(layer)
            if known and hasattr(method, "process_weights_after_loading"):
                convert = method.process_weights_after_loading
                if not isinstance(convert, partial):  # a method may belong to several layers
                    vars(method)["process_weights_after_loading"] = partial(
                        self._process, names, method, convert
                    )

    def _process(
        self,
        names: dict[torch.nn.Module, str],
        method: Any,
        convert: Callable[..., None],
        layer: torch.nn.Module,
    ) -> None:
        name = names.get(layer, type(layer).__name__)
        if is_mixture(layer):
            return self._process_experts(name, method, convert, layer)
        loaded = held_by(layer)
        with _given_to_kernel(kernel_of(layer, method), layer) as given:
            convert(layer)
        if not loaded:
            return
        key = type(layer).__name__, class_of_linear(layer, method), GIVEN
        with self._comparing(key, name):
            self._compare(key, name, layer, method, loaded, given or loaded)

    @contextmanager
    def _comparing(self, key: RowKey, name: str) -> Iterator[None]:
        """Count the seconds of a comparison. If it raises, the layer is incorrect."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # also errors of vLLM, such as an operator that is missing
            self.rows.add(key, name, float("inf"), f"it raised {quote(error)}")
        self.seconds += time.monotonic() - began

    def _process_experts(
        self, name: str, method: Any, convert: Callable[..., None], layer: torch.nn.Module
    ) -> None:
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

    def _compare(
        self,
        key: RowKey,
        name: str,
        layer: torch.nn.Module,
        method: Any,
        loaded: Held,
        given: Held,
    ) -> None:
        weight = _weights(layer, method, given)
        if weight is None:
            why = f"unknown format: {', '.join(sorted(given))}"
            return self.rows.skip(key, name, why)
        if given is not loaded:
            self._compare_tensors(key, name, layer, method, loaded, weight)
        bias = loaded.get("bias")
        dtype = getattr(layer, "params_dtype", weight.dtype)
        inputs = inputs_of(layer, method, given)

        def call(x: torch.Tensor, what: str, exact: torch.Tensor, allowed: torch.Tensor) -> None:
            got = method.apply(layer, x, None if is_one_hot else getattr(layer, "bias", None))
            share, problem = Near(exact, allowed, dtype).deviation([got], ["the result"], None)
            self.rows.add(key, name, share, problem and f"{problem}; {what}")

        device, features = weight.device, weight.shape[1]
        step = PROBE_STEPS[dtype]
        tops = weight.abs().amax(1, keepdim=True).double()
        is_one_hot = True
        for start in range(0, features, COLUMNS):
            some = weight[:, start : start + COLUMNS].double()
            x = torch.zeros(some.shape[1], features, dtype=dtype, device=device)
            x[:, start : start + COLUMNS].fill_diagonal_(inputs.most)
            exact = (some * inputs.most).t()
            allowed = step * (exact.abs() + (tops * inputs.most).t() / 16)
            call(x, f"one-hot rows from feature {start}", exact, allowed)
        is_one_hot = False
        numbers = inputs.drawn(max(self.sizes), features, self._generator).to(device)
        equal = torch.full((2, features), inputs.most, dtype=torch.float64, device=device)
        exact = _product(torch.cat((numbers, equal)), weight, bias)
        lost = LOST_IN_SUMS * features if inputs.coarse else 0.0
        allowed = self._allowed(torch.cat((numbers, equal)), weight, exact, step, lost)
        x = torch.cat((numbers, equal)).to(dtype)
        call(x[-2:].clone(), "rows of equal numbers", exact[-2:], allowed[-2:])
        for size in self.sizes:
            call(x[:size].clone(), f"{size} random rows", exact[:size], allowed[:size])
        given_x: dict[str, Any] = {"generator": self._generator, "dtype": torch.float32}
        any_x = torch.randn(KEPT, features, **given_x)
        any_x[:, 0] = 32  # the step of int8 is a quarter of the other numbers
        x_any = (any_x * inputs.most / 32).to(device, dtype)
        product = _product(x_any.double(), weight, bias)
        rounded = method.apply(layer, x_any.clone(), getattr(layer, "bias", None)).double()
        self.roundings[name] = float((rounded - product).norm() / product.norm())
        if name not in self.kept:
            few = Near(exact[:KEPT].float(), allowed[:KEPT].float(), dtype)
            self.kept[name] = _Kept(key[0], key[1], layer, x[:KEPT].clone(), few)

    @staticmethod
    def _allowed(
        x: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor, step: float, lost: float
    ) -> torch.Tensor:
        """Return the tolerance for roundings of the result, of each weight, and of sums."""
        norms = x.norm(dim=1).unsqueeze(1) * weight.double().norm(dim=1) * weight.shape[1] ** -0.5
        allowed: torch.Tensor = step * exact.abs() + 2 * (step + lost) * norms
        return allowed

    def _compare_tensors(
        self,
        key: RowKey,
        name: str,
        layer: torch.nn.Module,
        method: Any,
        loaded: Held,
        weight: torch.Tensor,
    ) -> None:
        """Compare the tensors that a kernel got with the tensors of the checkpoint.

        vLLM quantises some again: parts of a fused layer with one scale each, or weights that are
        not quantised in the checkpoint.
        """
        key = key[0], key[1], LOADED
        exact = _weights(layer, method, loaded)
        if exact is None:
            return self.rows.skip(key, name, f"unknown format: {', '.join(sorted(loaded))}")
        wide = exact.double()
        kernel = kernel_of(layer, method)
        is_int = "Int" in type(kernel).__name__
        tops = wide.abs().amax()
        allowed = tops / 127 if is_int else wide.abs() / 16 + tops / 448 * 2.0**-9
        share, problem = Near(wide, allowed + torch.zeros_like(wide), torch.float32).deviation(
            [weight], ["the weight"], None
        )
        self.rows.add(key, name, share, problem)

    def compare_again(self) -> None:
        """Compare some rows of each layer again, after an update with the same weights.

        Blocks of the sizes of scales are filled with NaN first: a kernel may hold a pointer to a
        tensor that the update has freed, and read the old numbers until the memory is used again.
        """
        scales = [each for kept in self.kept.values() for each in held_by(kept.layer).values()]
        sizes = {each.nbytes for each in scales if each.nbytes <= LARGEST_SCALES}
        held = [freed_nan(sizes, device) for device in {each.device for each in scales}]
        for name, kept in self.kept.items():
            key = kept.kind, kept.cls, RELOADED
            with self._comparing(key, name):
                method: Any = kept.layer.quant_method
                got = method.apply(kept.layer, kept.x, getattr(kept.layer, "bias", None))
                self.rows.add(key, name, *kept.wanted.deviation([got], ["the result"], None))
        del held


def class_of_linear(layer: torch.nn.Module, method: Any) -> str:
    """Return the class that vLLM chose for a layer."""
    kernel = kernel_of(layer, method)
    return described_class(type(method if kernel is None else kernel))


def inputs_of(layer: torch.nn.Module, method: Any, given: Held) -> _Inputs:
    """Return the numbers that a layer's quantisation of activations represents exactly."""
    weight = given.get("weight")
    coarse = weight is not None and weight.is_floating_point() and weight.itemsize == 1
    config = getattr(kernel_of(layer, method), "config", None)
    symmetric = getattr(config, "input_symmetric", True)
    scale, offset = given.get("input_scale"), given.get("input_zero_point")
    unit = 2.0**-6 if scale is None else float(scale.max())
    if coarse:
        return _Inputs(unit if scale is not None else 2.0**-7, -448, 448, 0, coarse=True)
    return _Inputs(
        unit, -127 if symmetric else -128, 127, 0 if offset is None else int(offset.max()), False
    )


def _weights(layer: torch.nn.Module, method: Any, held: Held) -> torch.Tensor | None:
    found: Any = layer
    out, features = (
        (found.num_embeddings_per_partition, found.embedding_dim)
        if hasattr(found, "embedding_dim")
        else (
            getattr(found, "output_size_per_partition", found.output_size),
            getattr(found, "input_size_per_partition", found.input_size),
        )
    )
    kernel = kernel_of(layer, method)
    config = getattr(method, "quant_config", None)
    return dequantised(
        held,
        (out, features),
        getattr(layer, "logical_widths", [out]),
        getattr(layer, "weight_block_size", None),
        from_one=getattr(config, "checkpoint_format", "") != "gptq_v2" and kernel is not None,
    )


@contextmanager
def new_models(watch: Callable[[Any, torch.nn.Module], object]) -> Iterator[None]:
    """Inside the block, call `watch(configuration, model)` for each model that vLLM's loader
    creates, before it loads the weights."""
    make: Any = import_module(f"{LOADER}.utils").initialize_model

    @wraps(make)
    def made(*args: Any, **named: Any) -> torch.nn.Module:
        model: torch.nn.Module = make(*args, **named)
        watch(named["vllm_config"] if "vllm_config" in named else args[0], model)
        return model

    with ExitStack() as back:
        for name, module in [*sys.modules.items()]:
            if name.startswith(LOADER) and vars(module).get("initialize_model") is make:
                back.callback(setattr, module, "initialize_model", make)
                vars(module)["initialize_model"] = made
        yield


@contextmanager
def _given_to_kernel(kernel: Any, layer: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Copy the layer's tensors when vLLM passes them to its kernel; empty without a kernel."""
    given: dict[str, torch.Tensor] = {}
    convert = getattr(kernel, "process_weights_after_loading", None)
    if convert is None:
        yield given
        return

    def noting(of: torch.nn.Module) -> None:
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
