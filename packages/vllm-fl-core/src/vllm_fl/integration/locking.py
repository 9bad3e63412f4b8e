"""What of an engine its lock has, and what differs: one answer for a start and for its preview."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..dispatch import get_default_manager
from ..engine.digest import contents_of
from ..engine.facts import EngineFacts
from ..engine.identity import THREADS, identity
from ..engine.plan import Plan
from ..engine.tables import standing
from ..errors import LockError
from ..logs import get_logger
from ..settings.lock import Locked
from ..settings.schema import Settings
from ..text import HIDDEN, is_secret, scrub
from .planning import plan_for, turned_on

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ["differences", "facts_of_lock", "ops_of", "refuse", "served_otherwise"]

log = get_logger("engine")

ENGINE, MODEL, PLAN = "engine arguments", "model configuration", "plan"
"""The facts that only an engine of a known model has."""

SETTING = "setting "

FREE = re.compile(
    "config|platform_files|table|lock|lock_mode|log_level|debug|metrics|shadow|shadow_file"
)
"""Settings that change nothing of what runs, and those whose files count, not their names."""

WHOLE = re.compile("(attention|kernel|lora|mamba|offload|speculative)_config")
"""The parts of vLLM's configuration that are arguments as they are."""

BESIDE = re.compile(
    "cache_dtype|policy|mode|backend|splitting_ops|compile_sizes|use_inductor_graph_partition"
)
"""Fields of other parts that arguments set by another name."""

OF_HOST = re.compile(
    r"(?i)^_|(^|_)(rank|ports?|addr|address|host|ip|ids?|dir|path|root|endpoint|url|cls|name"
    r"|tokenizer|memory_bytes)$|^(model|model_weights|transformers_version)$"
    r"|^(logging_config|observability_config|ir_op_priority)$"
)
"""Names of what differs between hosts, ranks and starts and computes nothing; and an argument that
our plan adds to, which is taken from where it does not."""

NAMED = 4
"""How many entries of one fact a line names."""


def facts_of_lock(facts: EngineFacts, config: VllmConfig, device: torch.device) -> dict[str, Any]:
    """Name -> what an engine is made of, its plan before verification included.

    It is JSON-able. No path is in it, and no secret. Empty where the settings name no lock.

    Args:
        facts: what its configuration says.
        config: vLLM's configuration, as a worker begins with it.
        device: on which it runs.
    """
    if facts.settings.locked is None:
        return {}
    registry = get_default_manager().registry
    snapshot = registry.snapshot()
    owners = {each.owner for each in registry.plugins if each.status != "disabled"}
    owners |= {*snapshot.owners.values(), *snapshot.authors.values()}
    found: dict[str, Any] = {**identity(device, owners), "python": platform.python_version()}
    found.pop(THREADS, None)
    found |= _nccl(device) | _variables() | _settings(facts.settings)
    if config.model_config is not None:
        found[ENGINE] = _arguments(facts, config)
        found[MODEL] = _plain(config.model_config.hf_config.to_dict())
        # How many threads an engine has is not known before it starts.
        found[PLAN] = ops_of(plan_for(facts, table=standing(facts, snapshot, device, serves=False)))
    return found


def ops_of(plan: Plan) -> dict[str, Any]:
    """Op -> who serves it: `impl`, and `rows` where it is ordered by size."""
    return {
        op: {"impl": told["impl"]}
        | ({"rows": [[r["up_to"], r["impl"]] for r in told["rows"]]} if "rows" in told else {})
        for op, told in ((op, entry.told) for op, entry in plan.entries.items())
    }


def differences(locked: Locked, now: Mapping[str, Any]) -> list[str]:
    """What of an engine differs from a lock, a sentence without a full stop each.

    The plan follows from all else: it is compared where nothing else differs.

    Args:
        locked: the lock.
        now: the engine's facts. Of any model, those of the lock's model do not count.
    """
    then = locked.facts
    if not then:
        return []
    names = {*then, *now} - {PLAN} - ({ENGINE, MODEL} - now.keys())
    pairs = ((name, now.get(name), then.get(name)) for name in sorted(names))
    lines = [_line(*each) for each in pairs if _counts(each[1]) != _counts(each[2])]
    return lines or _of_ops(now.get(PLAN, then[PLAN]), then[PLAN])


def served_otherwise(locked: Locked, plan: Plan, digest: str) -> list[str]:
    """What of a verified plan differs from the lock's, a sentence each."""
    if not locked.facts:
        return []
    was = locked.result["digest"]
    lines = _of_ops(ops_of(plan), locked.result["ops"])
    return lines or ([_line("digest of the plan", digest, was)] if digest != was else [])


def refuse(settings: Settings, by_rank: Mapping[int, Iterable[str]], *, says: bool) -> None:
    """End a start that differs from its lock on some rank, or say what differs.

    Args:
        settings: the engine's.
        by_rank: rank -> what differs there.
        says: whether this rank is the one that says it.

    Raises:
        LockError: something differs, and VLLM_FL_LOCK_MODE is not `warn`.
    """
    lines: list[str] = []
    for rank, told in sorted(by_rank.items()):
        lines += [f"rank {rank}: {line}" if rank else line for line in told if line not in lines]
    if not lines or settings.locked is None:
        return
    file = settings.locked.file
    each = "".join(f"\n  {line}" for line in lines)
    if settings.lock_mode == "warn":
        if says:
            log.warning("This engine differs from the lock %s [%s]%s", file, LockError.code, each)
        return
    told = f"{each}\nMend it, lock anew, or set VLLM_FL_LOCK_MODE=warn"
    what = f"vllm-fl ends the start: this engine differs from the lock {file}"
    raise LockError(what + (told if says else ": see rank 0"), file=file, differences=lines)


def _line(name: str, now: Any, then: Any) -> str:
    """One sentence of a fact that differs."""
    if isinstance(now, dict) and isinstance(then, dict) and not name.startswith(SETTING):
        keys = [key for key in sorted({*now, *then}) if now.get(key) != then.get(key)]
        pairs = [f"{k} is {_told(now.get(k))}, not {_told(then.get(k))}" for k in keys[:NAMED]]
        more = [f"and {len(keys) - NAMED} more"] if len(keys) > NAMED else []
        return f"{name}: {'; '.join((*pairs, *more))}"
    return f"{name} is {_told(now)}; the lock has {_told(then)}"


def _told(value: Any) -> str:
    if isinstance(value, dict) and "origin" in value:
        return f"{_told(value['value'])} ({value['origin']})"
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _counts(value: Any) -> Any:
    """What of a fact is compared: where a setting stands is not."""
    return value["value"] if isinstance(value, dict) and "origin" in value else value


def _of_ops(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    ops = sorted({*now, *then})
    return [_line(op, now.get(op), then.get(op)) for op in ops if now.get(op) != then.get(op)]


def _settings(settings: Settings) -> dict[str, Any]:
    """What the user set, each with its origin; of files that are named, the contents."""
    found: dict[str, Any] = {}
    if (pinned := settings.pinned) is not None:
        verdict = pinned.table.accepted
        is_accepted = verdict is not None and verdict.accepted
        found["table"] = f"{pinned.digest} ({'accepted' if is_accepted else 'not accepted'})"
    for key, setting in settings.chosen.items():
        value = setting.value
        if FREE.fullmatch(key) is None:
            text = value if isinstance(value, tuple | bool) else str(value)
            if isinstance(text, str) and os.path.isabs(text) and os.path.exists(text):
                text = contents_of(text)
            told = HIDDEN if is_secret(key) else _plain(text)
            found[SETTING + key] = {"value": told, "origin": scrub(setting.origin)}
    return found


def _variables() -> dict[str, Any]:
    """The variables of vLLM's that are set, of those that its compiled code depends on."""
    from vllm import envs

    factors = getattr(envs, "compile_factors", dict)()
    set_here = factors.keys() & os.environ.keys()
    return {
        f"variable {name}": _plain(factors[name])
        for name in sorted(set_here)
        if factors[name] is not None  # ours, which vLLM shall not see
        and not OF_HOST.search(name)
        and not is_secret(name)
    }


def _nccl(device: torch.device) -> dict[str, str]:
    import torch

    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return {}
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _arguments(facts: EngineFacts, config: VllmConfig) -> dict[str, Any]:
    """The engine's arguments and parallel sizes, and what follows from them."""
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    parts = {"": config} | {field.name: getattr(config, field.name) for field in _fields(config)}
    added = {f"+{name}" for name in turned_on(config)}
    found: dict[str, Any] = {
        "custom_ops": [name for name in facts.custom_ops if name not in added],
        "ir_priority": facts.ir_priority,
        "passes_off": facts.passes_off,
    }
    for part, value in parts.items():
        if WHOLE.fullmatch(part):
            found[part] = value
        elif not OF_HOST.search(part):
            own = {field.name for field in _fields(value)} - parts.keys()
            taken = sorted(name for name in own if name in names or BESIDE.fullmatch(name))
            found |= {name: getattr(value, name) for name in taken}
    told: dict[str, Any] = _plain(found)
    return told


def _fields(value: Any) -> tuple[Any, ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def _plain(value: Any) -> Any:
    """A value as JSON has it, without paths, secrets, and names of this host."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return "(a path)" if os.path.isabs(value) else scrub(value)
    if fields := _fields(value):
        value = {field.name: getattr(value, field.name, None) for field in fields}
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(each, str) and is_secret(key) else _plain(each)
            for key, each in ((str(key), value[key]) for key in sorted(value, key=str))
            if not OF_HOST.search(key)
        }
    if isinstance(value, list | tuple | set | frozenset):
        plain = [_plain(each) for each in value]
        return sorted(plain, key=str) if isinstance(value, set | frozenset) else plain
    return str(value) if type(value).__module__ == "torch" else type(value).__qualname__
