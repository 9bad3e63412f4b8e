"""Checks of compilation: the implementation compiles to one graph, with correct results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_fl.contracts import Sample
from vllm_fl.engine.opaque import Watched, is_opaque, opaque_op
from vllm_fl.engine.plan import Plan, PlanEntry
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl_verify.verification import compare

from .checks import judge
from .subject import HIDE_FRAMES, Refused, Subject, expect, fresh, pattern
from .variables import undeclared

__tracebackhide__ = HIDE_FRAMES

BATCHES = (5, 7)
"""Two batch sizes that compilers do not specialise, unlike 0 and 1."""


def tracing(subject: Subject, dtype: str, sample: str) -> None:
    """The implementation compiles to one graph for two batch sizes, with correct results.

    If it is traceable, its backend declares the variables that it reads.
    """
    subject.needs_no_layer()
    if problem := undeclared(subject, dtype):
        raise AssertionError(problem)
    kind = getattr(torch, dtype)
    served = zip(*(subject.served(dtype, tokens) for tokens in BATCHES), strict=True)
    seen = set()
    for small, large in served:
        if subject.accepts(small):
            seen.add(pattern(small))
            compiled, graphs = _compiled(subject, _varying(small, large))
            for each in (small, large):
                judge(compare(compiled, subject.spec, each, kind), each, skips=False)
            expect(
                len(graphs) == 1,
                f"{small.name}: {len(graphs)} graphs for two batch sizes, expected one",
            )
    for each in subject.patterns(dtype):
        if pattern(each) in seen:
            continue
        compiled, _ = _compiled(subject)
        judge(compare(compiled, subject.spec, each, kind), each, skips=False)


def opcheck(subject: Subject, dtype: str, sample: str) -> None:
    """As an opaque operator, the implementation matches schema and fake kernel (`opcheck`)."""
    subject.needs_no_layer()
    if not is_opaque(subject.impl):
        raise Refused("traceable: a compiler traces it, so no operator wraps it")
    # opcheck copies arguments separately, and an implementation may not support such copies.
    oracle = _oracle(subject)
    intact = _wrapped(subject, frozenset(), last=oracle).fn
    granted = _wrapped(subject, subject.spec.consumable, last=oracle).fn
    for each in subject.patterns(dtype):
        with Watched(lambda operator: operator.namespace == "vllm_fl") as watched:
            intact(*fresh(each).args)
            if subject.impl.consumes:
                granted(*fresh(each).args)
        for operator, args, kwargs in watched.calls:
            # torch cannot compare fp8 arguments before and after; `values` checks them.
            has_fp8 = any(str(getattr(arg, "dtype", "")).startswith("torch.float8") for arg in args)
            utils = ("test_faketensor",) if has_fp8 else ("test_schema", "test_faketensor")
            try:
                torch.library.opcheck(operator, args, kwargs, test_utils=utils)
            except Exception as error:
                raise AssertionError(f"{each.name}: {error}") from error


def _compiled(
    subject: Subject, varying: Sequence[tuple[int, int]] = ()
) -> tuple[OpImpl, list[torch.fx.GraphModule]]:
    """Return the implementation as compiled code calls it, and the graphs that are compiled.

    `varying` has (argument, dimension) of the sizes that the compiler must treat as dynamic.
    """
    torch._dynamo.reset()  # code of another implementation may be compiled already
    graphs: list[torch.fx.GraphModule] = []
    lower = torch._dynamo.lookup_backend("aot_eager")

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        lowered: Callable[..., Any] = lower(graph, inputs)
        return lowered

    impl = subject.impl
    if is_opaque(impl):
        impl = _wrapped(subject, subject.spec.consumable)
    fn = torch.compile(impl.fn, backend=backend, fullgraph=True)

    def marked(*args: Any) -> Any:
        for index, dim in varying:
            torch._dynamo.mark_dynamic(args[index], dim)
        return fn(*args)

    return dataclasses.replace(impl, fn=marked), graphs


def _wrapped(subject: Subject, grants: frozenset[str], last: OpImpl | None = None) -> OpImpl:
    """Return the implementation as an operator of torch.library, like in a compiled plan."""
    op, specs = subject.spec.name, {subject.spec.name: subject.spec}
    plan = Plan("compiled", {op: PlanEntry(op, subject.manager().rows(op))}, contracts=specs)
    return opaque_op(plan.chain(op, grants, last=last))


def _oracle(subject: Subject) -> OpImpl:
    """Return an implementation from the oracle, rounded to the contract's dtypes."""
    spec = subject.spec

    def fn(*args: Any) -> Any:
        exact, empty = spec.oracle(*args), spec.fake(*args)
        if not isinstance(empty, tuple):
            return exact.to(empty.dtype)
        pairs = zip(exact, empty, strict=True)
        return tuple(None if e is None else x.to(e.dtype) for x, e in pairs)

    return OpImpl(spec.name, "reference.oracle", BackendImplKind.REFERENCE, fn)


def _varying(small: Sample, large: Sample) -> list[tuple[int, int]]:
    """Return (argument, dimension) of the sizes that differ between two samples."""
    return [
        (index, dim)
        for index, (a, b) in enumerate(zip(small.args, large.args, strict=True))
        if isinstance(a, torch.Tensor)
        for dim, sizes in enumerate(zip(a.shape, b.shape, strict=True))
        if sizes[0] != sizes[1]
    ]
