"""Opaque ops: an implementation that a compiler must take whole, as a torch.library operator.

Dynamo, Inductor and CUDA graphs see one operator with the contract's schema and fake; the chain of
candidates, their refusals included, runs inside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .contracts import OpSpec, Variant
from .guard import Chain, call_guard
from .types import OpImpl

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["is_opaque", "opaque_op"]

LIBRARY = torch.library.Library("vllm_fl", "FRAGMENT")

_bodies: dict[str, Callable[..., Any]] = {}


def is_opaque(impl: OpImpl) -> bool:
    """Whether a compiler must not look inside.

    A traceable implementation with `supports` counts as opaque: traced, its refusal would be
    decided once, by the shapes of the first compilation.
    """
    return not impl.traceable or impl.supports is not None


def opaque_op(chain: Chain, plan: Plan) -> OpImpl:
    """The first implementation of `chain` as one whose function is a torch.library operator.

    Registering the same chain again finds the same operator, so that a graph compiled by one
    process is found again by the next; its body then belongs to the newest plan.
    """
    spec = chain.spec
    assert spec is not None  # only contracts have torch schemas
    first = chain.impls[0]
    ids = "|".join(impl.impl_id for impl in chain.impls)
    digest = hashlib.sha256(f"{ids} strict={chain.strict}".encode()).hexdigest()[:8]
    # Inputs of an operator stay intact unless its schema says otherwise; ours says nothing.
    guard = plan.counting(
        call_guard(dataclasses.replace(chain, grants=frozenset())), chain.op, first.impl_id
    )
    operators = {
        variant.name: _operator(spec, variant, f"{_word(first.impl_id)}_{digest}", guard)
        for variant in spec.variants
    }
    return dataclasses.replace(
        first, fn=_router(spec, operators), supports=None, consumes=frozenset(), traceable=True
    )


def _operator(
    spec: OpSpec, variant: Variant, suffix: str, guard: Callable[..., Any]
) -> Callable[..., Any]:
    """One torch.library operator: the schema's arguments in, the contract's call inside."""
    name = "_".join(filter(None, (spec.name, variant.name, suffix)))
    absent = {
        p.name: None if p.default is p.empty else p.default
        for p in spec.signature.parameters.values()
    }
    fresh = name not in _bodies
    single = variant.returns == 1

    def contract_args(args: tuple[Any, ...]) -> list[Any]:
        # torch leaves out trailing arguments that equal the schema's defaults.
        given = dict(zip(variant.parameters, args, strict=False))
        return [given.get(p, absent[p]) for p in spec.parameters]

    def body(*args: Any) -> Any:
        result = guard(*contract_args(args))
        result = result[0] if single and isinstance(result, tuple) else result
        return _fresh(result, args)

    _bodies[name] = body
    if fresh:
        LIBRARY.define(name + variant.schema)

        def fake(*args: Any) -> Any:
            result = spec.fake(*contract_args(args))
            return result[0] if single and isinstance(result, tuple) else result

        def newest(*args: Any) -> Any:
            return _bodies[name](*args)

        LIBRARY.impl(name, newest, dispatch_key="CompositeExplicitAutograd")
        torch.library.register_fake(f"vllm_fl::{name}", fake, lib=LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.vllm_fl, name).default
    return overload


def _router(spec: OpSpec, operators: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Choose the operator by which arguments are None, written out so that Dynamo can trace it."""
    scope: dict[str, Any] = {}
    lines = [f"def {spec.name}({', '.join(spec.parameters)}):"]
    narrowest_first = sorted(spec.variants, key=lambda variant: len(variant.parameters))
    for number, variant in enumerate(narrowest_first):
        scope[f"_op{number}"] = operators[variant.name]
        call = f"_op{number}({', '.join(variant.parameters)})"
        left_out = [p for p in spec.parameters if p not in variant.parameters]
        test = " and ".join(f"{p} is None" for p in left_out) or "True"
        lines += [
            f"    if {test}:",
            f"        return {f'({call}, None)' if variant.pads else call}",
        ]
    exec("\n".join(lines), scope)
    router: Callable[..., Any] = scope[spec.name]
    return router


def _fresh(result: Any, args: tuple[Any, ...]) -> Any:
    """An operator may return neither an input, nor a view of one, nor one tensor twice: copy."""
    taken = [arg for arg in args if isinstance(arg, torch.Tensor)]
    parts = []
    aliases: Callable[[Any, Any], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
    for part in result if isinstance(result, tuple) else (result,):
        fresh = part.clone() if any(aliases(part, other) for other in taken) else part
        taken.append(fresh)
        parts.append(fresh)
    return tuple(parts) if isinstance(result, tuple) else parts[0]


def _word(impl_id: str) -> str:
    return re.sub(r"\W", "_", impl_id)
