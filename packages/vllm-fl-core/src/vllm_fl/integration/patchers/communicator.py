"""The communicators that exchange tensors between the ranks of a group.

vLLM makes a communicator for each rank group while a worker starts. It calls `make` instead of a
class. `make` builds the planned communicator and lets all ranks of the group verify it.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...dispatch import get_default_manager
from ...dispatch.context import swapped
from ...engine.facts import EngineFacts
from ...engine.plan import PlanEntry
from ...errors import StartError
from ...logs import get_logger
from ...plugins.calling import asking, checks
from ...plugins.inspection import Check, GroupFacts, Key
from ...plugins.types import COMMUNICATOR, CommunicatorImpl, CommunicatorRequest
from ...settings.schema import Settings
from ...text import quote
from ..engines import Engine
from ..exchange import gathered
from ..patcher import Patcher, WhyNot
from . import classes
from .lookups import import_object

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FACTORY = f"{__name__}.make"
"""The path that vLLM gets instead of a communicator's class path."""

CAPTURED = ("CudaCommunicator", "XpuCommunicator")
"""The communicator classes that vLLM uses to capture graphs. A replacement must be a subclass."""

ELASTIC = "elastic expert parallelism changes the ranks and uses vLLM's communicators"

LIMIT = 120.0
"""Seconds for one step, enough to connect many machines. A longer step is a fault."""

log = get_logger("engine")


class Fault(NamedTuple):
    """The reason why a communicator must not be used.

    Attributes:
        rank: the global rank that found the fault.
        stuck: whether a call has not returned. Until it returns, the group cannot exchange
            anything.
    """

    rank: int
    why: str
    stuck: bool = False


class Groups:
    """The communicators of one worker's rank groups, for an engine with several ranks.

    Attributes:
        faults: (op, impl id) -> the fault of a communicator that must not be used.
    """

    def __init__(self, engine: Engine) -> None:
        facts = engine.facts
        assert facts.communicator is not None and facts.dtype is not None
        self.engine, self.request, self.dtype = engine, facts.communicator, facts.dtype
        rows = get_default_manager().rows(
            COMMUNICATOR,
            mode=facts.mode,
            engine=True,
            settings=facts.settings,
            disabled=classes.class_refusals(COMMUNICATOR, self.request, "this engine"),
            facts=facts,
        )
        self.communicators = PlanEntry(COMMUNICATOR, rows).classes(CommunicatorImpl)
        self.faults: dict[Key, Fault] = {}
        self._made: dict[str, tuple[CommunicatorImpl | None, Any, dict[str, Any]]] = {}

    @property
    def served(self) -> dict[str, str]:
        """Group name -> id of its communicator, or `stock`."""
        return {name: impl.impl_id if impl else "stock" for name, (impl, *_) in self._made.items()}

    def make(self, arguments: dict[str, Any]) -> Any:
        """Return the first candidate without a fault on any rank of the group; otherwise
        `stock`."""
        tried = ((impl, self._verified(impl, arguments)) for impl in self.communicators)
        impl, made = next((each for each in tried if each[1] is not None), (None, None))
        if made is None:
            made = stock_class()(**arguments)
        self._made[arguments.get("unique_name", "")] = impl, made, arguments
        return made

    def faults_here(self) -> dict[Key, str]:
        rank = torch.distributed.get_rank()
        return {key: fault.why for key, fault in self.faults.items() if fault.rank == rank}

    def say(self) -> None:
        if self.engine.rank == 0 and self.served:
            served = ", ".join(f"{name}={impl_id}" for name, impl_id in self.served.items())
            compares = self.engine.facts.settings.preflight != "off"
            how = "verified" if compares else "not verified"
            log.info("Rank groups: %s (%s)", served, how)

    def replace(self) -> None:
        from vllm.distributed import parallel_state

        groups = (reference() for reference in parallel_state._groups.values())
        holders = {id(group.device_communicator): group for group in groups if group is not None}
        for impl, made, arguments in [*self._made.values()]:
            if impl is not None and (COMMUNICATOR, impl.impl_id) in self.engine.disabled:
                holders[id(made)].device_communicator = self.make(arguments)
                _destroy(made)

    def _verified(self, impl: CommunicatorImpl, arguments: dict[str, Any]) -> Any:
        """Return a verified communicator, or None if it is disabled or has a fault on any rank."""
        group, device = arguments["cpu_group"], arguments["device"]
        name, rank = arguments["unique_name"], torch.distributed.get_rank()
        key = COMMUNICATOR, impl.impl_id
        disabled = self.engine.disabled.get(key)
        fault = self.faults.get(key) or (disabled and Fault(disabled.rank, disabled.why))
        cls: Any = None
        if fault is None:
            _, cls, why = classes.class_of(impl, COMMUNICATOR, self.request, problem_of)
            fault = Fault(rank, why) if why else None
        if self._is_off(impl, fault, group):
            return None

        def is_off(step: Callable[[], str | None], what: str = "") -> bool:
            why, stuck = fault_of(step, device)
            return self._is_off(impl, Fault(rank, what + why, stuck) if why else None, group)

        made: list[Any] = []
        checks: list[Check] = []
        facts = GroupFacts(name, group.rank(), group.size(), device, self.dtype)
        off = is_off(
            lambda: made.append(cls(**arguments)), f"its constructor failed for group {name}: "
        ) or is_off(lambda: checks.extend(self._checks(made[0], facts)))
        # Each check is an exchange, so the ranks must run the same checks.
        names = tuple(check.what for check in checks)
        every = gathered(names, group, "verify their communicators")
        differ = "" if len({*every}) == 1 else f"the ranks have different checks: {every}"
        if off or is_off(lambda: differ) or any(is_off(check.run) for check in checks):
            for each in made:
                _destroy(each)
            return None
        return made[0]

    def _checks(self, communicator: Any, facts: GroupFacts) -> Iterator[Check]:
        for plugin in asking(get_default_manager().registry.plugins, "communicator_checks"):
            yield from checks(plugin, self.engine, communicator, facts)

    def _is_off(self, impl: CommunicatorImpl, mine: Fault | None, group: Any) -> bool:
        """Gather the faults of the group's ranks. All ranks call this. Return whether a rank has a
        fault. Raises StartError if a call of the communicator is stuck on a rank."""
        faults = gathered(mine, group, "verify their communicators")
        fault = next((each for each in faults if each is not None), None)
        if fault is None:
            return False
        if fault.stuck:
            raise StartError(
                f"vllm-fl: engine startup failed: rank {fault.rank}: implementation "
                f"'{impl.impl_id}' failed for op '{COMMUNICATOR}': {fault.why}, which blocks its "
                f"ranks. VLLM_FL_PER_OP='{COMMUNICATOR}=stock' selects vLLM's code.",
                op=COMMUNICATOR,
                impl=impl.impl_id,
            )
        self.faults.setdefault((COMMUNICATOR, impl.impl_id), fault)
        return True


def fault_of(step: Callable[[], str | None], device: torch.device) -> tuple[str, bool]:
    """Run one step. Return (its fault or empty, whether it is still running).

    The step runs in a separate thread, because a step that waits for a lost rank may never end.

    Args:
        step: returns the fault as text; empty or None for no fault. An exception is also a fault.
    """
    faults: list[str] = []

    def run() -> None:
        try:
            if device.type != "cpu":
                torch.get_device_module(device.type).set_device(device)
            faults.append(step() or "")
        except BaseException as error:  # a library's wrapper may raise anything
            faults.append(quote(error))

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), daemon=True, name="vllm-fl groups")
    thread.start()
    thread.join(LIMIT)
    if thread.is_alive():
        return f"it did not return within {LIMIT:g} s", True
    return faults[0], False


def problem_of(path: str, cls: Any) -> str:
    """Return why a class cannot make communicators, or empty."""
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )

    stock = stock_class()
    above = stock.__mro__ if isinstance(stock, type) else ()
    for base in (DeviceCommunicatorBase, *(each for each in above if each.__name__ in CAPTURED)):
        if not (isinstance(cls, type) and issubclass(cls, base)):
            return f"{path} is not a subclass of vLLM's {base.__name__}"
    return ""


def stock_class() -> Callable[..., Any]:
    from vllm.platforms import current_platform

    found: Callable[..., Any] = import_object(current_platform.vllm_fl_stock_communicator())
    return found


def _destroy(communicator: Any) -> None:
    try:
        communicator.destroy()
    except Exception as error:  # its fault is already reported
        log.debug("cannot destroy a disabled communicator: %s", quote(error))


class _Making:
    """The `Groups` that makes communicators now. vLLM has one set of rank groups per process."""

    groups: Groups | None = None


def made_by(groups: Groups | None) -> AbstractContextManager[None]:
    return swapped(_Making, "groups", groups)


def groups_now() -> Groups | None:
    """Return the groups that make communicators now, or None if vLLM makes its own
    communicators."""
    return _Making.groups


def make(**arguments: Any) -> Any:
    """Make the communicator of a rank group. vLLM calls this instead of a class."""
    groups = groups_now()
    return stock_class()(**arguments) if groups is None else groups.make(arguments)


class Communicator(Patcher):
    def request(
        self, vllm_config: VllmConfig, settings: Settings, /, *, compiled: bool
    ) -> dict[str, Any]:
        """Return the request for communicators, or None for one rank or without a model."""
        from vllm.platforms import current_platform

        parallel = vllm_config.parallel_config
        tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        data = parallel.data_parallel_size
        world = tensor * pipeline * data * getattr(parallel, "prefill_context_parallel_size", 1)
        if world == 1 or vllm_config.model_config is None:
            return {"communicator": None}
        request = CommunicatorRequest(
            settings,
            current_platform.device_type,
            world,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            data_parallel_size=data,
            expert_parallel=bool(parallel.enable_expert_parallel),
            elastic=bool(getattr(parallel, "enable_elastic_ep", False)),
            compiled=compiled,
        )
        return {"communicator": request}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        request = facts.communicator
        if request is not None and request.elastic:
            return WhyNot({COMMUNICATOR: ELASTIC})
        return WhyNot(impls=classes.class_refusals(COMMUNICATOR, request, "this engine"))

    @contextmanager
    def opening(self, engine: Engine) -> Iterator[None]:
        request = engine.facts.communicator
        if request is not None and not request.elastic:
            groups = Groups(engine)
            engine.groups = groups if groups.communicators else None
        with made_by(engine.groups):
            yield

    def report(self, engine: Engine) -> dict[str, Any]:
        return {"groups": dict(engine.groups.served) if engine.groups else {}}
