"""Guards: functions with a contract's signature that call an implementation and fall back.

A guard adds only tens of nanoseconds to a call. After an exception or an unsupported call, `Chain`
computes the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

from ..contracts import OpSpec
from ..contracts.outputs import Exact
from ..plugins.answers import parameters_of
from ..plugins.signatures import asked_for
from ..plugins.types import OpImpl
from ..settings.policy import Rows
from .chain import Call, Chain, copied
from .record import Skipped
from .resolver import FOREIGN, STOCK


def _skipped(*_: Any, **__: Any) -> Any:
    raise Skipped


class Guard:
    """A compiled guard. `run` switches it to other candidates: it changes `_chain`, `_fn` and
    `_supports` in `scope`, the globals of its code."""

    def __init__(self, chain: Chain, scope: dict[str, Any]) -> None:
        self.chain, self._scope = chain, scope

    def switch(self) -> None:
        """Make calls run the first candidate, or the others if it is demoted."""
        self.run(self.chain)

    def run(self, chain: Chain) -> None:
        """Make calls run the candidates of `chain` instead."""
        first = chain.impls[0]
        skips = not chain.bare and (chain.op, first.impl_id) in chain.record.demotions
        self._scope["_chain"] = chain
        self._scope["_fn"] = _skipped if skips else first.fn
        self._scope["_supports"] = _skipped if skips else asked_for(first, chain.spec)


def uncontracted(op: str, impl: OpImpl) -> OpSpec:
    """Make a substitute for the missing contract of an op. It checks nothing. It has the parameters
    of `impl`, the first implementation, if each can be passed by position and by name. Otherwise it
    has no parameters, and the op accepts any arguments."""
    parameters = (parameters_of(impl.fn) or ())[impl.needs_layer :]
    # Names with a leading underscore could collide with names in the generated code.
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD or p.name.startswith("_") for p in parameters):
        parameters = ()

    def oracle(*args: Any) -> None:
        return None

    oracle.__name__ = op
    oracle.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return OpSpec(
        oracle,
        variants=(),
        fake=oracle,
        check=oracle,
        samples=lambda *_: (),
        served=lambda *_: (),
        by_token=frozenset(),
        bad_inputs=lambda *_: (),
        dtypes=("float32",),
        outputs=(Exact(),),
    )


def call_guard(chain: Chain) -> Callable[..., Any]:
    """Return the op as a function: the implementation, called inside one `try`. If `chain` has
    several rows, the number of tokens of a call selects its row. If the record counts calls, each
    call counts for the first candidate of its row."""
    return _written(chain, None)


def method_guard(chain: Chain) -> Callable[..., Any]:
    """Return the op as a method. Its parameters are the layer, then the parameters that the layer
    does not provide. The layer's values are read at each call, because its weights may be
    replaced."""
    return _written(chain, chain.spec.from_layer)


LayerReaders = Mapping[str, Callable[[Any], Any]]


def _written(chain: Chain, provided: LayerReaders | None) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    heads = _heads(chain.spec, provided, scope)
    guards: list[tuple[int | None, Callable[..., Any]]] = []
    for ceiling, impls in chain.rows:
        is_bare = chain.bare or impls[0].impl_id in (STOCK.impl_id, FOREIGN.impl_id)
        row = chain.of(*impls, bare=is_bare)
        guard = _compile(row, provided, heads, dict(scope))
        if not row.bare:
            guard = chain.record.counting(guard, chain.op, impls[0].impl_id)
        guards.append((ceiling, guard))
    return _by_size(chain, tuple(guards), heads, scope) if chain.is_by_size else guards[0][1]


def _by_size(
    chain: Chain, guards: Rows[Callable[..., Any]], heads: Mapping[str, str], scope: dict[str, Any]
) -> Callable[..., Any]:
    given = ", ".join(heads)
    lines = [
        "    try:",
        f"        _tokens = {_tokens(chain.spec)}.shape[0]",
        "    except Exception:  # no tensor: the guard of any row says what is wrong with the call",
        f"        return _row{len(guards) - 1}({given})",
    ]
    for number, (ceiling, guard) in enumerate(guards):
        scope[f"_row{number}"] = guard
        condition = "" if ceiling is None else f"if _tokens <= {ceiling}: "
        lines += [f"    {condition}return _row{number}({given})"]
    return _executed(chain, heads, lines, scope)


def _tokens(spec: OpSpec) -> str:
    """Return the source of the argument that has a row per token, as in `OpSpec.tokens`."""
    nullable = _nullable(spec)
    rows = (name for name in spec.parameters if name in spec.by_token)
    names = [n for n in rows if n not in spec.arguments or not spec.arguments[n].may_be_one]
    always = next((n for n, name in enumerate(names) if name not in nullable), len(names) - 1)
    source = names[always]
    for name in reversed(names[:always]):
        source = f"({name} if {name} is not None else {source})"
    return source


def _heads(spec: OpSpec, provided: LayerReaders | None, scope: dict[str, Any]) -> dict[str, str]:
    """Return, for each parameter of a guard, its source in a call -> its source in the `def` line.
    Defaults are added to `scope`."""
    if not spec.parameters:
        heads = {"*_args": "*_args", "**_keywords": "**_keywords"}
        return heads if provided is None else {"_layer": "_layer", **heads}
    nullable = _nullable(spec) if provided is not None else frozenset()
    heads = {}
    defaults_so_far = True  # a default may only be followed by defaults
    for p in reversed((*spec.signature.parameters.values(),)):
        if (name := p.name) in (provided or {}):
            continue
        default = None if p.default is p.empty and name in nullable else p.default
        defaults_so_far &= default is not p.empty
        heads[name] = name
        if defaults_so_far:
            scope[f"_default_{name}"] = default
            heads[name] += f"=_default_{name}"
    if provided is not None:
        heads["_layer"] = "_layer"
    return dict(reversed(heads.items()))


def _executed(
    chain: Chain, heads: Mapping[str, str], lines: Sequence[str], scope: dict[str, Any]
) -> FunctionType:
    exec("\n".join([f"def _guard({', '.join(heads.values())}):", *lines]), scope)
    guard = cast("FunctionType", scope["_guard"])
    guard.__name__ = guard.__qualname__ = chain.op
    guard.__code__ = guard.__code__.replace(co_name=chain.op, co_qualname=chain.op)
    guard.__doc__ = chain.spec.oracle.__doc__
    guard.__module__ = __name__
    return guard


def _compile(
    chain: Chain, provided: LayerReaders | None, heads: Mapping[str, str], scope: dict[str, Any]
) -> Callable[..., Any]:
    """Generate the source of the guard for the first candidate, and compile it.

    For `silu_and_mul(x)` and a candidate with `supports`::

        def silu_and_mul(x):
            try:
                _verdict = _supports(x)
                if _verdict is True:
                    return _fn(x)
            except Exception as _error:
                return _chain.recover(_error, _Call(None, x))
            return _chain.refuse(_verdict, _Call(None, x))

    Args:
        provided: see `LayerReaders`, for a method; None for a function.
        heads, scope: the result of `_heads`, and the scope that it filled.
    """
    first = chain.impls[0]
    read = {f"_read_{name}": how for name, how in (provided or {}).items()}
    scope |= {"_Call": Call, "_copy": copied, **read}
    values = {
        name: f"_read_{name}(_layer)" if name in (provided or {}) else name
        for name in chain.spec.parameters or [name for name in heads if name != "_layer"]
    }
    everything = ", ".join(values.values())
    safe = dict(values)
    for name in (first.consumes - chain.grants) & values.keys():
        needed = {name} | chain.spec.consumed_with[name]
        given = " and ".join(f"{values[p]} is not None" for p in sorted(needed))
        safe[name] = f"_copy({values[name]}) if {given} else {values[name]}"
    if first.needs_layer:
        safe = {"_layer": "_layer"} | {name: safe[name] for name in values if name in heads}
    invoke = f"return _fn({', '.join(safe.values())})"
    call = f"_Call({'None' if provided is None else '_layer'}, {everything})"
    recover = ["    except Exception as _error:", f"        return _chain.recover(_error, {call})"]
    if chain.bare:
        lines = [f"    {invoke}"]
    elif asked_for(first, chain.spec) is None:
        lines = ["    try:", f"        {invoke}", *recover]
    else:
        lines = [
            "    try:",
            f"        _verdict = _supports({everything})",
            "        if _verdict is True:",
            f"            {invoke}",
            *recover,
            f"    return _chain.refuse(_verdict, {call})",
        ]
    scope["_switch"] = guard = Guard(chain, scope)  # the only strong reference
    chain.record.watch(guard)
    return _executed(chain, heads, lines, scope)


def _nullable(spec: OpSpec) -> frozenset[str]:
    """Return the parameters that may be None, because one of the op's schemas omits them."""
    return frozenset(
        name for v in spec.variants for name in set(spec.parameters) - set(v.parameters)
    )
