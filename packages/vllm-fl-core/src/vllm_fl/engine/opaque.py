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
from ..contracts.routes import Route, by_target, put
from ..dispatch.chain import Chain
from ..dispatch.guard import call_guard
from ..plugins.types import OpImpl


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


@dataclass(frozen=True)
class Site:
    """An operator that a graph may have, and what may take its place.

    Args:
        chain: the candidates, by the size of a call.
        tokens: the operator's arguments -> how many tokens the call has.
        inlined: an implementation -> a function of the operator's parameters that runs it alone.
    """

    chain: Chain
    tokens: Callable[[Sequence[Any]], Any]
    inlined: Callable[[OpImpl], Callable[..., Any]]


@dataclass(frozen=True)
class _Operator:
    """An operator of this process.

    Args:
        op: its op.
        impl_id: the first candidate for the largest calls.
        body: what it runs.
        site: what may take its place, where it is ordered by size and writes over no argument.
    """

    op: str
    impl_id: str
    body: Callable[..., Any]
    site: Site | None


_operators: dict[str, _Operator] = {}
"""By name. An operator cannot be defined twice in a process, but its body can change: a plan that
takes the place of one that is gone finds its operators and gives them its own."""


def operators() -> dict[str, tuple[str, str]]:
    """The operators of this process, by name: (op, the id of what runs in the largest calls)."""
    return {name: (of.op, of.impl_id) for name, of in _operators.items()}


def ordered() -> dict[Callable[..., Any], Site]:
    """The operators of this process that are ordered by size and write over no argument."""
    return {_overload(name): of.site for name, of in _operators.items() if of.site is not None}


def inlined(chain: Chain, impl: OpImpl) -> Callable[..., Any]:
    """`impl` by the contract's parameters, as code that a compiler traces, which has no second try.

    Args:
        chain: a chain of the op.
        impl: one of its candidates that a compiler may look into.
    """
    bare = dataclasses.replace(chain.of(impl, bare=True), grants=frozenset())
    return chain.record.counting(call_guard(bare), chain.op, impl.impl_id)


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

    The schema is fixed when the operator is defined, so that one row decides for all sizes: if an
    implementation for up to 8 tokens overwrites `x`, and the one for the rest does not, the
    operator overwrites nothing, and the first one gets a copy.

    Args:
        chain, rest_is_inlined: as for `opaque_op`.
        variant: one of the contract's.
    """
    deciding = chain.impls[0]
    if rest_is_inlined:
        firsts = (impls[0] for _, impls in reversed(chain.rows))
        deciding = next((impl for impl in firsts if not is_inlined(impl)), deciding)
    written = variant.overwrites
    return written if written and chain.grants & deciding.consumes >= set(written) else ()


def opaque_op(chain: Chain, place: int = 1, *, rest_is_inlined: bool = False) -> OpImpl:
    """The first implementation of `chain` as one whose function is a torch.library operator.

    The operator is named after the chain and the plan's place, so that a graph compiled by one
    process is found again by the next, and two plans that serve at the same time have each their
    own. Registering the same chain in the same place again gives the operator a new body.

    Args:
        chain: the candidates, and the arguments that the caller grants. Where it has rows, the
            operator looks a call's row up when it runs: once, at its capture, in a captured graph.
            It mutates its arguments where the first candidate of the largest calls does.
        place: the plan's place among those that serve in this process (`Plan.place`).
        rest_is_inlined: whether the code of rows that can be inlined is put in the operator's
            place, whatever its schema. It then mutates its arguments where the first candidate of
            the largest calls that are left to it does.
    """
    spec, first = chain.spec, chain.impls[0]
    rows = [[n, [impl.impl_id for impl in impls]] for n, impls in chain.rows]
    branches = []
    for variant in sorted(spec.variants, key=lambda variant: len(variant.parameters)):
        written = mutated(chain, variant, rest_is_inlined=rest_is_inlined)
        # Inputs of an operator stay intact unless its schema says otherwise.
        granting = dataclasses.replace(chain, grants=frozenset(written))
        guard = call_guard(granting)
        name = unique_name(
            "_".join(filter(None, (spec.name, variant.name, first.impl_id))),
            rows,
            [spec.name, variant.name, *written],
            {"strict": chain.strict, "place": place},
        )
        site = None if written or not chain.is_by_size else _site(chain, variant)
        body = _writing(spec, variant, guard) if written else _returning(variant, guard)
        _define(name, spec, variant, written=bool(written))
        _operators[name] = _Operator(spec.name, first.impl_id, body, site)
        branches.append((variant, written, _overload(name)))
    consumes = frozenset(name for _, written, _ in branches for name in written)
    return dataclasses.replace(
        first, fn=_router(spec, branches), supports=None, consumes=consumes, traceable=True
    )


def _site(chain: Chain, variant: Variant) -> Site:
    """What may take the place of a variant's operator.

    Its results are contiguous, as the operator's are, and no memory of an argument.
    """
    spec = chain.spec
    tokens = _of_variant(spec, variant, lambda *args: spec.tokens(args))

    def alone(impl: OpImpl) -> Callable[..., Any]:
        return _of_variant(spec, variant, _returning(variant, inlined(chain, impl)))

    return Site(chain, lambda args: tokens(*args), alone)


def _returning(variant: Variant, guard: Callable[..., Any]) -> Callable[..., Any]:
    """`guard` with results as an operator returns them that leaves its arguments as they are."""
    single = variant.returns == 1

    def body(*args: Any) -> Any:
        result = guard(*args)
        return _fresh(result[0] if single and isinstance(result, tuple) else result, args)

    return body


def _writing(spec: OpSpec, variant: Variant, guard: Callable[..., Any]) -> Callable[..., Any]:
    """`guard`, leaving its results in the arguments that they overwrite."""
    targets = [spec.parameters.index(parameter) for parameter in variant.overwrites]

    def body(*args: Any) -> None:
        result = guard(*args)
        # An implementation may find an argument unfit to write to, and a later candidate may write
        # to none.
        put(tuple(args[at] for at in targets), result)

    return body


def _define(name: str, spec: OpSpec, variant: Variant, *, written: bool) -> None:
    """Define the operator of a variant, unless it is; its body is the one in `_operators`."""
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


def _overload(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(torch.ops.vllm_fl, name).default
    return found


def _of_variant(spec: OpSpec, variant: Variant, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, which takes all of the contract's arguments, by the parameters of a variant's operator.

    A variant leaves some out, and torch the trailing ones that equal the schema's defaults.
    """
    parameters = spec.signature.parameters.values()
    absent = {p.name: None for p in parameters if p.default is p.empty}
    left_out = {name: None for name in absent if name not in variant.parameters}
    return by_target(Route(constants=left_out), variant.parameters, spec, op)


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
