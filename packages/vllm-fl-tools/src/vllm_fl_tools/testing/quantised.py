"""The check of classes for quantised linear layers, on layers of vLLM with made weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vllm_fl.dispatch import get_default_manager
from vllm_fl.plugins.types import LinearKernelImpl
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


def kernel_cases(backend: str) -> list[tuple[LinearKernelImpl, str]]:
    """Return (class, format) of an installed backend's classes for quantised linear layers."""
    known = get_default_manager().registry.snapshot().impls_by_op
    return [
        (impl, form)
        for form, (op, *_) in FORMS.items()
        for impl in known.get(op, ())
        if isinstance(impl, LinearKernelImpl) and impl.impl_id == backend
    ]


def quantised_layers(impl: LinearKernelImpl, form: str, device: torch.device) -> None:
    """The class computes made weights correctly, also after they are loaded again.

    Raises:
        Refused: the class is not available, or does not support the layer.
    """
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from vllm_fl.integration.patchers.kernel_classes import uses_of
    from vllm_fl.integration.patchers.linear_kernels import first_in_lists, kernel_class
    from vllm_fl_verify.quantised import MADE_FEATURES, MADE_OUT, MadeLayer

    if (verdict := impl.availability()) is not True:
        raise Refused(f"{impl.impl_id} is not available: {verdict}")
    op, dtype, seed = impl.op_name, torch.bfloat16, torch.seed() % 2**31
    with vllm_process(dtype):
        cls, problem = kernel_class(op, impl)
        expect(not problem, problem)
        quantisation, name = quantisation_of(form), "model.layers.0.mlp.down_proj"
        try:
            with first_in_lists({op: [cls]}), torch.device("meta"):
                layer = ReplicatedLinear(
                    MADE_FEATURES, MADE_OUT, bias=False, quant_config=quantisation, prefix=name
                )
        except ValueError as error:  # no class supports it
            raise Refused(quote(error)) from error
        made = MadeLayer(get_current_vllm_config(), quantisation, device, dtype, seed, True)
        uses = uses_of([torch.nn.ModuleDict({name.replace(".", "_"): layer})])
        problem, remark = made.compare(op, cls, uses)
    expect(not problem, f"{problem} (seed {seed})")
    if "not verified" in remark:
        raise Refused(remark)


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
