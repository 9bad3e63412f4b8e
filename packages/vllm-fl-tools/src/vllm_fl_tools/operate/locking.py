"""What of an engine its lock has, and what differs: one answer for a start and for its preview."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.carried import turned_on
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.planning import plan_for
from vllm_fl.logs import get_logger
from vllm_fl.settings.lock import Locked
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.schema import Settings
from vllm_fl.text import HIDDEN, is_secret, scrub

from .errors import LockError
from .identity import identity

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

log = get_logger("engine")

ENGINE, MODEL, PLAN = "engine arguments", "model configuration", "plan"
"""The facts that only an engine of a known model has."""

FREE = re.compile(
    "config|platform_files|table|lock|lock_mode|log_level|debug|metrics|report|shadow|shadow_file"
)
"""Settings that change nothing of what runs, and those whose files count, not their names."""

BESIDE = re.compile(
    "cache_dtype|policy|mode|backend|splitting_ops|compile_sizes|use_inductor_graph_partition"
)
"""Fields of vLLM's configuration that arguments set by another name."""

OF_HOST = re.compile(
    r"(?i)^_|(^|_)(rank|ports?|addr|address|host|ip|ids?|dir|path|root|endpoint|url|cls|name"
    r"|tokenizer|memory_bytes|bind)$|^(model|model_weights|shutdown_timeout)$|^VLLM_DP_"
    r"|^(compilation|additional)_config$|^ir_op_priority$"
)
"""Names of what differs between hosts, ranks and starts and computes nothing, and of what holds our
own changes: what the user wrote there is among `EngineFacts`."""

OF_LOGS = re.compile("logging|observability|profiler")
"""Parts of vLLM's configuration that say what is told of an engine."""

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
    found |= _settings(facts.settings) | _of_vllm(device)
    if config.model_config is not None:
        plan = plan_for(facts)
        found[ENGINE] = _arguments(facts, config)
        model = config.model_config.hf_config.to_dict()
        found[MODEL] = _plain({key: model[key] for key in model if key != "_name_or_path"})
        found[PLAN] = labels(plan)
    return found


@dataclasses.dataclass
class Lock:
    """What an engine has of its lock.

    Args:
        engine: the engine, whose settings name a lock.
        facts: what it is made of, before verification.
        differs: what differs, on whichever rank, one sentence each.
    """

    engine: Engine
    facts: Mapping[str, Any]
    differs: list[str] = dataclasses.field(default_factory=list)

    def compare_facts(self) -> None:
        """Compare what the ranks are made of, before anything is run.

        Raises:
            LockError: something differs on some rank; on all ranks.
        """
        settings = self.engine.facts.settings
        assert settings.locked is not None
        mine = differences(settings.locked, self.facts)
        by_rank = dict(enumerate(self.engine.gather("compare with the lock", mine)))
        self.differs += [line for lines in by_rank.values() for line in lines]
        refuse(settings, by_rank, says=self.engine.rank == 0)

    def compare_plan(self) -> None:
        """Compare the plan that serves, which all ranks have alike.

        Raises:
            LockError: it differs; on rank 0.
        """
        engine, settings = self.engine, self.engine.facts.settings
        assert settings.locked is not None
        if engine.rank == 0:
            lines = served_otherwise(settings.locked, engine.plan, engine.digest)
            self.differs += lines
            refuse(settings, {0: lines}, says=True)

    def told(self) -> dict[str, Any]:
        """Return what `vllm-fl plan --save` writes."""
        disabled: dict[str, dict[str, str]] = {}
        for (op, impl_id), each in sorted(self.engine.disabled.items()):
            disabled.setdefault(op, {})[impl_id] = each.reason
        ops = labels(self.engine.plan)
        result = {"ops": ops, "digest": self.engine.digest, "out": disabled}
        return {"facts": self.facts, "result": result}


def labels(plan: Plan) -> dict[str, str]:
    """Op -> who serves it, as `PlanEntry.label` says it."""
    return {op: entry.label for op, entry in plan.entries.items()}


def differences(locked: Locked, now: Mapping[str, Any]) -> list[str]:
    """What of an engine differs from a lock, a sentence without a full stop each.

    The plan follows from all else: it is compared where nothing else differs.

    Args:
        locked: the lock.
        now: the engine's facts. Of any model, those of the lock's model do not count.
    """
    if not locked.facts:
        return []
    here, then = dict(now), dict(locked.facts)
    for name in {ENGINE, MODEL, PLAN} - now.keys():
        del then[name]
    plans = here.pop(PLAN, {}), then.pop(PLAN, {})
    return _lines(here, then) or _lines(*plans)


def served_otherwise(locked: Locked, plan: Plan, digest: str) -> list[str]:
    """What of a verified plan differs from the lock's, a sentence each."""
    if not locked.facts:
        return []
    # Of a second engine in one process it is another: its operators have other names.
    was = locked.result["digest"] if plan.place == 1 else digest
    return _lines(labels(plan), locked.result["ops"]) or _lines({"digest": digest}, {"digest": was})


def refuse(settings: Settings, by_rank: Mapping[int, Sequence[str]], *, says: bool) -> None:
    """End a start that differs from its lock on some rank, or say what differs.

    Args:
        settings: the engine's, which name a lock.
        by_rank: rank -> what differs there.
        says: whether this rank is the one that says it.

    Raises:
        LockError: something differs, and VLLM_FL_LOCK_MODE is not `warn`.
    """
    lines: list[str] = []
    for rank, told in sorted(by_rank.items()):
        lines += [f"rank {rank}: {line}" if rank else line for line in told if line not in lines]
    if not lines:
        return
    assert settings.locked is not None
    file, each = settings.locked.file, "".join(f"\n  {line}" for line in lines)
    if settings.lock_mode == "strict":
        what = f"vllm-fl ends the start: this engine differs from the lock {file}. Mend it, lock "
        todo = f"anew, or set VLLM_FL_LOCK_MODE=warn{each}" if says else "anew: see rank 0"
        raise LockError(what + todo, file=file, differences=lines)
    if says:
        log.warning("This engine differs from the lock %s [%s]%s", file, LockError.code, each)


def _lines(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[str]:
    """One sentence for each fact that differs; of a setting its value counts."""

    def counts(value: Any) -> Any:
        return value[0] if isinstance(value, list) else value

    names = sorted({*now, *then})
    pairs = [(name, now.get(name), then.get(name)) for name in names]
    return [_line(*pair) for pair in pairs if counts(pair[1]) != counts(pair[2])]


def _line(name: str, now: Any, then: Any) -> str:
    if isinstance(now, dict) and isinstance(then, dict):
        keys = [key for key in sorted({*now, *then}) if now.get(key) != then.get(key)]
        told = [f"{k} is {_told(now.get(k))}, not {_told(then.get(k))}" for k in keys[:NAMED]]
        more = f"; and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
        return f"{name}: {'; '.join(told)}{more}"
    return f"{name} is {_told(now)}; the lock has {_told(then)}"


def _told(value: Any) -> str:
    if isinstance(value, list):
        return f"{value[0]} ({value[1]})"
    return "nothing" if value is None else str(value)


def _settings(settings: Settings) -> dict[str, Any]:
    """What the user set, each as its value and its origin."""
    found: dict[str, Any] = {}
    if settings.tuned is not None:
        found["table"] = {
            op: [f"{each.devices}: {each.order}" for each in orders if each.of_table]
            for op, orders in settings.by_device.items()
        }
    for key, setting in settings.chosen.items():
        if FREE.fullmatch(key) is None:
            value = _plain(setting.value, is_secret(key))
            found[f"setting {key}"] = [value, scrub(setting.origin)]
    return found


def _of_vllm(device: torch.device) -> dict[str, Any]:
    """NCCL's version, and the variables on which code that vLLM compiles depends."""
    import torch
    from vllm import envs

    factors: dict[str, Any] = getattr(envs, "compile_factors", dict)()
    found = {
        f"variable {name}": _plain(value, is_secret(name))
        for name, value in factors.items()
        if name in os.environ and value is not None and not OF_HOST.search(name)
    }
    if device.type == "cuda" and torch.distributed.is_nccl_available():
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def _arguments(facts: EngineFacts, config: VllmConfig) -> dict[str, Any]:
    """vLLM's arguments, with what it has made of those that were not given."""
    from vllm.engine.arg_utils import EngineArgs

    added = {f"+{name}" for name in turned_on(config)}
    found: dict[str, Any] = {
        "custom_ops": _plain([name for name in facts.custom_ops if name not in added]),
        "ir_priority": _plain(facts.ir_priority),
        "passes_off": _plain(facts.passes_off),
    }
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    parts = (part for name, part in vars(config).items() if not OF_LOGS.match(name))
    for part in (config, *filter(dataclasses.is_dataclass, parts)):
        for name in (field.name for field in dataclasses.fields(part)):
            is_argument = name in names or BESIDE.fullmatch(name)
            if is_argument and not (OF_HOST.search(name) or OF_LOGS.match(name)):
                found[name] = _plain(getattr(part, name), is_secret(name))
    return found


def _plain(value: Any, hides: bool = False) -> Any:
    """A value as JSON has it, without paths, and without the texts of a secret (`hides`)."""
    if isinstance(value, str):
        return HIDDEN if hides else "(a path)" if os.path.isabs(value) else scrub(value)
    if value is None or isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
        return value.name if isinstance(value, Enum) else value
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return [_plain(each, hides) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type | OpOrder):
        names = [each.name for each in dataclasses.fields(value) if not OF_HOST.search(each.name)]
        value = {name: getattr(value, name, None) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key], hides or is_secret(str(key))) for key in value}
    known = isinstance(value, float | Enum | OpOrder) or type(value).__module__ == "torch"
    return str(value) if known else type(value).__qualname__
