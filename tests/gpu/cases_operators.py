"""Overridden operators on the GPU: eager, in a CUDA graph (no Python runs), and restored. Also
core's schemas for vLLM builds without compiled operators, against this build."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["cases"]


CALLED = (
    "_C::fatrelu_and_mul",
    "_C::fused_add_rms_norm",
    "_C::gelu_and_mul",
    "_C::gelu_tanh_and_mul",
    "_C::mul_and_silu",
    "_C::rms_norm",
    "_C::rotary_embedding",
    "_C::silu_and_mul",
)
"""Operators that are called as vLLM does, and in a captured graph."""


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """(operator, the problem or "")."""
    import torch
    from vllm.platforms import current_platform

    import vllm_fl_reference.plugin
    from vllm_fl.contracts.binding import OperatorTarget
    from vllm_fl.dispatch.manager import OpManager
    from vllm_fl.engine.facts import EngineFacts
    from vllm_fl.engine.plan import make_plan
    from vllm_fl.integration.compat import vllm_version
    from vllm_fl.integration.engines import Engine, calling
    from vllm_fl.integration.patchers import missing_operators, operators
    from vllm_fl.plugins.registry import OpRegistry, known_contracts
    from vllm_fl.settings.loading import load_settings

    current_platform.import_kernels()
    for name, (text, _) in missing_operators._table(vllm_version()).items():
        known, there = torch._C.parse_schema(text), operators._schema(name)
        yield f"schema of {name}", "" if str(known) == str(there) else f"it is {there}"
    device = torch.device("cuda")
    registry = OpRegistry()
    registry.register_many(vllm_fl_reference.plugin.register_ops())
    settings = load_settings({"VLLM_FL_DISPATCH_DEBUG": "1", "VLLM_FL_PREFER": "reference"})
    facts = EngineFacts(settings, "eager")
    plan = make_plan(OpManager(registry), facts)
    engine = Engine(facts, 0)
    engine.plan, engine.device = plan, device
    chosen = operators.Operators().choice(plan, known_contracts().bindings, device, torch.bfloat16)
    bound = (
        target for binding in known_contracts().bindings.values() for target in binding.targets
    )
    named = {target.name for target in bound if isinstance(target, OperatorTarget)}
    there = (name for name in named if operators._schema(name) is not None)
    on_cuda = {n for n in there if torch._C._dispatch_has_kernel_for_dispatch_key(n, "CUDA")}
    taken = {name for names in chosen.names.values() for name in names}
    yield "every operator with a CUDA kernel is taken", ", ".join(sorted(taken ^ on_cuda))
    for name in CALLED:
        op: Callable[..., None] = getattr(torch.ops._C, name.partition("::")[2])
        args, written = _arguments(name, device)
        want = _after(op, args, written)
        operators.Operators().take(engine, chosen)
        try:
            with calling(engine):
                eager = _after(op, args, written)
                before = sum(plan.calls.values())
                graph, copies = torch.cuda.CUDAGraph(), _copies(args)
                with torch.cuda.graph(graph):
                    op(*copies)
                captured = sum(plan.calls.values()) - before
            for into, arg in zip(copies, args, strict=True):
                if isinstance(arg, torch.Tensor):
                    into.copy_(arg)
            graph.replay()
            torch.cuda.synchronize()
            replayed = [copies[at] for at in written]
            python = sum(plan.calls.values()) - before - captured
        finally:
            engine.unbind()
        after = _after(op, args, written)
        problems = [
            what
            for what, got in (("eager", eager), ("graph", replayed))
            for g, w in zip(got, want, strict=True)
            if not torch.allclose(g.float(), w.float(), rtol=2e-2, atol=2e-2)
        ]
        problems += ["captured without the override"] * (captured != 1)
        problems += ["Python ran in the replay"] * (python != 0)
        problems += [
            "vLLM's kernel did not come back"
            for g, w in zip(after, want, strict=True)
            if not torch.equal(g, w)
        ]
        yield name, "; ".join(problems)


def _copies(args: tuple[Any, ...]) -> list[Any]:
    return [arg.clone() if hasattr(arg, "clone") else arg for arg in args]


def _after(op: Callable[..., None], args: tuple[Any, ...], written: tuple[int, ...]) -> list[Any]:
    """The arguments that the operator writes to, after the call."""
    copies = _copies(args)
    op(*copies)
    return [copies[at] for at in written]


def _arguments(name: str, device: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Arguments of an operator's call, and the indices of written arguments."""
    import torch

    torch.manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    x = normal(33, 2048)
    if name.endswith(("_and_mul", "_and_silu")):
        threshold = (0.5,) if name == "_C::fatrelu_and_mul" else ()
        return (torch.empty_like(x[:, :1024].contiguous()), x, *threshold), (0,)
    if name == "_C::rms_norm":
        return (torch.empty_like(x), x, normal(2048), 1e-6), (0,)
    if name == "_C::fused_add_rms_norm":
        return (x, normal(33, 2048), normal(2048), 1e-6), (0, 1)
    positions = torch.arange(33, device=device) * 7
    return (positions, x, normal(33, 512), 128, normal(256, 128), True), (1, 2)
