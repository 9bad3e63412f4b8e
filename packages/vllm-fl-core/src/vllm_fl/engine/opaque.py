"""Opaque ops: torch.library operators for implementations that a compiler must not trace.

Dynamo, Inductor and CUDA graphs see one operator with the contract's schema and fake. The
candidates run inside it. If an implementation overwrites arguments that the caller grants, the
operator mutates them, so they are not copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..contracts import OpSpec, Variant
from ..contracts.routes import Route, aliases, by_target, put
from ..dispatch.chain import Chain
from ..dispatch.guard import call_guard
from ..plugins.types import OpImpl


class Watched(TorchDispatchMode):
    """Records the calls of operators in a block."""

    def __init__(self, is_wanted: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_wanted = is_wanted
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        """(operator, positional arguments, keyword arguments)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.is_wanted(func):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


LIBRARY = torch.library.Library("vllm_fl", "FRAGMENT")


@dataclass(frozen=True)
class _Operator:
    """An operator of this process. `impl_id` is the first candidate for the largest calls."""

    op: str
    impl_id: str
    body: Callable[..., Any]


_operators: dict[str, _Operator] = {}
"""Operators by name. A process cannot define an operator twice. A plan with the number of an ended
engine's plan therefore reuses its operators with new bodies."""


def operators() -> dict[str, tuple[str, str]]:
    """Return name -> (op, impl id for the largest calls) of the operators of this process."""
    return {name: (of.op, of.impl_id) for name, of in _operators.items()}


def unique_name(readable: str, *identity: object) -> str:
    """Return an ASCII name for vLLM or torch, which begins with the readable part. The name differs
    for each `identity`, a tuple of JSON-able values."""
    word = re.sub(r"[^a-z0-9_]+", "_", readable.lower())[:80]
    text = json.dumps([readable, *identity])
    return f"{word}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_opaque(impl: OpImpl) -> bool:
    """Whether a compiler must not trace the implementation. An implementation with `supports` is
    opaque even if it is traceable: a trace would evaluate `supports` only once, for the shapes of
    the first compilation."""
    return not impl.traceable or impl.supports is not None


def opaque_op(chain: Chain, number: int = 1) -> OpImpl:
    """Return the first implementation of `chain`, with a torch.library operator as its function.

    The chain and the plan's number determine the operator's name. A compiled graph therefore finds
    the operator in another process, and two simultaneous plans have separate operators. Registering
    the chain again with the same number replaces the body.

    Args:
        chain: the candidates, and the arguments that the caller grants. If there are several rows,
            the operator selects the row when it runs (in a CUDA graph only once, at capture). It
            mutates its arguments if the first candidate of the largest calls does. Otherwise a
            candidate of another row that overwrites `x` gets a copy.
        number: the plan's number (`Plan.number`).
    """
    spec, first = chain.spec, chain.impls[0]
    rows = [[n, [impl.impl_id for impl in impls]] for n, impls in chain.rows]
    branches = []
    for variant in sorted(spec.variants, key=lambda variant: len(variant.parameters)):
        granted = chain.grants & first.consumes >= {*variant.overwrites}
        written = variant.overwrites if granted else ()
        # An operator must not change its inputs unless its schema allows it.
        granting = dataclasses.replace(chain, grants=frozenset(written))
        guard = call_guard(granting)
        name = unique_name(
            "_".join(filter(None, (spec.name, variant.name, first.impl_id))),
            rows,
            [spec.name, variant.name, *written],
            {"strict": chain.strict, "place": number},
        )
        body = _writing(spec, variant, guard) if written else _returning(variant, guard)
        _define(name, spec, variant, written=bool(written))
        _operators[name] = _Operator(spec.name, first.impl_id, body)
        branches.append((variant, written, getattr(torch.ops.vllm_fl, name).default))
    consumes = frozenset(name for _, written, _ in branches for name in written)
    return dataclasses.replace(
        first, fn=_router(spec, branches), supports=None, consumes=consumes, traceable=True
    )


def _returning(variant: Variant, guard: Callable[..., Any]) -> Callable[..., Any]:
    single = variant.returns == 1

    def body(*args: Any) -> Any:
        result = guard(*args)
        return _fresh(result[0] if single and isinstance(result, tuple) else result, args)

    return body


def _writing(spec: OpSpec, variant: Variant, guard: Callable[..., Any]) -> Callable[..., Any]:
    targets = [spec.parameters.index(parameter) for parameter in variant.overwrites]

    def body(*args: Any) -> None:
        result = guard(*args)
        # Some implementations cannot write to an argument. A later candidate may write to none.
        put(tuple(args[at] for at in targets), result)

    return body


def _define(name: str, spec: OpSpec, variant: Variant, *, written: bool) -> None:
    """Define the operator of a variant unless it exists. The operator calls its body in
    `_operators`."""
    if name in _operators:
        return
    LIBRARY.define(name + (variant.mutating_schema if written else variant.schema))

    def newest(*args: Any) -> Any:
        return _operators[name].body(*args)

    def shapes(*args: Any) -> Any:
        result = None if written else spec.fake(*args)
        return result[0] if variant.returns == 1 and isinstance(result, tuple) else result

    kernel, fake = (_of_variant(spec, variant, function) for function in (newest, shapes))
    LIBRARY.impl(name, kernel, dispatch_key="CompositeExplicitAutograd")
    torch.library.register_fake(f"vllm_fl::{name}", fake, lib=LIBRARY)


def _of_variant(spec: OpSpec, variant: Variant, op: Callable[..., Any]) -> Callable[..., Any]:
    """Convert `op` from the contract's parameters to the parameters of a variant's operator. A
    variant omits parameters, and torch omits trailing arguments that equal the schema's
    defaults."""
    parameters = spec.signature.parameters.values()
    absent = {p.name: None for p in parameters if p.default is p.empty}
    left_out = {name: None for name in absent if name not in variant.parameters}
    return by_target(Route(constants=left_out), variant.parameters, spec, op)


def _router(
    spec: OpSpec, branches: Sequence[tuple[Variant, tuple[str, ...], Callable[..., Any]]]
) -> Callable[..., Any]:
    """Generate a function that selects the operator by the arguments that are None. Dynamo can
    trace it. `branches` are (variant, the arguments that the operator overwrites, the operator),
    with the fewest parameters first."""
    scope: dict[str, Any] = {}
    lines = [f"def {spec.name}({', '.join(spec.parameters)}):"]
    for number, (variant, written, operator) in enumerate(branches):
        scope[f"_op{number}"] = operator
        call = f"_op{number}({', '.join(variant.parameters)})"
        left_out = [p for p in spec.parameters if p not in variant.parameters]
        lines.append(f"    if {' and '.join(f'{p} is None' for p in left_out) or 'True'}:")
        if written:
            lines.append(f"        {call}")
            call = ", ".join(written)
        lines.append(f"        return {f'({call}, None)' if variant.pads else call}")
    exec("\n".join(lines), scope)
    router: Callable[..., Any] = scope[spec.name]
    return router


def _fresh(result: Any, args: tuple[Any, ...]) -> Any:
    """Copy results if necessary. An operator must not return an input, a view of an input, or the
    same tensor twice. Its results must be contiguous, because its fake returns contiguous tensors.
    """
    taken = [arg for arg in args if isinstance(arg, torch.Tensor)]
    parts = []
    for part in result if isinstance(result, tuple) else (result,):
        whole = part.contiguous()
        fresh = whole.clone() if any(aliases(whole, other) for other in taken) else whole
        taken.append(fresh)
        parts.append(fresh)
    return tuple(parts) if isinstance(result, tuple) else parts[0]
