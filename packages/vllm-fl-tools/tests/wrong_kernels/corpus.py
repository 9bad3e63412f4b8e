"""What a wrong kernel is, and the list of them all."""

from __future__ import annotations

import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from vllm_fl.contracts import ModelSizes
from vllm_fl.plugins.types import BackendImplKind, OpImpl

SILU, GELU, NORM, ROTARY = "silu_and_mul", "gelu_and_mul", "rms_norm", "rotary_embedding"

LARGEST = 2048
SIZES = ModelSizes(160, 224, 4, 2, 32, 32, tokens=(1, LARGEST), max_position=4096)
"""The served model's: small, and widths that no sample of a contract has."""

MIXED = dataclasses.replace(
    SIZES,
    more={
        "experts": 8,
        "experts_per_token": 2,
        "expert_intermediate": 96,
        "expert_groups": 4,
        "expert_groups_per_token": 2,
        "dense_intermediate": 224,
        "router_experts": 8,
        "biased": 1,
        "linear_key_heads": 4,
        "linear_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "conv_features": 96,
        "conv_taps": 4,
        "conv_bias": 1,
        "gated_norm": 96,
        "gated_norm_groups": 2,
        "block_size": 64,
    },
)
"""Those of a model that has some of everything, but for latent attention: for ops beyond the
four."""

LATENT = dataclasses.replace(
    SIZES, more={"kv_lora_rank": 48, "qk_rope_head_dim": 16, "block_size": 64}
)
"""Those of a model with latent attention."""


def sizes_of(op: str) -> ModelSizes:
    """Those of a model that has the op."""
    if op == "concat_and_cache_mla":
        return LATENT
    return SIZES if op in (SILU, GELU, NORM, ROTARY) else MIXED


KINDS = MappingProxyType(
    {
        "sizes": "only for some token counts, rows or widths",
        "memory": "in the memory that they write, read, keep or return",
        "numerics": "only for some values, or slightly for all",
        "strides": "only for some layouts, positions or combinations of arguments",
        "state": "because they change the state of the process",
        "process": "depending on the place, time or caller of a call",
        "exceptions": "because they raise an exception instead of returning a result",
        "compiled": "only in inference mode or under a compiler",
        "graph": "only in a captured graph",
        "weights": "only on the tensors of a loaded model",
        "others": "in routing, quantisation, merging or cache writes",
        "batches": "in batches of engines: long, with runs, with repeats, one row shorter",
        "served": "at sizes of served models",
        "hostile": "for unusual valid inputs: NaN, padding, ties, empty tensors",
        "layouts": "for strided features, or in the layout of the result",
        "updates": "after weights were updated, or memory was allocated",
        "rounding": "in how they round, saturate or approximate",
        "routing": "in the choice of experts, or of their weights",
        "published": "in the same ways as published kernels",
    }
)
"""Kind of fault, and module here -> in what the kernels of that kind are wrong."""

UNUSUAL = "unusual"
"""The module of kernels that are right, in ways that few kernels are."""

WITHOUT_ENGINES = ("published", UNUSUAL)
"""Kinds that only verification at startup, with time for all token counts, and the kit judge."""


@dataclass(frozen=True)
class Wrong:
    """One wrong kernel, with what should see it.

    Args:
        name: of the kernel, unique.
        kind: the kind of fault: the module that has it.
        op: the op.
        fault: what is wrong, in a line.
        sees: what a user of the server would see.
        make: () -> the function, or (function, further fields of its OpImpl). Called for each
            time that the kernel is judged, so that it begins without a memory.
        start: whether verification at start takes it out, by name.
        kit: the check of the conformance kit that fails; empty for none. `preflight` is
            verification at start itself, which the kit runs too.
        why: why neither sees it; or why only one can.
        apart: it may harm what is judged in the same process.
        mode: how the engine runs the model.
        backend: what lowers the compiled form; Inductor takes seconds for each.
        sizes, dtype: the served model's.
        environ: variables of the process that is judged in.
        deadline: seconds after which that process hangs.
        impatient: the watchdog's limit is a second, for a short test.
        later: seconds after which an engine that serves it is asked once more.
    """

    name: str
    kind: str
    op: str
    fault: str
    sees: str
    make: Callable[[], Any]
    start: bool
    kit: str
    sizes: ModelSizes
    why: str = ""
    apart: bool = False
    mode: Literal["eager", "compiled"] = "eager"
    backend: str = "aot_eager"
    dtype: str = "bfloat16"
    environ: Mapping[str, str] = field(default_factory=dict)
    deadline: float = 240.0
    impatient: bool = False
    later: float = 0.0

    def __post_init__(self) -> None:
        if not (self.start and self.kit) and not self.why:
            raise ValueError(f"{self.name}: say why start, or the kit, does not see it")

    def impl(self) -> OpImpl:
        """The implementation, new."""
        made = self.make()
        fn, fields = made if isinstance(made, tuple) else (made, {})
        vendor = self.name
        return OpImpl(self.op, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor, **fields)


WHY_BEYOND = "the kit's model has fewer ops and tokens than a served model"

BEYOND_THE_KIT = frozenset(
    (
        "equal_neighbours_gdn_gating",
        "equal_neighbours_moe_topk",
        "half_of_the_rows_moe_sum",
        "half_of_the_rows_rms_norm_gated",
        "kept_by_place_fused_experts_w2",
        "kept_by_version_fused_experts_w13",
        "kept_by_version_rms_norm_gated_weight",
        "large_tiles_through_fp16_rms_norm_gated",
        "one_row_less_moe_topk",
        "partial_rotation_from_512",
        "positions_in_15_bits",
        "rotated_part_wraps_at_1024",
        "rows_in_ten_bits",
        "rows_of_an_expert",
        "tiles_change_places_fused_experts",
        "tiles_change_places_gdn_gating",
        "tiles_change_places_grouped_topk",
        "tiles_change_places_swigluoai_and_mul",
        "values_wrap_at_512",
        "wraps_at_1024_gelu_new",
        "wraps_at_1024_layer_norm",
        "wraps_at_1024_merge_attn_states",
        "wraps_at_1024_multimodal_rotary_embedding",
        "wraps_at_1024_quant_fp8_group",
        "wraps_at_1024_rms_norm_gated",
        "wraps_at_4096_mul_and_silu",
        "wraps_at_4096_quant_int8",
        "wraps_at_4096_xielu",
        "wraps_at_512_linear",
        "wraps_at_512_moe_sum",
        "wraps_at_512_moe_topk",
        "wraps_at_512_qk_norm_rope",
        "wraps_at_512_rms_norm",
        "wraps_at_512_rotary_embedding",
        "wraps_at_512_silu_and_mul",
    )
)
"""What start sees in the calls of a served model that the kit's own does not make
(`SizeRule.in_kit`), as `python -m wrong_kernels --only kit` has found."""

_found: list[Wrong] = []


def _fault(make: Callable[..., Any]) -> str:
    """Return the docstring in the form of `Wrong.fault`: not as a sentence."""
    text = " ".join((make.__doc__ or "").split()).removesuffix(".")
    word = text.partition(" ")[0]
    return text[:1].lower() + text[1:] if word[1:].islower() or len(word) == 1 else text


def wrong(
    op: str,
    sees: str,
    *,
    fault: str | None = None,
    start: bool = True,
    kit: str | None = None,
    **how: Any,
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Put the kernel that the decorated function makes into the corpus; fields as in `Wrong`. The
    docstring of the function describes the fault.

    By default, the check `preflight` of the kit sees what start sees, and the model has the op.
    """

    def decorate(make: Callable[[], Any]) -> Callable[[], Any]:
        kind = make.__module__.rpartition(".")[2]
        by = ("preflight" if start else "") if kit is None else kit
        how.setdefault("sizes", sizes_of(op))
        if make.__name__ in BEYOND_THE_KIT:
            by, how["why"] = "", WHY_BEYOND
        said = _fault(make) if fault is None else fault
        _found.append(Wrong(make.__name__, kind, op, said, sees, make, start, by, **how))
        return make

    return decorate


def wrong_kernel(
    op: str,
    sees: str,
    *,
    by: Callable[[str, Callable[..., Any]], Any] = lambda op, function: function,
    **how: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put what `by` makes of the op and the decorated function into the corpus: a kernel that
    remembers nothing, by default the function itself. All else is as in `wrong`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        make = functools.update_wrapper(functools.partial(by, op, function), function)
        wrong(op, sees, **how)(make)
        return function

    return decorate


def wrong_for(
    *ops: str | tuple[str, str],
    sees: str,
    by: Callable[[str, Callable[..., Any]], Any] | None = None,
    **how: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put one kernel for each of these ops into the corpus: what `by` makes of the op and the
    decorated function, or without `by` what the function makes of the op's name. It is called as
    the function and the op are; all else is as in `wrong`.

    An op may come with an argument's name: the function is given that, too, and so is the kernel's
    name, and the docstring in the place of `{}`.
    """

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        for each in ops:
            op, *argument = [each] if isinstance(each, str) else each
            of_op = functools.partial(make, op, *argument)
            if by is not None:
                of_op = functools.partial(by, op, functools.partial(make, *argument))
            name = "_".join([make.__name__, op, *argument])
            functools.update_wrapper(of_op, make).__name__ = name
            wrong(op, sees, fault=_fault(make).format(*argument), **how)(of_op)
        return make

    return decorate


@cache
def kernels() -> Mapping[str, Wrong]:
    """Every kernel by name, kind by kind: the wrong ones, then the unusual ones."""
    order = [*KINDS, UNUSUAL]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name in order:
            import_module(f"{__package__}.{module.name}")
    _found.sort(key=lambda each: order.index(each.kind))
    names = [each.name for each in _found]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"two kernels are called {twice}"
    return MappingProxyType({each.name: dataclasses.replace(each) for each in _found})


@cache
def corpus() -> Mapping[str, Wrong]:
    """Every wrong kernel by name, kind by kind."""
    return MappingProxyType({n: each for n, each in kernels().items() if each.kind != UNUSUAL})
