"""Which class computes each quantised layer of a model, and why vLLM did not take another class.

Nothing is replaced here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from ...dispatch.resolver import STOCK
from ...engine.facts import KernelUse
from ...text import quote
from .expert_kernels import Offers, known_experts, offers_for, refusal_by

if TYPE_CHECKING:
    import torch

LINEAR_KERNELS = "vllm.model_executor.kernels.linear"
"""vLLM's package with the classes, their bases and the lists."""

SEVERAL = ("Dynamic", "TritonOr")
"""Parts of the names of vLLM classes that choose among kernels in each call."""


class Scheme(NamedTuple):
    """vLLM's names for one scheme, equal in 0.26 to 0.33. MXFP6 exists from 0.27.

    Args:
        table: the list of classes by platform.
        bases: the base classes; each class of the list extends one of them.
        flags: keys of `linear_backend_per_quant`, which exists from 0.30.
    """

    table: str
    bases: tuple[str, ...]
    flags: tuple[str, ...]


SCHEMES = {
    "fp8_linear": Scheme("_POSSIBLE_FP8_KERNELS", ("FP8ScaledMMLinearKernel",), ("fp8_w8a8",)),
    "fp8_block_linear": Scheme(
        "_POSSIBLE_FP8_BLOCK_KERNELS",
        ("Fp8BlockScaledMMLinearKernel", "FP8ScaledMMLinearKernel"),
        ("fp8_block_w8a8",),
    ),
    "wfp8a16_linear": Scheme(
        "_POSSIBLE_WFP8A16_KERNELS", ("FP8ScaledMMLinearKernel",), ("w8a16_fp8",)
    ),
    "int8_linear": Scheme("_POSSIBLE_INT8_KERNELS", ("Int8ScaledMMLinearKernel",), ("int8_w8a8",)),
    "wna16_linear": Scheme("_POSSIBLE_KERNELS", ("MPLinearKernel",), ("mixed_precision",)),
    "mxfp8_linear": Scheme("_POSSIBLE_MXFP8_KERNELS", ("Mxfp8LinearKernel",), ("mxfp8",)),
    "mxfp6_linear": Scheme("_POSSIBLE_MXFP6_KERNELS", ("MxFp6LinearKernel",), ("mxfp6",)),
    "mxfp4_linear": Scheme("_POSSIBLE_MXFP4_KERNELS", ("MxFp4LinearKernel",), ("mxfp4",)),
    "nvfp4_linear": Scheme(
        "_POSSIBLE_NVFP4_KERNELS", ("NvFp4LinearKernel",), ("nvfp4_w4a4", "nvfp4_w4a16")
    ),
}


def is_linear(layer: torch.nn.Module) -> bool:
    """Return whether a layer computes a product: a linear layer, or the head for the logits."""
    bases = {base.__name__ for base in type(layer).__mro__}
    return bool(bases & {"LinearBase", "ParallelLMHead"})


def is_mixture(layer: torch.nn.Module) -> bool:
    """Return whether a layer has the weights of routed experts."""
    return any(name.startswith("w13_") for name in layer._parameters)


def class_of_experts(method: Any) -> str:
    """Return the class that vLLM chose for a layer's experts."""
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return described_class(type(method if experts is None else experts))


def kernel_of(layer: torch.nn.Module, method: Any) -> Any:
    """Return the kernel that vLLM chose for a layer, or None."""
    for holder in (method, getattr(layer, "scheme", None)):
        for value in vars(holder).values() if holder is not None else ():
            if any(base.__module__.startswith(LINEAR_KERNELS) for base in type(value).__mro__):
                return value
    return None


def described_class(cls: type) -> str:
    """Return the name of a class, and whether it chooses among kernels in each call."""
    return cls.__name__ + ", dispatches inside" * any(part in cls.__name__ for part in SEVERAL)


class Chosen(NamedTuple):
    """The class that vLLM chose for a layer.

    Args:
        op: the op of the layer's scheme; empty if no order can choose its class.
        cls: the class; `NoneType` without an op.
        label: the class, for people.
        config: vLLM's description of the layer, or None.
    """

    op: str
    cls: type
    label: str
    config: Any


def chosen_for(layer: torch.nn.Module) -> Chosen | None:
    """Return the class of a linear layer or of experts, and None for other layers."""
    method: Any = getattr(layer, "quant_method", None)
    if method is None or not (is_linear(layer) or is_mixture(layer)):
        return None
    if is_mixture(layer):
        offers, cls = offers_for(method), getattr(method, "experts_cls", None)
        if offers is None or cls is None:
            return Chosen("", type(None), class_of_experts(method), None)
        return Chosen(offers.op, cls, described_class(cls), offers)
    kernel, own = kernel_of(layer, method), getattr(layer, "scheme", None) or method
    if kernel is None:
        return Chosen("", type(None), described_class(type(own)), None)
    return Chosen(_op_of(kernel, own), type(kernel), described_class(type(kernel)), kernel.config)


def uses_of(models: Iterable[torch.nn.Module]) -> list[KernelUse]:
    """Return the classes of a model's linear layers and experts; empty if no layer is quantised.

    Args:
        models: the parts of the model, on any device, with or without weights.
    """
    found: dict[tuple[str, str], KernelUse] = {}
    for model in models:
        for name, layer in model.named_modules():
            chosen = chosen_for(layer)
            if chosen is None:
                continue
            op, cls, label, config = chosen
            use = found.setdefault((op, label), KernelUse(op, label, cls))
            key = "" if config is None else repr(config)
            use.layers.setdefault(key, []).append(name)
            if config is not None:
                use.configs[key] = config
    is_quantised = any(not label.startswith("Unquantized") for _, label in found)
    return [*found.values()] if is_quantised else []


def _op_of(kernel: Any, holder: object) -> str:
    """Return the op of a kernel; empty if no list has its scheme."""
    bases = {base.__name__ for base in type(kernel).__mro__}
    key: Any = getattr(kernel.config, "activation_quant_key", None)
    if getattr(kernel.config, "bmm_batch_size", None) is not None:
        return ""  # vLLM has a fixed list for batched products
    if bases & {"FP8ScaledMMLinearKernel", "Fp8BlockScaledMMLinearKernel"}:
        if "W8A16" in type(holder).__name__:
            return "wfp8a16_linear"
        return "fp8_block_linear" if key.scale.group_shape.is_per_group() else "fp8_linear"
    return next((op for op, scheme in SCHEMES.items() if bases & {*scheme.bases}), "")


def listed_classes(op: str) -> list[type]:
    """Return vLLM's list of an op for this platform; empty if this vLLM has none."""
    from vllm.platforms import current_platform

    if op not in SCHEMES:
        return known_experts(op)
    return list(table_of(op).get(current_platform._enum, ()))


def known_classes(op: str) -> list[type]:
    """Return vLLM's classes for an op on all platforms."""
    if op not in SCHEMES:
        return known_experts(op)
    return [cls for listed in table_of(op).values() for cls in listed]


def table_of(op: str) -> dict[Any, list[type]]:
    found: dict[Any, list[type]] = getattr(import_module(LINEAR_KERNELS), SCHEMES[op].table, {})
    return found


def refusal_of(cls: Any, config: Any) -> str:
    """Return vLLM's reason why a class cannot compute a layer; empty if it can."""
    from vllm import envs
    from vllm.platforms import current_platform

    if isinstance(config, Offers):
        return config.backend_for(cls)[1]
    if cls.__name__ in getattr(envs, "VLLM_DISABLED_KERNELS", ()):
        return "VLLM_DISABLED_KERNELS contains it"
    try:
        capability = current_platform.get_device_capability()
        number = None if capability is None else capability.to_int()
        least = cls.get_min_capability() if hasattr(cls, "get_min_capability") else 0
        if number and number < least:
            return f"it needs capability {least}, the device has {number}"
        if hasattr(cls, "is_supported") and (why := refusal_by(cls, "is_supported", number)):
            return why
        return refusal_by(cls, "can_implement", config)
    except Exception as error:  # a class may be third-party code
        return f"it raised {quote(error)}"


def others_of(use: KernelUse) -> dict[str, str]:
    """Return class -> why vLLM did not take it, for the other classes of vLLM's list."""
    found: dict[str, str] = {}
    for cls in listed_classes(use.op) if use.op else ():
        if cls is use.cls:
            continue
        whys: Counter[str] = Counter()
        for key, names in use.layers.items():
            whys[refusal_of(cls, use.configs[key])] += len(names)
        (why, count), *_ = whys.most_common()
        some = f" (on {count} of {use.count} layers)" * (count < use.count)
        found[cls.__name__] = (why or f"it can, but {use.name} precedes it") + some
    return found


def kernel_row(use: KernelUse, impl_id: str = STOCK.impl_id) -> dict[str, Any]:
    """Return a class as JSON: its op and implementation, or None if no order can choose it; its
    number of layers; and why vLLM did not take the others of its list."""
    return {
        "op": use.op or None,
        "class": use.name,
        "impl": impl_id if use.op else None,
        "layers": use.count,
        "others": others_of(use),
    }
