"""Bind an engine to its plan: everything that the plan changes in vLLM, until the engine leaves."""

from __future__ import annotations

from ..dispatch import get_default_manager
from ..engine.digest import digest
from ..engine.plan import leave_place, take_place
from . import ranges
from .engines import Engine
from .places import installed_bindings
from .planning import apply, seal
from .seams import functions, fusions, operators, torch_operators
from .seams.ir import bind_provider, reset_priorities


def bind(engine: Engine) -> None:
    """Seal the plan, and change vLLM's configuration and code of this process as it says."""
    config, contents = engine.config, engine.contents
    engine.on_unbind(get_default_manager().seal(f"the engine's worker (rank {engine.rank})"))
    plan = engine.plan = take_place(engine.plan)
    engine.on_unbind(leave_place, plan)
    if plan.place > 1:  # its operators have other names: compiled code of another's is not its
        contents = {**contents, "place": plan.place}
    assert engine.facts.dtype is not None  # a worker has a model
    table = installed_bindings()
    engine.operators = operators.choose(plan, table, engine.device, engine.facts.dtype)
    engine.functions = functions.choose(plan, table)
    contents = {
        **contents,
        "operators": engine.operators.names,
        "defined": engine.operators.schemas,
        "functions": engine.functions.names,
    }
    engine.digest, engine.overriders = digest(contents), {}
    bind_provider(engine, by_range=ranges.is_compiled_by_range(config))
    apply(plan, config)
    reset_priorities(engine)
    engine.on_unbind(seal(config, engine.digest))
    engine.begin(config)
    operators.take(engine, engine.device)
    functions.take(engine)
    fusions.watch(engine)
    torch_operators.watch(engine)
