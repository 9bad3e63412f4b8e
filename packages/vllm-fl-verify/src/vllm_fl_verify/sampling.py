"""The shadow check: some steps run eagerly, and their calls are compared with the reference result.
Incorrect calls are logged at once. A summary is logged once a minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vllm_fl.contracts.targets import Target
from vllm_fl.engine.plan import Plan
from vllm_fl.integration.engines import Engine
from vllm_fl.integration.targets import installed_bindings, targets
from vllm_fl.logs import get_logger
from vllm_fl.plugins.inspection import FAILED, Key, Objection
from vllm_fl.text import quote

from .made_inputs import checks_of
from .shadow import Shadow, Tally

EVERY = 60.0
"""Seconds between log lines without new errors."""

Refute = Callable[[Mapping[Key, Objection]], None]
"""Records faults for later startups."""

log = get_logger("engine")


def start_sampling(engine: Engine) -> Canary | None:
    """Begin to sample steps of an engine after its warm-up, if configured and possible. Replaces
    `execute_model` of the model runner object, which Ray's executor also calls.
    """
    settings, worker, model = engine.facts.settings, engine.worker, engine.model
    if settings.shadow is None:
        return None
    why = _obstacle(engine, model)
    if why:
        if engine.rank == 0:
            log.warning("VLLM_FL_SHADOW=%s: no step is sampled: %s", settings.shadow, why)
        return None
    assert model is not None
    shadow = Shadow(engine.plan, float(settings.shadow), _out_of_sight(engine.plan))
    refute = checks_of(engine).verdicts.refute
    canary = engine.state[Canary] = Canary(shadow, engine.rank, refute)
    engine.on_exit(canary.say)
    runner = engine.runner
    plain = runner.execute_model
    compiled = [m for m in model.modules() if getattr(m, "do_not_compile", True) is False]

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        is_step = scheduler_output.total_num_scheduled_tokens and not kwargs.get("dummy_run")
        if not is_step or not shadow.takes_step():
            return plain(scheduler_output, *args, **kwargs)
        with _eager(runner, compiled), shadow.comparing():
            output = plain(scheduler_output, *args, **kwargs)
        canary.look()
        return output

    runner.execute_model = execute_model
    dummy = getattr(worker, "execute_dummy_batch", None)
    if dummy is not None:  # another data-parallel replica runs a real step

        def execute_dummy_batch(*args: Any, **kwargs: Any) -> Any:
            shadow.steps += 1
            return dummy(*args, **kwargs)

        worker.execute_dummy_batch = execute_dummy_batch
    return canary


def _obstacle(engine: Engine, model: torch.nn.Module | None) -> str:
    from vllm.config import CompilationMode, CUDAGraphMode

    config, runner, device = engine.config, engine.runner, engine.device
    compilation = config.compilation_config
    if model is None or not hasattr(runner, "execute_model"):
        return "this worker does not expose its model or model runner"
    if compilation.mode == CompilationMode.STOCK_TORCH_COMPILE:
        return "compilation mode STOCK_TORCH_COMPILE keeps no uncompiled model"
    if getattr(config.parallel_config, "use_ubatching", False):
        return "micro-batches (DBO) run in separate threads"
    has_graphs = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
    if has_graphs and not _graph_switch(runner):
        return f"{type(runner).__name__} has no known switch for captured graphs"
    try:
        torch.zeros(1, dtype=torch.float64, device=device).sum()
    except Exception as error:  # devices raise various errors
        return f"{device} does not support float64: {quote(error)}"
    return ""


def _graph_switch(runner: Any) -> tuple[Any, str, object] | None:
    """Return (object, attribute, value) that makes vLLM's model runner use no captured graph."""
    from vllm.config import CUDAGraphMode

    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if hasattr(dispatcher, "cudagraph_mode"):
        return dispatcher, "cudagraph_mode", CUDAGraphMode.NONE
    manager = getattr(runner, "cudagraph_manager", None)
    if hasattr(manager, "_graphs_captured"):
        return manager, "_graphs_captured", False
    # vLLM's second model runner creates its manager after the KV cache.
    return (runner, "cudagraph_manager", None) if hasattr(runner, "cudagraph_manager") else None


@contextmanager
def _eager(runner: Any, compiled: list[torch.nn.Module]) -> Iterator[None]:
    """Inside the block, run the model uncompiled and without graphs. `compiled` are the modules
    that vLLM compiles. vLLM's switch for this, `skip_compiled` of its forward context, is set
    inside its model runners."""
    switches = [_graph_switch(runner), *((module, "do_not_compile", True) for module in compiled)]
    with ExitStack() as back:
        for thing, name, value in filter(None, switches):
            back.callback(setattr, thing, name, getattr(thing, name))
            setattr(thing, name, value)
        yield


def _out_of_sight(plan: Plan) -> dict[str, str]:
    found = targets(installed_bindings(), Target)
    hidden = {op for op, _ in found} - {op for op, target in found if target.seen_live}
    why = "it occurs only in compiled code, and sampled steps are eager"
    return dict.fromkeys(hidden.intersection(plan.entries), why)


class Canary:
    def __init__(self, shadow: Shadow, rank: int, refute: Refute = lambda _: None) -> None:
        self.shadow, self._rank, self._refute = shadow, rank, refute
        self._due = time.monotonic() + EVERY
        self._named: set[tuple[str, str]] = set()

    def look(self) -> None:
        """Log after a minute, or at once when an implementation is first found incorrect. The
        latter must not wait for another step, because there may not be one."""
        now = time.monotonic()
        wrong = {(op, impl_id) for (op, impl_id, _), t in self.shadow.new.items() if t.wrong}
        if now >= self._due or not wrong <= self._named:
            self._due = now + EVERY
            self._named |= wrong
            self.say()

    def say(self) -> None:
        found = self.shadow.collect()
        wrong = {key: tally for key, tally in found.items() if tally.wrong}
        for (op, impl_id, tokens), tally in wrong.items():
            self._refute({(op, impl_id): Objection(FAILED, "incorrect in a shadow check")})
            log.warning(
                "Shadow: implementation '%s' of op '%s' is incorrect in %d of %d compared calls of "
                "up to %d tokens: worst error %.3gx tolerance, relative error %.2g, %d NaN, %d "
                "infinite (rank %d)%s",
                impl_id,
                op,
                tally.wrong,
                tally.calls,
                tokens,
                tally.share,
                tally.relative,
                tally.nan,
                tally.inf,
                self._rank,
                self.shadow.kept.get((op, impl_id), ""),
            )
        if found and not wrong and self._rank == 0:
            log.info("%s", _all_well(self.shadow, found))


def _all_well(shadow: Shadow, found: Mapping[tuple[str, str, int], Tally]) -> str:
    (op, impl_id, tokens), worst = max(found.items(), key=lambda item: item[1].share)
    calls, seen = (sum(getattr(t, what) for t in found.values()) for what in ("calls", "seen"))
    return (
        f"Shadow: {shadow.sampled} of {shadow.steps} steps sampled; {calls} of {seen} calls "
        f"compared since the last line, all within the tolerance; worst error {worst.share:.2g}x "
        f"tolerance ({op} of {impl_id}, up to {tokens} tokens)"
    )
