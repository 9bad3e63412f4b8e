"""Places that we take: what passes of vLLM's compiler put into graphs.

Some operators no code of vLLM's calls: a pass finds their parts in a compiled graph, and puts the
operator there. While the plan has such an op, the pass is turned on and its parts are left to
vLLM, so that it finds them; which implementation then runs is the operator's override
(`operators.py`). A pass that finds nothing says nothing: how often it found the op is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...contracts.binding import FusionPlace
from ...engine.facts import EngineFacts
from ...engine.plan import Plan
from ...logs import get_logger
from ...text import quote
from ..bindings import installed_bindings, places
from ..serving import plan_now
from .ir import ir_ops

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "Sites",
    "layers",
    "notes",
    "parts_left",
    "say",
    "sites",
    "switch",
    "turned_off",
    "watch",
]

log = get_logger("engine")


@dataclass
class Sites:
    """What a pass has done for one engine.

    Args:
        graphs: how many graphs it went through: 0 where all compiled code came from vLLM's cache,
            and nothing is known of what it found when that was filled.
        found: how many places it found in them.
    """

    graphs: int = 0
    found: int = 0


_counted: WeakKeyDictionary[Plan, dict[str, Sites]] = WeakKeyDictionary()
"""Plan -> op -> what its pass has done for the plan's engine."""

_watched: set[type] = set()


def _places() -> list[tuple[str, FusionPlace]]:
    return places(installed_bindings(), FusionPlace)


def _planned(plan: Plan) -> Iterator[tuple[str, FusionPlace]]:
    return ((op, place) for op, place in _places() if not plan.is_stock(op))


def turned_off(vllm_config: VllmConfig) -> list[str]:
    """The passes that the user turned off, asked before vLLM fills in its defaults."""
    passes = vllm_config.compilation_config.pass_config
    return [place.flag for _, place in _places() if getattr(passes, place.flag, None) is False]


def notes(facts: EngineFacts) -> dict[str, str]:
    """op -> why its pass cannot find it in this engine."""
    found = {op: _note(place, facts) for op, place in _places()}
    return {op: why for op, why in found.items() if why}


def _note(place: FusionPlace, facts: EngineFacts) -> str:
    if facts.mode == "eager":
        return "eager mode does not reach it: a pass of vLLM's compiler puts it into graphs"
    if not _is_there(place):
        return "vLLM has no pass for it on this platform"
    if place.flag in facts.passes_off:
        return f"pass_config.{place.flag} is false"
    off = [f"-{layer}" for layer in place.layers if f"-{layer}" in facts.custom_ops]
    return f"custom_ops has {off[0]}, without which vLLM's pass does not find it" if off else ""


def _is_there(place: FusionPlace) -> bool:
    """Whether this vLLM has the pass, and lets it run on this platform."""
    from vllm.config.compilation import PassConfig
    from vllm.platforms import current_platform

    alike: Callable[[], bool] | None = getattr(current_platform, "is_cuda_alike", None)
    return alike is not None and alike() and place.flag in PassConfig.__dataclass_fields__


def parts_left(plan: Plan) -> dict[str, str]:
    """Planned op -> why it is left to vLLM all the same: a planned op's pass looks for vLLM's own.

    An op of vLLM's IR is not among them: a graph has it as such until the passes are through.
    """
    in_ir = ir_ops()
    return {
        part: f"vLLM's pass for {op} looks for vLLM's own"
        for op, place in _planned(plan)
        for part in place.parts
        if part not in in_ir and not plan.is_stock(part)
    }


def layers(plan: Plan) -> Iterator[str]:
    """The layers, by the names in `custom_ops`, that planned ops' passes look for."""
    return (layer for _, place in _planned(plan) for layer in place.layers)


def switch(plan: Plan, vllm_config: VllmConfig, entry: MutableMapping[str, Any]) -> None:
    """Turn on the passes of planned ops, and off those that we turned on for an earlier plan.

    Args:
        plan: the plan.
        vllm_config: the engine's configuration, changed here.
        entry: where it is remembered which are ours.
    """
    passes, ours = vllm_config.compilation_config.pass_config, set(entry.get("passes", ()))
    wanted = {place.flag for _, place in _planned(plan)}
    for flag in ours - wanted:
        setattr(passes, flag, False)
    added = {flag for flag in wanted if not getattr(passes, flag, False)}
    for flag in added:
        setattr(passes, flag, True)
    entry["passes"] = sorted((ours & wanted) | added)


def watch(plan: Plan) -> None:
    """Count from now on what the passes of the plan's ops find, for its engine."""
    for op, place in _planned(plan):
        module, _, name = place.path.rpartition(".")
        try:
            cls: Any = getattr(import_module(module), name)
        except Exception as error:
            # A release may have it elsewhere: the flag may work all the same.
            log.warning("Op '%s': what vLLM's pass finds is not counted: %s", op, quote(error))
            continue
        _counted.setdefault(plan, {})[op] = Sites()
        if cls not in _watched:
            cls.__call__ = _counting(cls.__call__, op)
            _watched.add(cls)


def _counting(run: Callable[..., Any], op: str) -> Callable[..., Any]:
    """A pass's `__call__`, which leaves in `matched_count` what it found in this graph."""

    def counted(self: Any, graph: Any) -> Any:
        result = run(self, graph)
        plan = plan_now()
        known = None if plan is None else _counted.get(plan, {}).get(op)
        if known is not None:
            known.graphs += 1
            known.found += self.matched_count
        return result

    return counted


def sites(plan: Plan) -> Mapping[str, Sites]:
    """Op -> what its pass has done so far for the plan's engine, of the passes that are watched."""
    return _counted.get(plan, {})


def say(plan: Plan) -> None:
    """Log what the passes found, once the model is compiled: none is worth a warning."""
    for op, known in sites(plan).items():
        label = plan.entries[op].label
        if known.found:
            log.info("Op '%s': %s, by '%s'", op, _counted_as(known.found, "place"), label)
        elif known.graphs:
            log.warning(
                "Op '%s': vLLM's pass found no place for it in %s, so that '%s' does not "
                "run. Its parts may be of other sizes, or of a form that the pass does not know "
                "(`vllm-fl explain %s`)",
                op,
                _counted_as(known.graphs, "graph"),
                label,
                op,
            )
        else:
            log.info(
                "Op '%s': no graph was compiled, as where vLLM has them in its cache: in how many "
                "places '%s' runs is not counted",
                op,
                label,
            )


def _counted_as(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
