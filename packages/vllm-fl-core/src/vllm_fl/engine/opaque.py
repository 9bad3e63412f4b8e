"""Opaque ops: an implementation that a compiler must take whole, as a torch.library operator.

Dynamo, Inductor and CUDA graphs see one operator with the contract's schema and fake; the chain of
candidates, their refusals included, runs inside it. An implementation that writes its results over
arguments which the caller grants becomes an operator that mutates them: no copies are made for it.
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
from ..contracts.routes import Route, by_place, put
from ..dispatch.guard import Chain, Counting, call_guard
from ..plugins.types import OpImpl

__all__ = [
    "Ordered",
    "Watched",
    "inlined",
    "is_inlined",
    "is_opaque",
    "mutated",
    "opaque_op",
    "operators",
    "ordered",
    "tokens_of",
    "unique_name",
]


class Watched(TorchDispatchMode):
    """Keeps the calls of wanted operators that are made inside the block.

    Args:
        is_wanted: an operator -> whether its calls are kept.
    """

    def __init__(self, is_wanted: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_wanted = is_wanted
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        """(operator, arguments by position, by name)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.is_wanted(func):
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


LIBRARY = torch.library.Library("vllm_fl", "FRAGMENT")

_bodies: dict[str, Callable[..., Any]] = {}
"""Operator -> what it runs. An operator cannot be defined twice in a process, but its body can
change: a plan that takes the place of one that is gone finds its operators and gives them its own.
"""


_names: dict[str, tuple[str, str]] = {}
"""Operator -> (its op, the id of the first candidate for the largest calls)."""


def operators() -> dict[str, tuple[str, str]]:
    """The operators of this process, by name: (op, the id of what runs in the largest calls)."""
    return dict(_names)


@dataclass(frozen=True)
class Ordered:
    """What an operator that is ordered by size runs: for who puts code of a row in its place.

    Args:
        chain: the candidates, by rows.
        variant: the operator's schema.
    """

    chain: Chain
    variant: Variant

    def tokens(self, args: Sequence[Any]) -> Any:
        """How many tokens a call of the operator with these arguments has, as its rows count."""
        return self._by_schema(lambda *given: tokens_of(self.chain, given))(*args)

    def inlined(self, impl: OpImpl, counting: Counting) -> Callable[..., Any]:
        """A function of the operator's parameters that runs `impl` alone, for a compiler to trace.

        What it returns is contiguous, as the operator's results are, and no memory of an argument.
        """
        return self._by_schema(_returning(self.variant, inlined(self.chain, impl, counting)))

    def _by_schema(self, op: Callable[..., Any]) -> Callable[..., Any]:
        assert self.chain.spec is not None  # only ops with a contract have operators
        return _by_schema(self.chain.spec, self.variant, op)


_ordered: dict[str, Ordered] = {}
"""Operator -> what it runs: of those that are ordered by size and write over no argument."""


def ordered() -> dict[Callable[..., Any], Ordered]:
    """The operators of this process that are ordered by size and write over no argument."""
    return {getattr(torch.ops.vllm_fl, name).default: told for name, told in _ordered.items()}


def inlined(chain: Chain, impl: OpImpl, counting: Counting) -> Callable[..., Any]:
    """`impl` by the contract's parameters, as code that a compiler traces, which has no second try.

    Args:
        chain: a chain of the op.
        impl: one of its candidates that a compiler may look into.
        counting: counts calls if the plan does.
    """
    bare = dataclasses.replace(chain, impls=(impl,), bare=True, rows=())
    return counting(call_guard(bare.granting(frozenset())), chain.op, impl.impl_id)


def tokens_of(chain: Chain, args: Sequence[Any]) -> Any:
    """The token count of a call: the rows of the first argument that has one for each token.

    Args:
        chain: a chain of the op.
        args: all of the contract's arguments.
    """
    spec = chain.spec
    assert spec is not None  # only ops with a contract have rows
    return next(iter(spec.with_rows(args).values())).shape[0]


def unique_name(readable: str, *identity: object) -> str:
    """A name for vLLM or torch: ASCII, legible, and never the same for two identities.

    Args:
        readable: what the name shows, in lower-case letters, digits and underscores.
        identity: JSON-able; what must differ where the names differ, exactly as it is spelled.
    """
    word = re.sub(r"[^a-z0-9_]+", "_", readable.lower())[:80]
    text = json.dumps([readable, *identity])
    return f"{word}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_opaque(impl: OpImpl) -> bool:
    """Whether a compiler must not look inside.

    A traceable implementation with `supports` counts as opaque: traced, its refusal would be
    decided once, by the shapes of the first compilation.
    """
    return not impl.traceable or impl.supports is not None


def is_inlined(impl: OpImpl) -> bool:
    """Whether an implementation's code may stand in a graph in an operator's place."""
    return not (is_opaque(impl) or impl.consumes or impl.needs_layer)


def mutated(chain: Chain, variant: Variant, *, rest_is_inlined: bool = False) -> tuple[str, ...]:
    """The arguments over which the operator of this variant writes its results.

    Args:
        chain, rest_is_inlined: as for `opaque_op`.
        variant: one of the contract's.
    """
    deciding = chain.impls[0]
    if rest_is_inlined:
        firsts = [deciding, *(row.impls[0] for _, row in reversed(chain.rows))]
        deciding = next((impl for impl in firsts if not is_inlined(impl)), deciding)
    written = variant.overwrites
    return written if written and chain.grants & deciding.consumes >= set(written) else ()


def opaque_op(
    chain: Chain, counting: Counting, place: int = 1, *, rest_is_inlined: bool = False
) -> OpImpl:
    """The first implementation of `chain` as one whose function is a torch.library operator.

    The operator is named after the chain and the plan's place, so that a graph compiled by one
    process is found again by the next, and two plans that serve at the same time have each their
    own. Registering the same chain in the same place again gives the operator a new body.

    Args:
        chain: the candidates, and the arguments that the caller grants. Where it has rows, the
            operator looks a call's row up when it runs: once, at its capture, in a captured graph.
            It mutates its arguments where the first candidate of the largest calls does.
        counting: counts calls if the plan does, each row's by its own first candidate.
        place: the plan's place among those that serve in this process (`Plan.place`).
        rest_is_inlined: whether the code of rows that can be inlined is put in the operator's
            place, whatever its schema. It then mutates its arguments where the first candidate of
            the largest calls that are left to it does.
    """
    spec = chain.spec
    assert spec is not None  # only contracts have torch schemas
    first = chain.impls[0]
    ids = [impl.impl_id for impl in chain.impls]
    rows = [[n, [impl.impl_id for impl in row.impls]] for n, row in chain.rows]
    branches = []
    for variant in sorted(spec.variants, key=lambda variant: len(variant.parameters)):
        written = mutated(chain, variant, rest_is_inlined=rest_is_inlined)
        # Inputs of an operator stay intact unless its schema says otherwise.
        guard = call_guard(chain.granting(frozenset(written)), counting=counting)
        name = unique_name(
            "_".join(filter(None, (spec.name, variant.name, first.impl_id))),
            ids,
            [spec.name, variant.name, *written],
            {"strict": chain.strict, "place": place, **({"rows": rows} if rows else {})},
        )
        operator = (_mutating if written else _functional)(spec, variant, name, guard)
        _names[name] = spec.name, first.impl_id
        if rows and not written:
            _ordered[name] = Ordered(chain, variant)
        branches.append((variant, written, operator))
    consumes = frozenset(name for _, written, _ in branches for name in written)
    return dataclasses.replace(
        first, fn=_router(spec, branches), supports=None, consumes=consumes, traceable=True
    )


def _functional(
    spec: OpSpec, variant: Variant, name: str, guard: Callable[..., Any]
) -> Callable[..., Any]:
    """An operator that leaves its arguments as they are and returns tensors of its own."""
    single = variant.returns == 1

    def fake(*args: Any) -> Any:
        result = spec.fake(*args)
        return result[0] if single and isinstance(result, tuple) else result

    body = _returning(variant, guard)
    return _operator(spec, variant, variant.schema, name, body, fake)


def _returning(variant: Variant, guard: Callable[..., Any]) -> Callable[..., Any]:
    """`guard` with results as the variant's operator returns them."""
    single = variant.returns == 1

    def body(*args: Any) -> Any:
        result = guard(*args)
        return _fresh(result[0] if single and isinstance(result, tuple) else result, args)

    return body


def _mutating(
    spec: OpSpec, variant: Variant, name: str, guard: Callable[..., Any]
) -> Callable[..., Any]:
    """An operator that leaves its results in the arguments that they overwrite."""
    targets = [spec.parameters.index(parameter) for parameter in variant.overwrites]

    def body(*args: Any) -> None:
        result = guard(*args)
        # An implementation may find an argument unfit to write to, and a later candidate may write
        # to none.
        put(tuple(args[at] for at in targets), result)

    return _operator(spec, variant, variant.mutating_schema, name, body, lambda *args: None)


def _operator(
    spec: OpSpec,
    variant: Variant,
    schema: str,
    name: str,
    body: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """One torch.library operator; `body` and `fake` are given the contract's arguments."""
    fresh = name not in _bodies
    _bodies[name] = _by_schema(spec, variant, body)
    if fresh:
        LIBRARY.define(name + schema)

        def newest(*args: Any) -> Any:
            return _bodies[name](*args)

        LIBRARY.impl(name, newest, dispatch_key="CompositeExplicitAutograd")
        shapes = _by_schema(spec, variant, fake)
        torch.library.register_fake(f"vllm_fl::{name}", shapes, lib=LIBRARY)
    overload: Callable[..., Any] = getattr(torch.ops.vllm_fl, name).default
    return overload


def _by_schema(spec: OpSpec, variant: Variant, op: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the contract's parameters as one of the variant's, which leaves some out."""
    absent = dict.fromkeys(name for name in spec.parameters if name not in variant.parameters)
    return by_place(Route(constants=absent), variant.parameters, spec, op)


def _router(
    spec: OpSpec, branches: Sequence[tuple[Variant, tuple[str, ...], Callable[..., Any]]]
) -> Callable[..., Any]:
    """Choose the operator by which arguments are None, written out so that Dynamo can trace it.

    Args:
        spec: the contract.
        branches: (variant, the arguments that hold its results afterwards, its operator), those
            with the fewest parameters first.
    """
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
    """An operator may return neither an input, nor a view of one, nor one tensor twice: copy.

    What is not contiguous is copied, too: the fake promised the compiler that it is.
    """
    taken = [arg for arg in args if isinstance(arg, torch.Tensor)]
    parts = []
    aliases: Callable[[Any, Any], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
    for part in result if isinstance(result, tuple) else (result,):
        whole = part.contiguous()
        fresh = whole.clone() if any(aliases(whole, other) for other in taken) else whole
        taken.append(fresh)
        parts.append(fresh)
    return tuple(parts) if isinstance(result, tuple) else parts[0]
