"""The check of classes for quantised layers, on layers of vLLM with made weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.types import KernelImpl, LinearKernelImpl
from vllm_fl.text import quote

from .subject import HIDE_FRAMES, Refused, expect

__tracebackhide__ = HIDE_FRAMES

PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
PER_CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
FLOAT = {"type": "float"}

FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int8": ("int8_linear", PER_CHANNEL, PER_TOKEN),
    "int8 asymmetric": ("int8_linear", PER_CHANNEL, PER_TOKEN | {"symmetric": False}),
    "int4": ("wna16_linear", GROUPS, None),
    "int4 with zeros": ("wna16_linear", GROUPS | {"symmetric": False}, None),
    "fp8": ("fp8_linear", PER_CHANNEL | FLOAT, PER_TOKEN | FLOAT),
    "fp8 weights": ("wfp8a16_linear", PER_CHANNEL | FLOAT, None),
}
"""Format of a checkpoint -> (op, weights, activations) of compressed-tensors."""

EXPERTS = {"num_experts": 16, "top_k": 2, "hidden_size": 256, "intermediate_size": 128}
"""The sizes of a made layer of experts."""


def kernel_cases(backend: str) -> list[tuple[KernelImpl, str]]:
    """Return (class, format) of an installed backend's classes for quantised layers and experts."""
    known = get_default_manager().registry.snapshot().impls_by_op
    return [
        (impl, form)
        for form, (op, *_) in FORMS.items()
        for name in (op, op.replace("_linear", "_experts"))
        for impl in known.get(name, ())
        if isinstance(impl, KernelImpl) and impl.impl_id == backend
    ]


def quantised_layers(impl: KernelImpl, form: str, device: torch.device) -> None:
    """The class computes made weights correctly. Linear layers are also compared after their
    weights are loaded again.

    Raises:
        Refused: the class is not available, or does not support the layer.
    """
    from vllm_fl.integration.patchers.linear_kernels import first_in_lists, kernel_class

    if (verdict := impl.availability()) is not True:
        raise Refused(f"{impl.impl_id} is not available: {verdict}")
    op, seed = impl.op_name, torch.seed() % 2**31
    with vllm_process(torch.bfloat16):
        cls, problem = kernel_class(op, impl)
        expect(not problem, problem)
        compare = _compare_linear if isinstance(impl, LinearKernelImpl) else _compare_experts
        try:
            with first_in_lists({op: [cls]}):
                problem, left = compare(op, cls, form, device, seed)
        except (ValueError, NotImplementedError) as error:  # no class supports it
            raise Refused(quote(error)) from error
    expect(not problem, f"{problem} (seed {seed})")
    if left:
        raise Refused(left)


def _compare_linear(
    op: str, cls: Any, form: str, device: torch.device, seed: int
) -> tuple[str, str]:
    """Return (why the class is incorrect, why it was not compared). Both may be empty."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from vllm_fl.integration.patchers.kernel_classes import uses_of
    from vllm_fl_verify.quantised import MADE_FEATURES, MADE_OUT, MadeLayer

    quantisation, name = quantisation_of(form), "model.layers.0.mlp.down_proj"
    with torch.device("meta"):
        layer = ReplicatedLinear(
            MADE_FEATURES, MADE_OUT, bias=False, quant_config=quantisation, prefix=name
        )
    made = MadeLayer(get_current_vllm_config(), quantisation, device, torch.bfloat16, seed, True)
    uses = uses_of([torch.nn.ModuleDict({name.replace(".", "_"): layer})])
    problem, remark = made.compare(op, cls, uses)
    return problem, remark if "not verified" in remark else ""


def _compare_experts(
    op: str, cls: Any, form: str, device: torch.device, seed: int
) -> tuple[str, str]:
    """Like `_compare_linear`, with a layer of experts."""
    from vllm_fl.integration.patchers.kernel_classes import chosen_for
    from vllm_fl_verify.quantised import fill
    from vllm_fl_verify.stock.linear import Linears
    from vllm_fl_verify.stock.rows import StockRows

    with torch.no_grad():
        with device:
            layer = made_experts(form, "model.layers.0.mlp.experts", EXPERTS)
        chosen = chosen_for(layer)
        if chosen is None or chosen.cls is not cls:
            why = chosen.config.backend_for(cls)[1] if chosen and chosen.config else ""
            return "", f"{cls.__name__} does not support the layer: {why or 'vLLM chose another'}"
        fill(layer, torch.Generator("cpu").manual_seed(seed))
        linears = Linears(StockRows(), seed=seed)
        linears.watch({layer: "experts"})
        layer.quant_method.process_weights_after_loading(layer)
    (row,) = linears.rows.to_json()
    return next(iter(row["problems"]), ""), next(iter(row["skipped"]), "")


def made_experts(form: str, name: str, sizes: dict[str, int]) -> Any:
    """Create vLLM's layer of quantised experts."""
    from vllm.model_executor.layers import fused_moe

    older = "FusedMoE"
    make = getattr(fused_moe, "FusedMoEFactory", None) or getattr(fused_moe, older)
    whole = make(**sizes, quant_config=quantisation_of(form), prefix=name)
    return getattr(whole, "routed_experts", whole)


def quantisation_of(form: str) -> Any:
    """Return vLLM's configuration of a checkpoint format."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    _, weights, activations = FORMS[form]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if "int4" in form else f"{weights['type']}-quantized",
        "ignore": [],
        "config_groups": {"group_0": group},
    }
    return compressed_tensors.CompressedTensorsConfig.from_config(config)


@contextmanager
def vllm_process(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, this process is vLLM's only rank, with the default dtype of a model."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.utils.torch_utils import set_default_torch_dtype

    getattr(torch.cpu, "_init_amx", bool)()  # vLLM's kernels for CPUs use AMX
    with TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        store = (Path(folder) / "store").as_uri()
        parallel_state.init_distributed_environment(1, 0, store, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        try:
            with set_default_torch_dtype(dtype):
                yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
