"""Variants of a real model (a LoRA adapter, quantised weights) and their float32 results."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
"""The linear layers of a decoder."""

INT8, FP8, INT4, INT4_ZEROS = "int8", "fp8", "int4", "int4 with zero points"

GROUP = 64
"""Input features with one scale in int4."""

RANK = 8


def seconds_of_fp8() -> float:
    """Seconds of one fp8 product of 16 rows. On some CPUs PyTorch only has a loop for it, and a
    model of 135 million parameters takes seconds per token."""
    import torch

    left, right = (torch.ones(rows, 576).to(torch.float8_e4m3fn) for rows in (16, 1536))
    one, before = torch.ones(()), time.perf_counter()
    torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)
    return time.perf_counter() - before


def adapter(model: Path, folder: Path) -> Path:
    """A LoRA adapter of random weights for every projection, large enough to change answers."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    pick = torch.Generator().manual_seed(0)
    tensors = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 (not a dict)
            if name.split(".")[-2] not in PROJECTIONS:
                continue
            high, low = weights.get_slice(name).get_shape()
            of = f"base_model.model.{name.removesuffix('.weight')}"
            wide = torch.randn(RANK, low, generator=pick) / low**0.5
            deep = torch.randn(high, RANK, generator=pick) * 0.02
            tensors[f"{of}.lora_A.weight"] = wide.to(torch.bfloat16)
            tensors[f"{of}.lora_B.weight"] = deep.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": PROJECTIONS,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def quantised(model: Path, folder: Path, form: str, *, symmetric: bool = True) -> Path:
    """A compressed-tensors checkpoint: 8 bits with one scale per output channel and dynamic ones
    per token (`symmetric`), or int4 weights with one scale per group."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors: dict[str, Any] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.split(".")[-2] not in PROJECTIONS:
            tensors[name] = weight
            continue
        if form in (INT4, INT4_ZEROS):
            own = int4(weight, zeros=form == INT4_ZEROS)
            tensors |= {f"{name}_{part}": tensor for part, tensor in own.items()}
            continue
        wide = weight.float()
        scale = wide.abs().amax(-1, keepdim=True) / _most(form)
        scaled = wide / scale
        tensors[name] = (
            scaled.round().to(torch.int8) if form == INT8 else scaled.to(torch.float8_e4m3fn)
        )
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"num_bits": 8, "type": "float" if form == FP8 else "int", "symmetric": True}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
    }
    group["input_activations"]["symmetric"] = symmetric
    if form in (INT4, INT4_ZEROS):
        group["input_activations"] = None
        group["weights"] |= {"num_bits": 4, "strategy": "group", "group_size": GROUP}
        group["weights"]["symmetric"] = form == INT4
    formats = {INT8: "int-quantized", FP8: "float-quantized"}
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": formats.get(form, "pack-quantized"),
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def int4(weight: Any, *, zeros: bool) -> dict[str, Any]:
    """The tensors of a weight in int4, by the end of their names."""
    import torch

    groups = weight.float().unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15 if zeros else groups.abs().amax(-1, keepdim=True) / 7
    scale = scale.clamp(min=1e-6).to(torch.bfloat16).float()
    zero = (-low / scale).round().clamp(0, 15) if zeros else torch.full_like(low, 8)
    values = (groups / scale + zero).round().clamp(0, 15).flatten(-2)
    found = {
        "packed": packed(values),
        "scale": scale.squeeze(-1).to(torch.bfloat16),
        "shape": torch.tensor(weight.shape),
    }
    return found | ({"zero_point": packed(zero.squeeze(-1).t()).t().contiguous()} if zeros else {})


def packed(values: Any) -> Any:
    """Eight 4-bit numbers of the last dimension in each int32, the first in the lowest bits."""
    import torch

    shifts = torch.arange(8) * 4
    whole = (values.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
    return whole.where(whole < 2**31, whole - 2**32).to(torch.int32)


def merge(model: Any, folder: Path) -> None:
    """Add an adapter's products to transformers' model."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    for name in (name for name in tensors if ".lora_A." in name):
        low, high = tensors[name], tensors[name.replace(".lora_A.", ".lora_B.")]
        of = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        weights[of] += config["lora_alpha"] / config["r"] * (high.float() @ low.float())


def round_as(model: Any, form: str) -> None:
    """Round the weights of transformers' model like `quantised`, and the inputs of its layers."""
    import torch

    def rounded(values: torch.Tensor) -> torch.Tensor:
        scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / _most(form)
        scaled = values / scale
        if form == INT8:
            return scaled.round() * scale
        return scaled.to(torch.float8_e4m3fn).float() * scale

    for name, layer in model.named_modules():
        if name.split(".")[-1] in PROJECTIONS:
            layer.weight.copy_(rounded(layer.weight))
            layer.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))


def _most(form: str) -> float:
    """The largest number of a form."""
    import torch

    return 127.0 if form == INT8 else torch.finfo(torch.float8_e4m3fn).max
