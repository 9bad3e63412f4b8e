"""The communicator: what vLLM's groups of ranks exchange tensors through.

vLLM makes one for each group of ranks while a worker starts. In its place stands `make`, which
makes the plan's, has all ranks of the group verify it, and agrees on the result before vLLM has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...dispatch import get_default_manager
from ...engine.facts import EngineFacts
from ...engine.plan import PlanEntry
from ...errors import StartError
from ...logs import get_logger
from ...plugins.communicator import COMMUNICATOR
from ...plugins.inspection import Check, GroupFacts, Key
from ...plugins.types import CommunicatorImpl, CommunicatorRequest
from ...settings.loading import Settings
from ...text import quote
from ..engines import Engine
from ..exchange import gathered
from ..hooks import communicator_checks
from ..patcher import Patcher, WhyNot
from . import classes
from .lookups import named

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..engines import Engine

FACTORY = f"{__name__}.make"
"""What vLLM is told to make a group's communicator with, in the place of a class."""

CAPTURED = ("CudaCommunicator", "XpuCommunicator")
"""The classes of vLLM's whose subclasses it captures graphs through."""

ELASTIC = "elastic expert parallelism changes the ranks, and its groups are vLLM's own"

log = get_logger("engine")


class Fault(NamedTuple):
    """Why a communicator must not serve.

    Attributes:
        rank: where, among all ranks.
        why: the reason.
        stuck: whether a call of it has not come back: nothing can be exchanged beside it.
    """

    rank: int
    why: str
    stuck: bool = False


def request_of(
    vllm_config: VllmConfig, settings: Settings, *, compiled: bool
) -> CommunicatorRequest | None:
    """What communicators are asked with; None for an engine of a single rank."""
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    data = parallel.data_parallel_size
    world = tensor * pipeline * data * getattr(parallel, "prefill_context_parallel_size", 1)
    if world == 1:
        return None
    return CommunicatorRequest(
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


def refusals(facts: EngineFacts) -> dict[tuple[str, str], str]:
    """(op, impl id) -> why an installed communicator does not take this engine's ranks."""
    request = facts.communicator
    if request is not None and request.elastic:
        return classes.refusals(COMMUNICATOR, request, "this engine", lambda *_: ELASTIC)
    return classes.refusals(COMMUNICATOR, request, "this engine")


class Groups:
    """The communicators of one worker's groups of ranks.

    Args:
        engine: the engine, whose facts say that it has several ranks.

    Attributes:
        communicators: the candidates.
        faults: (op, impl id) -> (rank, why) of what must not serve.
        served: a group's name -> the implementation's id, or `stock`.
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
            disabled=refusals(facts),
            facts=facts,
        )
        self.communicators = PlanEntry(COMMUNICATOR, rows).classes(CommunicatorImpl)
        self.faults: dict[Key, Fault] = {}
        self.served: dict[str, str] = {}
        self.seconds = 0.0
        self._made: list[tuple[Any, CommunicatorImpl, dict[str, Any]]] = []

    def make(self, arguments: dict[str, Any]) -> Any:
        """A group's communicator: the first candidate that serves on all of its ranks, or stock.

        Args:
            arguments: what vLLM gives the class.
        """
        start = time.monotonic()
        name = arguments.get("unique_name", "")
        for impl in self.communicators:
            communicator = self._verified(impl, arguments)
            if communicator is not None:
                self.served[name] = impl.impl_id
                self._made.append((communicator, impl, arguments))
                break
        else:
            self.served[name] = "stock"
            communicator = stock_class()(**arguments)
        self.seconds += time.monotonic() - start
        return communicator

    def faults_here(self) -> dict[Key, str]:
        """Return what this rank has found wrong itself: (op, impl id) -> why."""
        import torch.distributed as dist

        rank = dist.get_rank()
        return {key: fault.why for key, fault in self.faults.items() if fault.rank == rank}

    def say(self) -> None:
        """Log what serves; rank 0 does."""
        if self.engine.rank == 0 and self.served:
            served = ", ".join(f"{name}={impl_id}" for name, impl_id in self.served.items())
            compares = self.engine.facts.settings.preflight != "off"
            how = "verified" if compares else "not verified;"
            log.info("Groups of ranks: %s (%s in %.1f s)", served, how, self.seconds)

    def replace(self) -> None:
        """Give groups another communicator if theirs is disabled, in the order of the groups."""
        disabled = self.engine.disabled
        off = [each for each in self._made if (COMMUNICATOR, each[1].impl_id) in disabled]
        self._made = [each for each in self._made if each not in off]
        holders = {id(group.device_communicator): group for group in _coordinators()}
        for communicator, _, arguments in off:
            group = holders[id(communicator)]
            group.device_communicator = self.make(arguments)
            _destroy(communicator)

    def _verified(self, impl: CommunicatorImpl, arguments: dict[str, Any]) -> Any:
        """The communicator; None where it is off, on whichever rank of the group."""
        import torch.distributed as dist

        from ...engine.limited import fault_of

        group, device = arguments["cpu_group"], arguments["device"]
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        key = COMMUNICATOR, impl.impl_id
        cls: Any = None
        fault = self.faults.get(key)
        if fault is None and key in self.engine.disabled:
            fault = Fault(self.engine.disabled[key].rank, self.engine.disabled[key].why)
        if fault is None:
            _, cls, why = classes.class_of(impl, COMMUNICATOR, self.request, problem_of)
            fault = Fault(dist.get_rank(), why) if why else None
        if self._is_off(impl, fault, group):
            return None
        made: list[Any] = []

        def ask(what: str, step: Callable[[], str | None]) -> bool:
            why, stuck = fault_of(step, device)
            told = Fault(dist.get_rank(), f"{what}{why}", stuck) if why else None
            return self._is_off(impl, told, group)

        name = arguments["unique_name"]
        off = ask(
            f"its class cannot be made for group {name}: ", lambda: made.append(cls(**arguments))
        )
        facts = GroupFacts(name, rank, size, device, self.dtype)
        checks: list[Check] = []
        off = off or ask(
            "", lambda: checks.extend(communicator_checks(self.engine, made[0], facts))
        )
        # Each check is one exchange: the ranks must have the same ones.
        names = tuple(check.what for check in checks)
        every = gathered(names, group, size, dist.get_rank(), "verify their communicators")
        differ = "" if len({*every}) == 1 else f"the checks of the ranks differ: {every}"
        off = off or ask("", lambda: differ) or any(ask("", check.run) for check in checks)
        if not off:
            return made[0]
        for each in made:
            _destroy(each)
        return None

    def _is_off(self, impl: CommunicatorImpl, mine: Fault | None, group: Any) -> bool:
        """Whether it is off on any rank of the group: all of them ask at the same time.

        Raises:
            StartError: a call of it is stuck, on whichever rank.
        """
        import torch.distributed as dist

        size, rank = dist.get_world_size(group), dist.get_rank()
        told = gathered(mine, group, size, rank, "verify their communicators")
        fault = next((each for each in told if each is not None), None)
        if fault is None:
            return False
        if fault.stuck:
            raise StartError(
                f"vllm-fl ends the start: rank {fault.rank}: nothing can be exchanged beside a "
                f"stuck call, and implementation '{impl.impl_id}' failed for op '{COMMUNICATOR}': "
                f"{fault.why}. VLLM_FL_PER_OP='{COMMUNICATOR}=stock' leaves it out.",
                op=COMMUNICATOR,
                impl=impl.impl_id,
            )
        self.faults.setdefault((COMMUNICATOR, impl.impl_id), fault)
        return True


def problem_of(path: str, cls: Any) -> str:
    """Why a class cannot make communicators, or nothing."""
    for base in _bases():
        if not (isinstance(cls, type) and issubclass(cls, base)):
            return f"{path} is no subclass of vLLM's {base.__name__}"
    return ""


def stock_class() -> Callable[..., Any]:
    """The class that would serve without us."""
    from vllm.platforms import current_platform

    found: Callable[..., Any] = named(current_platform.vllm_fl_stock_communicator())
    return found


def _bases() -> list[type]:
    """What vLLM asks a communicator to be: it captures graphs through two of its own alone."""
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )

    stock = stock_class()
    above = stock.__mro__ if isinstance(stock, type) else ()
    return [DeviceCommunicatorBase, *(cls for cls in above if cls.__name__ in CAPTURED)]


def _coordinators() -> Iterator[Any]:
    """vLLM's groups of ranks, in the order in which they were made."""
    from vllm.distributed import parallel_state

    for reference in parallel_state._groups.values():
        group = reference()
        if group is not None:
            yield group


def _destroy(communicator: Any) -> None:
    try:
        communicator.destroy()
    except Exception as error:  # it is off already, and said so
        log.debug("a communicator that is off cannot be destroyed: %s", quote(error))


_now: Groups | None = None
"""The groups that this process is making: a process has one set of vLLM's groups."""


@contextmanager
def made_by(groups: Groups | None) -> Iterator[None]:
    """While the block runs, these make the communicators of vLLM's groups."""
    global _now
    _now = groups
    try:
        yield
    finally:
        _now = None


def groups_now() -> Groups | None:
    """What makes communicators now; None where vLLM's own are made."""
    return _now


def make(**arguments: Any) -> Any:
    """The communicator of one of vLLM's groups. It stands where vLLM expects a class."""
    groups = groups_now()
    return stock_class()(**arguments) if groups is None else groups.make(arguments)


class Communicator(Patcher):
    """Makes the communicators of vLLM's groups of ranks."""

    def request(
        self, vllm_config: VllmConfig, settings: Settings, /, *_: Any, compiled: bool
    ) -> dict[str, Any]:
        has_model = vllm_config.model_config is not None
        asked = request_of(vllm_config, settings, compiled=compiled) if has_model else None
        return {"communicator": asked}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        return WhyNot(impls=refusals(facts))

    @contextmanager
    def opening(self, engine: Engine) -> Iterator[None]:
        if engine.facts.communicator is not None:
            groups = Groups(engine)
            engine.groups = groups if groups.communicators else None
        with made_by(engine.groups):
            yield

    def report(self, engine: Engine) -> dict[str, Any]:
        return {"groups": dict(engine.groups.served) if engine.groups else {}}
