"""Split vLLM's compile ranges, so a graph keeps vLLM's operator at sizes with `stock`.

In mode VLLM_COMPILE vLLM compiles the graphs separately for each range of token counts. vllm-fl
splits a range further (`engine/ranges.py`). vLLM's ranges cannot end at a single token, so 1 is a
separate size.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import TYPE_CHECKING, Any

from ...dispatch.chain import Chain
from ...engine.ranges import Range, range_edge

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, VllmConfig


def is_compiled_by_range(vllm_config: VllmConfig) -> bool:
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    is_inductor = compilation.backend in ("", "inductor")
    return is_inductor and compilation.mode == CompilationMode.VLLM_COMPILE


def split(
    vllm_config: VllmConfig, chains: Collection[Chain], entry: MutableMapping[str, Any]
) -> None:
    """Split vLLM's compile ranges for a plan, and undo the split of an earlier plan. `chains` has
    the candidates of ops that a graph pass replaces only at some sizes. `entry` stores the added
    edge for a later call."""
    compilation = vllm_config.compilation_config
    if (ours := entry.pop("edge", None)) == 1:
        compilation.compile_sizes = [n for n in compilation.compile_sizes if n != 1]
    elif ours is not None:
        kept = (n for n in compilation.compile_ranges_endpoints if n != ours)
        compilation.compile_ranges_endpoints = [*kept]
    if not chains or not is_compiled_by_range(vllm_config):
        return
    largest = vllm_config.scheduler_config.max_num_batched_tokens
    captured = max(compilation.cudagraph_capture_sizes or (), default=0)
    edge, ends = range_edge(chains, largest, captured), compilation.compile_ranges_endpoints or ()
    if edge == 1 and _can_be_alone(compilation):
        entry["edge"] = 1
        compilation.compile_sizes = [1, *(compilation.compile_sizes or ())]
    elif edge not in (None, 1, *ends):
        entry["edge"] = edge
        compilation.compile_ranges_endpoints = sorted({*ends, edge})


def _can_be_alone(compilation: CompilationConfig) -> bool:
    """Whether 1 may be added to `compile_sizes`. vLLM would also compile encoders for it, with 1 as
    each symbolic size, which some of their shapes do not allow."""
    sizes = compilation.compile_sizes or ()
    return 1 not in sizes and not getattr(compilation, "compile_mm_encoder", False)


def compiled_range(vllm_config: VllmConfig) -> Range:
    """Return the token counts of the graph that vLLM is compiling."""
    from vllm.compilation.passes.inductor_pass import get_pass_context

    compiled = get_pass_context().compile_range
    sizes = vllm_config.compilation_config.compile_sizes or ()
    return Range(compiled.start, compiled.end).without(sizes)
