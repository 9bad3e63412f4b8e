"""Profiles a worker's steps with PyTorch's profiler.

Only for `vllm-fl tune --profile`, with vLLM's argument `worker_extension_cls`. The worker returns
names and times; the verb attributes them to ops (`cli/_coverage.py`).

The steps run with a label around each implementation and layer, and without captured graphs,
because a kernel in a captured graph has no caller.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.profiler import ProfilerActivity, profile, supported_activities

from vllm_fl.engine.opaque import operators as our_operators
from vllm_fl.integration.patchers import layers
from vllm_fl.integration.targets import installed_bindings
from vllm_fl.plugins.types import OpImpl
from vllm_fl.text import quote
from vllm_fl_verify.graphs import without_graphs
from vllm_fl_verify.replacing import replacing
from vllm_fl_verify.verification import synchronise

from ..operate.identity import device_name

LABEL = "vllm-fl"
"""Prefix of labels: `vllm-fl/op/rms_norm/vendor.cpu`, `vllm-fl/layer/RMSNorm`."""

AMBIGUOUS = frozenset({"aten::sum"})
"""PyTorch operators that a binding lists for one rare form, while other code calls them often.
`GraphTarget.profiled` excludes more.
"""

_kernels: dict[str, dict[str, None]] = {}
"""Inductor's kernel -> its parts, which are classes of layers."""


def watch_compiler() -> None:
    """Record what Inductor fuses into each kernel that it will generate in this process.

    Also make kernels on a CPU visible in profiles.
    """
    name = "set_kernel_post_grad_provenance_tracing"
    from torch._inductor import config, debug

    config.cpp.enable_kernel_profile = True
    original = getattr(debug, name, None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def noting(schedule: Any, kernel: str, *args: Any, **more: Any) -> Any:
        _note(schedule, kernel)
        return original(schedule, kernel, *args, **more)

    # Modules that generate kernels import the function by name, before or after this.
    for module in list(sys.modules.values()):
        is_inductor = getattr(module, "__name__", "").startswith("torch._inductor")
        if is_inductor and vars(module).get(name) is original:
            setattr(module, name, noting)


def _note(schedule: Any, kernel: str) -> None:
    """Record the parts of a kernel that Inductor generates."""
    from torch._inductor.virtualized import V

    if not isinstance(schedule, list):
        return  # a call of an operator, which profiles show
    parts: dict[str, None] = {}
    for each in (getattr(node, "node", None) for node in schedule):
        for origin in getattr(each, "origins", ()):
            if (part := _part_of(origin)) is not None:
                parts[part] = None
    graph = getattr(V.graph, "graph_id", None)  # profiles show C++ kernels with their graph's id
    for name in (kernel, f"graph_{graph}_{kernel}"):
        _kernels.setdefault(name, {}).update(parts)


def _part_of(node: torch.fx.Node) -> str | None:
    """Return the layer of a graph's node. A kernel's origins also include operators that only
    provide its inputs."""
    stack = node.meta.get("nn_module_stack") or {}
    is_computed = getattr(node.target, "namespace", "") in ("aten", "prims")
    if node.op != "call_function" or not is_computed or not stack:
        return None
    _, cls = list(stack.values())[-1]
    return _named(cls) if isinstance(cls, type) else str(cls).rpartition(".")[2]


def _named(cls: type) -> str:
    """Return vLLM's name of a layer's class, because vllm-fl replaces layers by subclasses."""
    return next(c.__name__ for c in cls.__mro__ if c.__module__ != layers.__name__)


class Profiling:
    """Methods that vLLM adds to its worker."""

    vllm_fl_window: _Window

    def vllm_fl_profile(self, decode: bool, steps: int) -> None:
        """Profile the next `steps` steps of one kind; a step of the other kind ends the profile.

        With `decode`, these are steps that only decode; otherwise, steps with a prompt.
        """
        self.vllm_fl_window = _Window(self, decode, steps)

    def vllm_fl_profiled(self) -> dict[str, Any]:
        """Return the profile since `vllm_fl_profile`, from `_seen`."""
        return self.vllm_fl_window.close()

    def vllm_fl_places(self) -> dict[str, Any]:
        """Return the meaning of names in a profile.

        Returns:
            A dictionary with these keys:

            - `layers` {class: op}; `products` {class of layers with a matrix product: op}
            - `operators` {operator of vLLM or PyTorch: op}
            - `ours` {operator of vllm-fl: [op, impl id]}
            - `kernels` {kernel of Inductor: its parts}
            - `not_covered` {op: vLLM's code that no target covers}
            - `attention`: names of backends
            - `left`: classes of layers that the plan does not replace
            - `device`: its name; `ranks`: their number
        """
        worker: Any = self
        table = installed_bindings()
        known = ((op, target) for op, binding in table.items() for target in binding.targets)
        named = ((name, op) for op, target in known for name in target.profiled)
        plan = worker.vllm_fl_engine.plan
        foreign = layers.foreign_layers().keys() - layers.taken_layers(plan)
        product = next((o for o, b in table.items() if b.products and o in plan.entries), "linear")
        modules = {type(module) for root in _roots(worker) for module in root.modules()}
        return {
            "layers": {layer.cls: layer.op for layer in layers.layer_table()},
            "products": {_named(cls): product for cls in modules if PRODUCTS & _bases(cls)},
            "not_covered": {op: list(binding.not_reached) for op, binding in table.items()},
            "operators": {name: op for name, op in named if name not in AMBIGUOUS},
            "ours": {f"vllm_fl::{name}": list(of) for name, of in our_operators().items()},
            "kernels": {kernel: list(parts) for kernel, parts in _kernels.items()},
            "attention": _attention(worker),
            "left": sorted({*foreign, *plan.kept_layers}),
            "device": device_name(worker.device),
            "ranks": worker.vllm_config.parallel_config.world_size,
        }


PRODUCTS = {"LinearBase", "LogitsProcessor"}
"""vLLM's classes of layers with a matrix product."""


def _bases(cls: type) -> set[str]:
    return {base.__name__ for base in cls.__mro__}


def _attention(worker: Any) -> list[str]:
    held = worker.vllm_config.compilation_config.static_forward_context.values()
    found: dict[str, None] = {}
    for layer in held:
        if (backend := getattr(layer, "get_attn_backend", lambda: None)()) is not None:
            found[str(backend.get_name())] = None
    return list(found)


class _Window:
    """Profiles some of a worker's steps, until the next step begins or `close` is called.

    It replaces the worker's `execute_model`. Args: as for `Profiling.vllm_fl_profile`.
    """

    def __init__(self, worker: Any, decode: bool, steps: int) -> None:
        self.worker, self.decode, self.steps = worker, decode, steps
        self.seen = 0
        self.profile: Any = None
        self.result: dict[str, Any] | None = None
        self._stack = ExitStack()
        self._run = worker.execute_model
        vars(worker)["execute_model"] = self._execute

    def _execute(self, scheduled: Any, *args: Any, **more: Any) -> Any:
        if scheduled.total_num_scheduled_tokens and self.result is None:
            wanted = _decodes(scheduled) == self.decode
            if self.profile is not None and not (wanted and self.seen < self.steps):
                self._stop()
            elif wanted:
                if self.profile is None:
                    self._start()
                self.seen += 1
        return self._run(scheduled, *args, **more)

    def close(self) -> dict[str, Any]:
        """Restore the worker's method, and return the profile."""
        if self.profile is not None and self.result is None:
            self._stop()
        vars(self.worker).pop("execute_model", None)
        return self.result or {"steps": 0, "problem": ""}

    def _start(self) -> None:
        on_host = self.worker.device.type == "cpu"
        activities = {ProfilerActivity.CPU} if on_host else supported_activities()
        self._stack.enter_context(_labels(self.worker))
        self._stack.enter_context(without_graphs(getattr(self.worker, "model_runner", None)))
        synchronise(self.worker.device)
        self.profile = profile(activities=activities)
        self.profile.start()

    def _stop(self) -> None:
        synchronise(self.worker.device)
        try:
            self.profile.stop()
        finally:
            self._stack.close()
        try:
            seen = _seen(self.profile.events())
        except Exception as error:  # for example, the profiler's library does not fit the device
            seen = {"problem": f"PyTorch's profiler failed: {quote(error)}"}
        self.result = {"steps": self.seen, "problem": "", **seen}


def _decodes(scheduled: Any) -> bool:
    """Return whether every sequence decodes in a step, including drafted tokens."""
    if scheduled.scheduled_new_reqs:
        return False
    drafted: Mapping[str, Any] = getattr(scheduled, "scheduled_spec_decode_tokens", None) or {}
    counts: Mapping[str, int] = scheduled.num_scheduled_tokens
    return all(count <= 1 + len(drafted.get(of, ())) for of, count in counts.items())


def _seen(events: Iterable[Any]) -> dict[str, Any]:
    """Return a profile as JSON-able data.

    Returns:
        `paths`: lists of names, each of an operator or label after its callers, outermost first.
        `host` [[path, µs, calls]]: host time, without the callees of the path. `kernels` [[path,
        kernel, µs, calls]]: device time of kernels that the path launches; the path is None if
        unknown. `busy`: µs with at least one running kernel.
    """
    ordered = sorted(events, key=lambda event: event.time_range.start)
    times, busy = device_times(ordered)
    paths: dict[tuple[str, ...], int] = {}
    host: dict[int, list[float]] = {}
    kernels: dict[tuple[int | None, str], list[float]] = {}

    @functools.cache
    def path(event: Any) -> tuple[str, ...]:
        parent = event.cpu_parent
        return (*(path(parent) if parent is not None else ()), event.name)

    for event in ordered:
        if _is_on_device(event) or event.is_async:
            continue
        number = paths.setdefault(path(event), len(paths))
        figures = host.setdefault(number, [0.0, 0])
        figures[0] += event.self_cpu_time_total
        figures[1] += 1
        if not getattr(event, "is_user_annotation", False):  # labels also appear as kernels
            for kernel in event.kernels:
                figures = kernels.setdefault((number, kernel.name), [0.0, 0])
                figures[0] += kernel.duration
                figures[1] += 1
    for name, us in times.items():
        known = [figures for (_, of), figures in kernels.items() if of == name]
        if len(us) > (calls := sum(int(count) for _, count in known)):
            kernels[None, name] = [sum(us) - sum(took for took, _ in known), len(us) - calls]
    return {
        "paths": [*map(list, paths)],
        "host": [[number, *figures] for number, figures in host.items()],
        "kernels": [[*key, *figures] for key, figures in kernels.items()],
        "busy": busy,
    }


def _is_on_device(event: Any) -> bool:
    return bool(event.device_type.name != "CPU")


def device_times(events: Iterable[Any]) -> tuple[dict[str, list[float]], float]:
    """Return (kernel -> µs of each call, µs with at least one running kernel)."""
    times: dict[str, list[float]] = {}
    busy, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.start):
        if not _is_on_device(event) or getattr(event, "is_user_annotation", False):
            continue
        start, end = event.time_range.start, event.time_range.end
        times.setdefault(event.name, []).append(float(end - start))
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return times, busy


def _label(name: str) -> Any:
    """Return a context manager that labels a profile; cheaper than `record_function`."""
    return torch._C._profiler._RecordFunctionFast(name)


@contextmanager
def _labels(worker: Any) -> Iterator[None]:
    """Label the plan's implementations and all layers during the block."""
    inside: list[Any] = []

    def enter(name: str, *_: Any) -> None:
        if is_compiling():  # a compiler retraces modules with new hooks
            return
        inside.append(_label(name))
        inside[-1].__enter__()

    def leave(*_: Any) -> None:
        if not is_compiling():
            inside.pop().__exit__(None, None, None)

    def instead(impl: OpImpl) -> Callable[..., Any]:
        name = f"{LABEL}/op/{impl.op_name}/{impl.impl_id}"

        def labelled(*args: Any, **more: Any) -> Any:
            if is_compiling():
                return impl.fn(*args, **more)
            with _label(name):
                return impl.fn(*args, **more)

        return labelled

    with ExitStack() as stack:
        for root in _roots(worker):
            for module in root.modules():
                name = f"{LABEL}/layer/{_named(type(module))}"
                before = module.register_forward_pre_hook(functools.partial(enter, name))
                after = module.register_forward_hook(leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        stack.enter_context(replacing(worker.vllm_fl_engine.plan.record, instead))
        yield


def _roots(worker: Any) -> Iterator[torch.nn.Module]:
    """Yield the model, its draft model and its sampler."""
    runner = getattr(worker, "model_runner", None)
    draft = getattr(runner, "get_draft_model", lambda: None)
    for found in (worker.get_model(), draft(), getattr(runner, "sampler", None)):
        if isinstance(found, torch.nn.Module):
            yield found


# A worker imports this module before it loads and compiles the model.
watch_compiler()
