"""Bind an engine to its plan: everything that the plan changes in vLLM, until it is unbound."""

from __future__ import annotations

from ..dispatch import get_default_manager
from ..engine.digest import digest
from ..engine.plan import leave_place, take_place
from .carried import seal
from .engines import Engine
from .patching import PATCHERS
from .planning import apply


def bind(engine: Engine) -> None:
    """Seal the plan, and change vLLM's configuration and code of this process as it says."""
    config, contents = engine.config, engine.contents
    engine.on_unbind(get_default_manager().seal(f"the engine's worker (rank {engine.rank})"))
    plan = engine.plan = take_place(engine.plan)
    engine.on_unbind(leave_place, plan)
    if plan.place > 1:  # its operators have other names: compiled code of another's is not its
        contents = {**contents, "place": plan.place}
    for patcher in PATCHERS:
        contents = {**contents, **patcher.choose(engine)}
    engine.digest = digest(contents)
    apply(plan, config)
    engine.on_unbind(seal(config, engine.digest))
    engine.begin(config)
    for patcher in PATCHERS:
        patcher.apply(engine)


def bind_models(engine: Engine) -> None:
    """Bind the models that are built to the engine's plan, which is another one now."""
    for model in engine.models.values():
        for patcher in PATCHERS:
            patcher.bind(engine, model)
