"""Split vLLM's compile ranges at the edges of orders by size, to inline choices in graphs.

In mode VLLM_COMPILE vLLM compiles the graphs separately for each range of token counts. vllm-fl
splits the ranges further (`engine/ranges.py`), and inlines a choice that applies to a whole range
(`lowering.py`). vLLM's ranges cannot end at a single token, so 1 is a separate size.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from ...dispatch.chain import Chain
from ...engine.ranges import Range, choice, range_edges
from ..engines import Engine
from .state import in_graphs

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig


def is_compiled_by_range(vllm_config: VllmConfig) -> bool:
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    is_inductor = compilation.backend in ("", "inductor")
    return is_inductor and compilation.mode == CompilationMode.VLLM_COMPILE


def split(
    vllm_config: VllmConfig, chains: Mapping[str, Chain], entry: MutableMapping[str, Any]
) -> None:
    """Split vLLM's compile ranges for a plan, and undo the splits of an earlier plan. `chains` has
    the candidates of ops that graphs choose separately for each range of sizes. `entry` stores the
    added edges for a later call."""
    compilation = vllm_config.compilation_config
    ours = set(entry.pop("edges", ()))
    if ours:
        compilation.compile_ranges_endpoints = [
            n for n in compilation.compile_ranges_endpoints or () if n not in ours
        ]
        compilation.compile_sizes = [
            n for n in compilation.compile_sizes or () if n not in ours or n != 1
        ]
    if not chains or not is_compiled_by_range(vllm_config):
        return
    largest = vllm_config.scheduler_config.max_num_batched_tokens
    captured = max(compilation.cudagraph_capture_sizes or (), default=0)
    ends = compilation.compile_ranges_endpoints
    added = [
        n
        for n in range_edges(chains.values(), largest, captured)
        if (_can_be_alone(compilation) if n == 1 else n not in (ends or ()))
    ]
    if not added:
        return
    entry["edges"] = added
    compilation.compile_ranges_endpoints = sorted({*(ends or ()), *(n for n in added if n > 1)})
    if 1 in added:
        compilation.compile_sizes = [1, *(compilation.compile_sizes or ())]


def _can_be_alone(compilation: CompilationConfig) -> bool:
    """Whether 1 may be added to `compile_sizes`. vLLM would also compile encoders for it, with 1 as
    each symbolic size, which some of their shapes do not allow."""
    sizes = compilation.compile_sizes or ()
    return 1 not in sizes and not getattr(compilation, "compile_mm_encoder", False)


def compiled(vllm_config: VllmConfig) -> list[Range]:
    """Return the ranges and single sizes that vLLM compiles the model for, in ascending order."""
    compilation = vllm_config.compilation_config
    sizes = sorted(n for n in compilation.compile_sizes or () if isinstance(n, int))
    largest = vllm_config.scheduler_config.max_num_batched_tokens
    ends = sorted({*(compilation.compile_ranges_endpoints or ()), largest})
    ranges = [Range(low + 1, high) for low, high in zip([0, *ends], ends, strict=False)]
    singles = [Range(n, n) for n in sizes]
    others = (range_.without(sizes) for range_ in ranges)
    return sorted({*singles, *others})


def compiled_range(vllm_config: VllmConfig) -> Range:
    """Return the token counts of the graph that vLLM is compiling."""
    from vllm.compilation.passes.inductor_pass import get_pass_context

    compiled = get_pass_context().compile_range
    sizes = vllm_config.compilation_config.compile_sizes or ()
    return Range(compiled.start, compiled.end).without(sizes)


def inlined_ranges(
    chains: Mapping[str, Chain], vllm_config: VllmConfig
) -> dict[str, list[tuple[Range, str | None]]]:
    """Return op -> [(range, id of the implementation that is inlined in it, or None)]. Ops that are
    inlined in no range are omitted."""
    if not is_compiled_by_range(vllm_config):
        return {}
    found = {}
    ranges = compiled(vllm_config)
    for op, chain in chains.items():
        chosen = [(sizes, choice(chain, sizes)) for sizes in ranges]
        if any(impl is not None for _, impl in chosen):
            found[op] = [(sizes, impl.impl_id if impl else None) for sizes, impl in chosen]
    return found


def describe_ranges(chosen: Sequence[tuple[Range, str | None]]) -> str:
    inside = [sizes for sizes, impl_id in chosen if impl_id is not None]
    where = ", ".join(str(sizes) for sizes in inside)
    return f"inlined in {len(inside)} of {len(chosen)} ranges ({where} tokens)"


def report(engine: Engine, chains: Mapping[str, Chain]) -> dict[str, list[dict[str, Any]]]:
    """Return the entry `ranges` of the worker report: op -> plan and counts of each range."""
    known = in_graphs(engine)
    return {
        op: [
            {
                "first": sizes.first,
                "last": sizes.last,
                "impl": impl_id,
                "places": known.inlined[op, sizes, impl_id or ""],
                "operators": known.stayed[op, sizes],
            }
            for sizes, impl_id in chosen
        ]
        for op, chosen in inlined_ranges(chains, engine.config).items()
    }
