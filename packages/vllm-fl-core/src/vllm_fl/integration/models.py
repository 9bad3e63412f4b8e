"""What a model is made of, by building it without memory and without weights."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..contracts import OpSpec
from ..dispatch import get_default_manager
from ..dispatch.context import building
from ..dispatch.resolver import Trace
from ..engine.facts import EngineFacts
from ..engine.plan import Plan, PlanEntry
from ..logs import get_logger
from ..plugins.attention import ATTENTION
from ..text import quote
from .patchers.layers import Layer, custom_op_of, layer_table
from .targets import installed_bindings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

log = get_logger("engine")


@dataclass(frozen=True)
class Skeleton:
    """What a model is made of, known without its weights.

    Args:
        layers: op -> class of vLLM's -> how many layers of it the model makes.
        absent: the ops that only layers run, or that begin with one, where the model makes none.
        provided: as `EngineFacts.provided`.
    """

    layers: Mapping[str, Mapping[str, int]]
    absent: frozenset[str]
    provided: Mapping[str, tuple[Mapping[str, torch.dtype], ...]]


def completed(facts: EngineFacts, vllm_config: VllmConfig) -> tuple[EngineFacts, Skeleton | None]:
    """Complete the facts of a configuration by what the model is made of, as far as it is known."""
    skeleton = skeleton_of(vllm_config) if vllm_config.model_config is not None else None
    if skeleton is None:
        return facts, None
    log.debug("The model's layers: %s", skeleton.layers)
    # What its configuration rules out, it has all the same where it makes layers of it.
    absent = (facts.absent | skeleton.absent).difference(skeleton.layers)
    foreign = {  # whole layers stand under their own names, and are not counted
        op: {c: owner for c, owner in owners.items() if c in skeleton.layers.get(op, (op,))}
        for op, owners in facts.foreign.items()
    }
    facts = replace(facts, absent=absent, provided=skeleton.provided, foreign=foreign)
    return facts, skeleton


def skeleton_of(vllm_config: VllmConfig) -> Skeleton | None:
    """Build the whole model, without memory, as a single rank would: about a tenth of a second.

    Nothing of the configuration is changed. What it builds is the same on all ranks.

    Returns:
        None where that is not known: the model cannot be built so, or another one drafts for it.
        Also where no op has a layer, and nobody would ask.
    """
    made: list[Any] = []
    try:
        if vllm_config.speculative_config is not None or not layer_table():
            return None
        with _noting(made):
            _build(vllm_config)
        return _skeleton(made, vllm_config)
    except Exception as error:  # models are anybody's
        log.debug("The model cannot be built without memory: %s", quote(error))
        return None
    finally:
        _forget(made)


def _skeleton(made: Sequence[Any], vllm_config: VllmConfig) -> Skeleton:
    specs = get_default_manager().registry.snapshot().contracts
    table = layer_table()
    layers: dict[str, Counter[str]] = {}
    ops: dict[str, list[Mapping[str, torch.dtype]]] = {}
    for instance in made:
        for cls in type(instance).__mro__:
            layer = next((layer for layer in table if layer.base is cls), None)
            if layer is not None:
                layers.setdefault(layer.op, Counter())[layer.cls] += 1
                dtypes = _provided(specs.get(layer.op), layer, instance)
                known = ops.setdefault(layer.op, [])
                known += [] if dtypes in known else [dtypes]
                break
    absent = frozenset(
        op
        for op, binding in installed_bindings().items()
        if binding.targets
        and all(target.needs_layer for target in binding.targets)
        and op not in ops
    )
    absent |= {
        op
        for op, binding in installed_bindings().items()
        if not all(target.may_begin(made, vllm_config) for target in binding.targets)
    }
    counts = {op: dict(classes) for op, classes in layers.items()}
    return Skeleton(counts, absent, {op: tuple(kinds) for op, kinds in ops.items()})


def _forget(made: Iterable[Any]) -> None:
    """Take layers out of vLLM's own tables (as of its ropes), by which all models share them."""
    built = {id(layer) for layer in made}
    # None stands for a module that must not be imported.
    of_vllm = [
        module for name, module in sys.modules.items() if module and name.startswith("vllm.")
    ]
    for table in (value for module in of_vllm for value in vars(module).values()):
        if isinstance(table, dict):
            for key in [key for key, value in table.items() if id(value) in built]:
                del table[key]


def _provided(spec: OpSpec | None, layer: Layer, instance: Any) -> dict[str, torch.dtype]:
    """The dtypes of the tensors that a layer provides, as its binding reads them."""
    import torch

    provider = layer.target.stand_in(instance) if layer.target.stand_in else instance
    found = {}
    for name, read in spec.from_layer.items() if spec is not None else ():
        try:
            value = read(provider)
        except Exception as error:  # of a layer that is not complete without its weights
            log.debug("%s of %s: %s", name, layer.cls, quote(error))
            continue
        if isinstance(value, torch.Tensor):
            found[name] = value.dtype
    return found


@contextmanager
def _noting(made: list[Any]) -> Iterator[None]:
    """Inside the block, vLLM's layers that are made are kept in `made`, whoever holds them."""
    with ExitStack() as back:
        for base in {custom_op_of(layer.base) for layer in layer_table()}:
            _note_in(made, base, back)
        yield


def _note_in(made: list[Any], base: Any, back: ExitStack) -> None:
    own = base.__init__

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        own(self, *args, **kwargs)

    back.callback(setattr, base, "__init__", own)
    base.__init__ = noting


def _build(vllm_config: VllmConfig) -> None:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _alone(vllm_config)
    # Its layers bind to nothing, and its attention is vLLM's: no plugin is asked.
    attention = PlanEntry(ATTENTION, ((None, Trace(ATTENTION, "eager", (), ())),), "nothing runs")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(building(Plan("eager", {ATTENTION: attention})))
        stack.enter_context(_one_rank())
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
        stack.enter_context(torch.device("meta"))
        initialize_model(config)


def _alone(vllm_config: VllmConfig) -> VllmConfig:
    """The configuration of a single rank that compiles nothing, whose tables are its own."""
    from vllm.config import CompilationMode

    parts: dict[str, Any] = {
        "compilation_config": {"mode": CompilationMode.NONE},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_expert_parallel": False,
        },
        "quant_config": {},
    }
    alone = copy.copy(vllm_config)
    for name, changed in parts.items():
        part = copy.copy(getattr(vllm_config, name))
        for key, value in vars(part).items() if part is not None else ():
            if isinstance(value, dict | list | set):
                object.__setattr__(part, key, copy.copy(value))
        for key, value in changed.items():
            object.__setattr__(part, key, value)
        object.__setattr__(alone, name, part)
    alone.compilation_config.static_forward_context = {}
    return alone


@contextmanager
def _one_rank() -> Iterator[None]:
    """Inside the block, vLLM's groups of ranks are of one rank each, and exchange nothing."""
    import torch
    from vllm.distributed import parallel_state

    def group(name: str) -> Any:
        made = object.__new__(parallel_state.GroupCoordinator)
        vars(made).update(
            unique_name=name,
            rank=0,
            ranks=[0],
            local_rank=0,
            rank_in_group=0,
            world_size=1,
            cpu_group=None,
            device_group=None,
            device=torch.device("cpu"),
            device_communicator=None,
            use_device_communicator=False,
            mq_broadcaster=None,
        )
        return made

    groups = {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_")
        and name.isupper()
        and (value is None or isinstance(value, parallel_state.GroupCoordinator))
    }
    try:
        for name in groups:
            setattr(parallel_state, name, group(name.lower().strip("_")))
        yield
    finally:
        for name, value in groups.items():
            setattr(parallel_state, name, value)
