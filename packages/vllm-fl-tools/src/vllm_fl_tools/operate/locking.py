"""Compares the facts and the plan of an engine, or of its description, with a lock file."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.carried import carried_entry
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.patchers.linear_kernels import kernel_rows
from vllm_fl.integration.planning import plan_for
from vllm_fl.logs import get_logger
from vllm_fl.plugins.inspection import VERIFIED_BEFORE, Moment
from vllm_fl.settings.lock import Locked
from vllm_fl.settings.policy import OpOrder
from vllm_fl.settings.schema import Settings
from vllm_fl.text import REDACTED, is_secret, scrub

from .errors import LockError
from .identity import identity

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

log = get_logger("engine")

FREE = re.compile("config|platform_files|table|lock|log_level|debug|metrics|shadow")
"""Settings that do not affect results, and settings of files, which are compared by content."""

ALIASES = re.compile(
    "cache_dtype|policy|mode|backend|splitting_ops|compile_sizes|use_inductor_graph_partition"
)
"""Fields of vLLM's configuration that are set by arguments with other names."""

OF_HOST = re.compile(
    r"(?i)^_|(^|_)(rank|ports?|addr|address|host|ip|ids?|dir|path|root|endpoint|url|cls|name"
    r"|tokenizer|memory_bytes|bind)$|^(model|model_weights|shutdown_timeout)$|^VLLM_DP_"
    r"|^(compilation|additional)_config$|^ir_op_priority$|logging|observability|profiler"
)
"""Names that differ between hosts and startups without effect on results, and fields that vllm-fl
changes itself. `EngineFacts` has the user's values of these fields.
"""

OF_MODEL = ("argument", "model configuration", "plan")
"""Facts that only an engine with a model has."""

SHOWN = 12
"""Maximum number of reported differences."""


def facts_of_lock(facts: EngineFacts, config: VllmConfig, device: torch.device) -> dict[str, Any]:
    """Return the facts that a lock file records, as JSON without paths and secrets.

    `config` is vLLM's configuration as the worker received it.
    """
    import torch

    registry = get_default_manager().registry
    snapshot = registry.snapshot()
    owners = {each.owner for each in registry.plugins if each.status != "disabled"}
    owners |= {*snapshot.owners.values(), *snapshot.authors.values()}
    found: dict[str, Any] = {
        **identity(device, owners),
        "python": platform.python_version(),
        "setting": _settings(facts.settings),
        "variable": _variables(),
    }
    if device.type == "cuda" and torch.distributed.is_nccl_available():
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
    if config.model_config is not None:
        model = config.model_config.hf_config.to_dict()
        found["argument"] = _arguments(facts, config)
        found["model configuration"] = _plain({k: v for k, v in model.items() if k[0] != "_"})
        found["plan"] = labels(plan_for(facts))
    return found


@dataclasses.dataclass
class Lock:
    """Compares an engine, and its facts before verification, with its lock file.

    `differs` has the differences on any rank, one line each.
    """

    engine: Engine
    locked: Locked
    facts: Mapping[str, Any]
    differs: list[str] = dataclasses.field(default_factory=list)

    def compare_facts(self) -> None:
        """Compare the facts of all ranks, before anything runs. Raises LockError."""
        mine = lock_differences(self.locked, self.facts)
        for rank, lines in enumerate(self.engine.gather("compare with the lock", mine)):
            new = [line for line in lines if line not in self.differs]
            self.differs += [f"rank {rank}: {line}" if rank else line for line in new]
        self._end_or_warn(self.differs)

    def compare_plan(self) -> None:
        """Compare the verified plan, which all ranks share. Raises LockError on rank 0."""
        engine, locked = self.engine, self.locked
        if engine.rank == 0 and locked.facts:
            lines = _lines(labels(engine.plan), locked.result["ops"], "plan ")
            layers = _layers_by_class(engine)
            lines = lines or _lines(layers, locked.result["kernels"], "class of ")
            if engine.plan.number <= 1:  # a second engine of a process has other operator names
                lines = lines or _lines(engine.digest, locked.result["digest"], "digest ")
            self.differs += lines
            self._end_or_warn(lines)

    def _end_or_warn(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        file = self.locked.file
        each = "".join(f"\n  {line}" for line in lines)
        if not self.locked.warns:
            raise LockError(
                f"vllm-fl: engine startup failed: it differs from the lock file {file}. Fix the "
                f"difference, recreate the file, or set VLLM_FL_LOCK=warn:{file}{each}",
                file=file,
                differences=lines,
            )
        if self.engine.rank == 0:
            log.warning("Engine differs from the lock file %s [%s]%s", file, LockError.code, each)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of a lock file."""
        disabled: dict[str, dict[str, str]] = {}
        for (op, impl_id), each in sorted(self.engine.disabled.items()):
            disabled.setdefault(op, {})[impl_id] = each.reason
        before = VERIFIED_BEFORE in self.engine.remarks[Moment.PLANNED]
        result = {
            "ops": labels(self.engine.plan),
            "digest": self.engine.digest,
            "out": disabled,
            "kernels": _layers_by_class(self.engine),
            "verdict": "kept" if before else "fresh",
        }
        return {"facts": self.facts, "result": result}


def _layers_by_class(engine: Engine) -> dict[str, dict[str, int]]:
    """Return op -> class -> number of quantised layers on this rank."""
    found: dict[str, dict[str, int]] = {}
    for row in kernel_rows(engine):
        found.setdefault(row["op"] or "other layers", {})[row["class"]] = row["layers"]
    return found


def labels(plan: Plan) -> dict[str, str]:
    """Return the plan's ops with the labels of their implementations."""
    return {op: entry.label for op, entry in plan.entries.items()}


def lock_differences(locked: Locked, now: Mapping[str, Any]) -> list[str]:
    """Return the differences between an engine's facts and a lock file, one line each.

    The plan follows from the other facts, so it is compared only if these are equal. If the engine
    has no model, the lock file's facts of a model are ignored.
    """
    if not locked.facts:
        return []
    is_compared = {name: name in now or name not in OF_MODEL for name in {*now, *locked.facts}}
    here, then = (
        {name: value for name, value in facts.items() if is_compared[name]}
        for facts in (now, locked.facts)
    )
    plans = here.pop("plan", None), then.pop("plan", None)
    lines = _lines(here, then) or _lines(*plans, "plan ")
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more]


def _lines(now: Any, then: Any, name: str = "") -> list[str]:
    if isinstance(now, Mapping) or isinstance(then, Mapping):
        ours, theirs = now or {}, then or {}
        keys = sorted({*ours, *theirs})
        return [line for k in keys for line in _lines(ours.get(k), theirs.get(k), f"{name}{k} ")]
    if now == then:
        return []
    here, there = ("nothing" if value is None else value for value in (now, then))
    return [f"{name}is {here}; the lock has {there}"]


def _settings(settings: Settings) -> dict[str, Any]:
    """Return the user's settings that affect results, and the tuning table's choices."""
    found: dict[str, Any] = {
        key: _plain(setting.value, is_secret(key))
        for key, setting in settings.chosen.items()
        if FREE.fullmatch(key) is None
    }
    if settings.tuned is not None:
        found["table"] = {
            op: [f"{each.name}: {each.order}" for each in orders if each.of_table]
            for op, orders in settings.by_device.items()
        }
    return found


def _variables() -> dict[str, Any]:
    """Return the environment variables that affect the code that vLLM compiles."""
    from vllm import envs

    factors: dict[str, Any] = getattr(envs, "compile_factors", dict)()
    return {
        name: _plain(value, is_secret(name))
        for name, value in factors.items()
        if name in os.environ and value is not None and not OF_HOST.search(name)
    }


def _arguments(facts: EngineFacts, config: VllmConfig) -> dict[str, Any]:
    """Return vLLM's arguments, including the values that vLLM chose itself."""
    from vllm.engine.arg_utils import EngineArgs

    added = {*carried_entry(config).get("enabled", ())}
    found: dict[str, Any] = {
        "custom_ops": _plain([name for name in facts.custom_ops if name not in added]),
        "ir_priority": _plain(facts.ir_priority),
        "passes_off": _plain(facts.passes_off),
    }
    names = {field.name for field in fields(EngineArgs)}
    parts = [part for name, part in vars(config).items() if not OF_HOST.search(name)]
    parts.append(config.compilation_config)
    for part in (config, *filter(is_dataclass, parts)):
        for name in (field.name for field in fields(part)):
            is_argument = name in names or ALIASES.fullmatch(name)
            if is_argument and not OF_HOST.search(name):
                found[name] = _plain(getattr(part, name), is_secret(name))
    return found


def _plain(value: Any, hides: bool = False) -> Any:
    """Return a value as JSON, without paths, and without texts if it is a secret (`hides`)."""
    if isinstance(value, str):
        return REDACTED if hides else "(a path)" if os.path.isabs(value) else scrub(value)
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, int) or (isinstance(value, float) and isfinite(value)):
        return value
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return [_plain(each, hides) for each in value]
    if is_dataclass(value) and not isinstance(value, type | OpOrder):
        names = [each.name for each in fields(value) if not OF_HOST.search(each.name)]
        value = {name: getattr(value, name, None) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key], hides or is_secret(str(key))) for key in value}
    known = isinstance(value, float | OpOrder) or type(value).__module__ == "torch"
    return str(value) if known else type(value).__qualname__
