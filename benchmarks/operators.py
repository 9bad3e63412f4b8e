"""Measure the host overhead of an overridden vLLM operator in an eager engine.

The same operator is called in each round with and without the override. The implementation does
nothing, so the dispatch and the copy of the result into the output of the operator are measured.
"""

from __future__ import annotations

import argparse
from typing import Any

from callpath import Case
from figures import Figure, MeasurementFailed, figure, paired, ratios

__all__ = ["measure"]

ROUNDS, CALLS = 100, 2_000


def measure(options: argparse.Namespace) -> list[Figure]:
    """Measure the operator patcher.

    Raises:
        MeasurementFailed: vLLM's operators are missing.
    """
    try:
        import torch
        from vllm.platforms import current_platform

        from vllm_fl.integration import engines
        from vllm_fl.integration.patchers import operators
        from vllm_fl.plugins.registry import known_contracts
    except ImportError as error:
        raise MeasurementFailed(f"vLLM cannot be imported: {error}") from error
    from vllm_fl.dispatch import BackendImplKind, OpImpl, OpManager, OpRegistry
    from vllm_fl.engine.facts import EngineFacts
    from vllm_fl.engine.plan import make_plan
    from vllm_fl.settings.loading import load_settings

    current_platform.import_kernels()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, out, ready = (torch.ones(1, width, device=device) for width in (64, 32, 32))

    def silu_and_mul(x: Any) -> Any:
        return ready

    registry = OpRegistry()
    registry.register_impl(
        OpImpl("silu_and_mul", "vendor.v0", BackendImplKind.VENDOR, silu_and_mul, "v0")
    )
    facts = EngineFacts(load_settings({}), "eager")
    plan = make_plan(OpManager(registry), facts)
    engine = engines.Engine(facts, 0)
    engine.plan, engine.device = plan, device
    chosen = operators.Operators().choice(plan, known_contracts().bindings, device, torch.float32)
    if not chosen.taken:
        raise MeasurementFailed(f"the operator cannot be overridden: {dict(chosen.left)}")

    def called() -> Case:
        return Case("f(out, x)", f=torch.ops._C.silu_and_mul, out=out, x=x)

    direct, ours, others = called(), called(), called()
    copy = Case("out.copy_(ready)", out=out, ready=ready)
    asking = Case("f()", f=engines.calling_engine)
    for _ in range((options.rounds or ROUNDS) + 1):
        direct.run(CALLS)
        copy.run(CALLS)
        operators.Operators().take(engine, chosen)
        try:
            others.run(CALLS)
            with engine.calling(engine):
                ours.run(CALLS)
                asking.run(CALLS)
        finally:
            engine.unbind()
    every = [case.times[1:] for case in (direct, ours, others, copy, asking)]
    plain, mine, foreign, copied, asked = every
    return [
        figure("overridden operator over a direct call", "ns", paired(mine, plain), at_most=5000),
        figure("  of this the copy of the result", "ns", copied),
        figure("  called by no engine, over a direct call", "ns", paired(foreign, plain)),
        figure("  as a multiple of a direct call", "", ratios(mine, plain)),
        figure("which engine is calling", "ns", asked, at_most=300),
    ]
