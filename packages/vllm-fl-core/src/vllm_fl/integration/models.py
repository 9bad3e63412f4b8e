"""Find a model's layers by building it without memory and weights."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..contracts import OpSpec
from ..dispatch import get_default_manager
from ..dispatch.context import building, swapped
from ..dispatch.resolver import Trace
from ..engine.facts import EngineFacts, KernelUse
from ..engine.plan import Plan, PlanEntry
from ..logs import get_logger
from ..plugins.types import ATTENTION, KERNEL_OPS
from ..text import quote
from .patchers.kernel_classes import uses_of
from .patchers.layers import LayerClass, custom_op_of, forget_shared_layers, layer_table
from .patchers.linear_kernels import first_in_lists
from .targets import installed_bindings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

log = get_logger("engine")


def import_models(vllm_config: VllmConfig) -> None:
    """Import the classes of an engine's model and of its drafter, and with them their layers."""
    from vllm.model_executor.model_loader.utils import get_model_architecture

    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    for config in filter(None, (vllm_config.model_config, drafter)):
        try:
            get_model_architecture(config)
        except Exception as error:  # vLLM's loader reports it
            log.debug("Cannot import the model: %s", quote(error))


def completed(
    facts: EngineFacts, vllm_config: VllmConfig
) -> tuple[EngineFacts, Mapping[str, Mapping[str, int]]]:
    """Complete the facts of a configuration with the layers of the model. The model is built on the
    meta device for a single rank, in about 0.1 s. The result is the same on all ranks.

    Returns the facts, and op -> class name in vLLM -> number of layers. If the model cannot be
    built or has a drafter, or if no op has layers, the facts are unchanged and the mapping is
    empty.
    """
    made: list[Any] = []
    try:
        if not vllm_config.model_config or vllm_config.speculative_config or not layer_table():
            return facts, {}
        forget_shared_layers()
        with _noting(made):
            model = _build(vllm_config)
        return _with_layers(facts, made, model, vllm_config)
    except Exception as error:  # a model may raise anything
        log.debug("Cannot build the model on the meta device: %s", quote(error))
        return facts, {}
    finally:
        if made:
            forget_shared_layers()


def drop_model(worker: Any, quantisation: Any) -> None:
    """Drop the loaded model of a worker, before vLLM loads it again.

    Args:
        quantisation: vLLM's configuration of the quantisation, as it was before the first load.
    """
    import torch

    config = worker.vllm_config
    config.quant_config = quantisation
    config.compilation_config.static_forward_context.clear()
    getattr(config.compilation_config, "static_all_moe_layers", []).clear()
    forget_shared_layers()
    worker.model_runner.model = None
    gc.collect()
    if worker.device.type != "cpu":
        torch.get_device_module(worker.device).empty_cache()


def _with_layers(
    facts: EngineFacts, made: Sequence[Any], model: torch.nn.Module, vllm_config: VllmConfig
) -> tuple[EngineFacts, Mapping[str, Mapping[str, int]]]:
    specs = get_default_manager().registry.snapshot().contracts
    table = {layer.base: layer for layer in layer_table()}
    layers: dict[str, Counter[str]] = {}
    provided: dict[str, list[Mapping[str, torch.dtype]]] = {}
    for instance in made:
        layer = next((table[cls] for cls in type(instance).__mro__ if cls in table), None)
        if layer is not None:
            layers.setdefault(layer.op, Counter())[layer.cls] += 1
            dtypes = _provided(specs.get(layer.op), layer, instance)
            known = provided.setdefault(layer.op, [])
            known += [] if dtypes in known else [dtypes]
    kernels: dict[str, list[KernelUse]] = {}
    for use in uses_of([model]):
        kernels.setdefault(use.op, []).append(use)
        if use.op:
            layers.setdefault(use.op, Counter())[use.name] += use.count
    log.debug("The model's layers: %s", layers)
    absent = {
        op
        for op, binding in installed_bindings().items()
        if (binding.targets and all(target.needs_layer for target in binding.targets))
        or not all(target.may_begin(made, vllm_config) for target in binding.targets)
    } | {*KERNEL_OPS}
    foreign = {  # the key of a whole layer is its class name; it is not counted
        op: {c: owner for c, owner in owners.items() if c in layers.get(op, (op,))}
        for op, owners in facts.foreign.items()
    }
    facts = replace(
        facts,
        absent=(facts.absent | absent).difference(layers),  # layers override the configuration
        provided={op: tuple(kinds) for op, kinds in provided.items()},
        foreign=foreign,
        kernels=kernels,
    )
    return facts, layers


def _provided(spec: OpSpec | None, layer: LayerClass, instance: Any) -> dict[str, torch.dtype]:
    """Return parameter -> dtype of the tensors that a layer provides for its op."""
    import torch

    provider = layer.target.stand_in(instance) if layer.target.stand_in else instance
    found = {}
    for name, read in spec.from_layer.items() if spec is not None else ():
        try:
            value = read(provider)
        except Exception as error:  # a layer may be incomplete without weights
            log.debug("Cannot read %s of %s: %s", name, layer.cls, quote(error))
            continue
        if isinstance(value, torch.Tensor):
            found[name] = value.dtype
    return found


@contextmanager
def _noting(made: list[Any]) -> Iterator[None]:
    def noting(own: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            own(self, *args, **kwargs)

        return init

    with ExitStack() as back:
        for base in {custom_op_of(layer.base) for layer in layer_table()}:
            init = noting(base.__init__)  # type: ignore[misc]
            back.enter_context(swapped(base, "__init__", init))
        yield


def _build(vllm_config: VllmConfig) -> torch.nn.Module:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = _alone(vllm_config)
    # The plan is empty, so layers stay unbound, and attention is vLLM's without a call of plugins.
    attention = PlanEntry(ATTENTION, ((None, Trace(ATTENTION, "eager", (), ())),), "nothing runs")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(building(Plan("eager", {ATTENTION: attention})))
        stack.enter_context(_one_rank())
        if config.quant_config is not None:
            stack.enter_context(first_in_lists({}))
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(set_default_torch_dtype(config.model_config.dtype))
        stack.enter_context(torch.device("meta"))
        model: torch.nn.Module = initialize_model(config)
        return model


def _alone(vllm_config: VllmConfig) -> VllmConfig:
    """Copy a configuration and its tables, changed to a single rank without compilation."""
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
        if part is not None:  # the parts are frozen
            tables = {k: v for k, v in vars(part).items() if isinstance(v, dict | list | set)}
            vars(part).update({k: copy.copy(v) for k, v in tables.items()} | changed)
        vars(alone)[name] = part
    alone.compilation_config.static_forward_context = {}
    return alone


@contextmanager
def _one_rank() -> Iterator[None]:
    import torch
    from vllm.distributed import parallel_state

    def group(name: str) -> Any:
        made = object.__new__(parallel_state.GroupCoordinator)
        vars(made).update(dict.fromkeys(("rank", "local_rank", "rank_in_group"), 0))
        own = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # models with experts ask it
        vars(made).update(cpu_group=own, device_group=own, mq_broadcaster=None)
        vars(made).update(device_communicator=None, use_device_communicator=False)
        vars(made).update(unique_name=name, ranks=[0], world_size=1, device=torch.device("cpu"))
        return made

    groups = [
        name
        for name, value in vars(parallel_state).items()
        if name.startswith("_")
        and name.isupper()
        and (value is None or isinstance(value, parallel_state.GroupCoordinator))
    ]
    with ExitStack() as back:
        for name in groups:
            one = group(name.lower().strip("_"))
            back.enter_context(swapped(parallel_state, name, one))
        yield
