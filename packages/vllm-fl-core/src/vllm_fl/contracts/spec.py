"""What a contract is: the single source from which an op's checks, tests and wrappers follow."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from .outputs import Output, Tolerance, Within

if TYPE_CHECKING:
    import torch

__all__ = ["BadInput", "ModelSizes", "OpSpec", "Sample", "Tolerance", "Variant"]


_PARAMETER = re.compile(
    r"""(?P<type>\w[^\s,="']*)\s+(?P<name>\w+)(?:=(?:"[^"]*"|'[^']*'|\[[^\]]*\]|[^,]*))?(?:,|$)"""
)
"""One parameter of a torch schema with its default, which may be quoted and hold a comma."""


def differs(value: object, default: object) -> bool:
    """Whether a call gives a parameter another value than its default; a tensor is another one."""
    if value is default:
        return False
    if not isinstance(value, (bool, int, float, complex, str, type(default))):
        return True  # a tensor would be compared by element, and on its device
    try:
        return bool(value != default)
    except Exception:  # a default that cannot be compared
        return True


@dataclass(frozen=True)
class Sample:
    """One call that every implementation must get right.

    Args:
        name: what is special about it (`1 token`, `strided qkv view`).
        args: one value per parameter of the contract, in order.
        scale: the magnitude of the values, without unit: the contract's `atol`, which is meant for
            values of magnitude 1, counts that many times.
        smaller: in which size a served model's call is larger, where the oracle of that one is too
            dear: `8 of 128 experts`. A start and the kit say it; empty: the call is of its size.
        open_rows: rows of every result of which nothing is promised, as that of a token with NaN.
            All others are compared.
        kit_only: the conformance kit makes the call and a start does not: vLLM makes none of the
            kind, and a kernel of its own gets it wrong.
        relaid: whether an activation has a layout that no layer of vLLM has (`layouts.py` of
            vllm-fl-verify).
        repeats: (the arguments of a smaller call, columns), where column j of every result is that
            call's column `columns[j]`, (n,), int64. Large weights that repeat their rows are made
            so, and the oracle is asked about the smaller call. None: it is asked about `args`.
        enlarged: whether its rows are those of another sample, drawn several times.
    """

    name: str
    args: tuple[Any, ...]
    scale: float = 1.0
    smaller: str = ""
    open_rows: tuple[int, ...] = ()
    kit_only: bool = False
    relaid: bool = False
    repeats: tuple[tuple[Any, ...], torch.Tensor] | None = None
    enlarged: bool = False


@dataclass(frozen=True)
class BadInput:
    """One call that breaks the contract.

    Args:
        name: what is wrong with it.
        args: the arguments, in order.
        argument: the parameter that the CallError must name.
    """

    name: str
    args: tuple[Any, ...]
    argument: str


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a served model, for samples of its own shapes (per rank).

    A size that the model's configuration does not tell is None, and has no samples.

    Args:
        hidden: features of the residual stream.
        intermediate: features of one half of the gated MLP.
        heads, kv_heads: query and key heads.
        head_size: features of one head.
        rotary: how many of them rotate.
        tokens: the batch sizes to try, in tokens; the last one is the largest batch.
        max_position: the model's length, or what of it is tried: positions run from 0 to
            max_position - 1.
        epsilon: what the model's norms add to the mean of squares.
        more: what the bindings of ops ask beyond these, by the names of their rules.
    """

    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    rotary: int | None = None
    tokens: tuple[int, ...] = (1,)
    max_position: int = 2048
    epsilon: float = 1e-6
    more: Mapping[str, float | None] = field(default_factory=dict, hash=False)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of the sizes that are not told."""
        own = (f.name for f in fields(self) if getattr(self, f.name) is None)
        return (*own, *(name for name, value in self.more.items() if value is None))


@dataclass(frozen=True)
class Variant:
    """One torch.library signature of an op, where the contract's own has no torch schema.

    A torch schema cannot say "Tensor or a pair of Tensors": each shape of result is a variant.

    Args:
        name: suffix of the operator's name, empty for the plain one.
        schema: `(Tensor x, float epsilon) -> Tensor`, the parameters a subset of the contract's,
            in its order and under its names; those left out are None.
        pads: the contract returns (Tensor, None) where this schema returns the Tensor alone.
        overwrites: the arguments over which a consuming implementation writes the results, in the
            results' order; empty where a result has no such place.
    """

    name: str
    schema: str
    pads: bool = False
    overwrites: tuple[str, ...] = ()

    @cached_property
    def types(self) -> Mapping[str, str]:
        """Parameter -> its type as the schema writes it (`Tensor`, `Tensor?`, `SymInt?`)."""
        inside = self.schema.rpartition("->")[0].strip()[1:-1]
        return MappingProxyType({m["name"]: m["type"] for m in _PARAMETER.finditer(inside)})

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the schema's parameters, in order."""
        return tuple(self.types)

    @cached_property
    def mutating_schema(self) -> str:
        """The schema of the operator that leaves its results in `overwrites`."""
        schema = self.schema.rpartition("->")[0]
        for mark, name in zip("abcdefgh", self.overwrites, strict=False):
            schema = re.sub(rf"\bTensor {name}\b", f"Tensor({mark}!) {name}", schema)
        return f"{schema}-> ()"

    @cached_property
    def returns(self) -> int:
        """How many tensors come back."""
        return self.schema.rpartition("->")[2].count("Tensor")


def unserved(*_: Any) -> tuple[Sample, ...]:
    """The `served` of an op that no engine runs: no model has calls of it."""
    return ()


@dataclass(frozen=True)
class OpSpec:
    """The contract of one op.

    Args:
        oracle: the op itself, computed in fp64 with plain torch and returned in fp64. Its
            signature is the contract's and its docstring the documentation.
        variants: its torch.library signatures; all together they cover every legal call.
        fake: the parameters -> empty tensors of the result's shape and dtype. Computes nothing.
        check: the parameters -> None, or (parameter, what is wrong with it). Called only after an
            exception, and by the conformance kit: never on a call path.
        samples: (dtype, device) -> the calls that every implementation must get right.
        served: (ModelSizes, dtype, device, large) -> the same for one model's own sizes; with
            `large` the values are as large as activations get. Both give the same calls, in the
            same order and layout, with other values.
        by_token: the parameters that have one row per token, in the first dimension. Each row of
            every result depends on the same row of these alone, unless `whole_batch` is set. One
            that is declared so (`or_one`) may be one number instead, which is no row.
        bad_inputs: (dtype, device) -> calls that `check` must refuse, beyond those that follow from
            `arguments`.
        tolerances: how far from the oracle a result may lie, by the result's dtype (`float32`,
            `float16`, `bfloat16`), for the outputs that bring none of their own.
        consumable: the parameters that an implementation may declare in `consumes`. It may then
            overwrite them in the calls whose variant has results to put there (`overwrites`).
        from_layer: parameter -> how a vLLM layer provides it. The method form of the op is the
            contract without these parameters.
        second_form: the oracle's op by another formula, written independently of it: same
            parameters, same results, in fp64. The contract's tests compare the two on all samples.
        layer: the parameters of `from_layer`, by name -> an object that provides them, as a layer
            of vLLM's would: for implementations that take the layer, where there is no model.
        plain: the parameters -> True, or why an implementation that takes the layer is not given
            this call. Such an implementation reads the layer itself, and the older form's know a
            plain one; None: any layer is plain. A parameter that layers begin to provide is refused
            here, since those written before do not read it.
        dtypes: what the inputs may be, by name (`float32`, `float16`, `bfloat16`; a contract of
            integers alone names theirs): samples are made and run in each. Empty: those of
            `tolerances`.
        outputs: how the results are compared, in order; a call may have fewer results than a
            contract has outputs, the last ones missing. Empty: each within its tolerance.
        whole_batch: True where a result depends on more rows than its own, or has no row per token
            (one scale for a whole tensor, ids sorted by expert). The start then computes the
            oracle anew for each batch, which takes longer.
        ignores_repeats: with `whole_batch`: True where a batch that holds rows several times, in
            any order, gives each of them the same results, and the same numbers that belong to no
            row (a maximum, a cache; not a sum, an order or a place). Large batches of the start
            repeat a few hundred rows, and for those alone the oracle is then computed.
        stands: True where the tokens of a batch belong to sequences, or each has its own state, so
            that no batch can be made of other rows of a pool. The start then tries the served calls
            as they stand, at a few numbers of tokens.
        part: the parameters -> those of a call that gives the same results and holds only what it
            reads of large weights (of experts, those that its rows take): for comparing calls on
            weights that are too large to be copied. None: there is no such part.
        read_whole: the parameters beside those with a row per token of which every call reads all,
            as a weight of which each layer has its own: `vllm-fl tune` counts their bytes, and
            gives calls in turn other ones where caches would hold them from call to call.
        arguments: parameter -> what it must be (`contracts/arguments.py`), of a contract that
            declares it: the conformance kit makes further bad inputs by it.
        group: the ops that settings order together with this one by `group:NAME`, as `norms`; empty
            for an op that they order by its own name alone.

    Raises:
        ValueError: the parts contradict each other: a parameter that no call can pass by position,
            no dtypes, an output without a tolerance, a variant whose results end inside a pair,
            `ignores_repeats` without `whole_batch`, or with `stands`; or a group that is no name;
            or one of them names a parameter that the oracle does not take.
    """

    oracle: Callable[..., Any]
    variants: tuple[Variant, ...]
    fake: Callable[..., Any]
    check: Callable[..., tuple[str, str] | None]
    samples: Callable[[torch.dtype, torch.device], Iterable[Sample]]
    served: Callable[..., Iterable[Sample]]
    by_token: frozenset[str]
    bad_inputs: Callable[[torch.dtype, torch.device], Iterable[BadInput]]
    tolerances: Mapping[str, Tolerance] = field(default_factory=lambda: MappingProxyType({}))
    consumable: frozenset[str] = frozenset()
    from_layer: Mapping[str, Callable[[Any], Any]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    second_form: Callable[..., Any] | None = None
    layer: Callable[..., object] = SimpleNamespace
    plain: Callable[..., object] | None = None
    dtypes: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    whole_batch: bool = False
    ignores_repeats: bool = False
    read_whole: frozenset[str] = frozenset()
    stands: bool = False
    part: Callable[..., tuple[Any, ...]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    group: str = ""

    def __post_init__(self) -> None:
        who = f"OpSpec({self.name})"
        if not isinstance(self.group, str) or (self.group and not self.group.isidentifier()):
            raise ValueError(f"{who}: a group is a name, as norms; got {self.group!r}")
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for parameter in self.signature.parameters.values():
            if parameter.kind is not plain:
                raise ValueError(f"{who}: {parameter} must be passed by position and by name")
        object.__setattr__(self, "dtypes", tuple(self.dtypes or self.tolerances))
        if not self.dtypes:
            raise ValueError(f"{who}: name the dtypes of its inputs in dtypes")
        if self.ignores_repeats and (self.stands or not self.whole_batch):
            raise ValueError(
                f"{who}: ignores_repeats is for a contract with whole_batch and without stands"
            )
        for number, output in enumerate(self.outputs or (Within(),)):
            if not (getattr(output, "tolerances", True) or self.tolerances):
                raise ValueError(
                    f"{who}: output {number}, {type(output).__name__}, has no tolerances, and the "
                    "contract has none"
                )
        for variant in self.variants:
            self.outputs_of(variant.returns)
        for part in ("by_token", "from_layer", "consumable", "read_whole", "arguments"):
            if unknown := sorted({*getattr(self, part)}.difference(self.parameters)):
                raise ValueError(
                    f"{who}: {part} names {', '.join(unknown)}, which the oracle does not take; "
                    f"its parameters are {', '.join(self.parameters)}"
                )

    @property
    def name(self) -> str:
        """The op's name."""
        return self.oracle.__name__

    @cached_property
    def signature(self) -> inspect.Signature:
        """The contract's parameters; annotations are left as text, so that torch stays out."""
        return inspect.signature(self.oracle)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the contract's parameters, in order."""
        return tuple(self.signature.parameters)

    def tolerance(self, dtype: torch.dtype, output: Output | None = None) -> Tolerance:
        """The tolerance for results of `dtype`; KeyError for a dtype that has none.

        Args:
            dtype: the result's.
            output: whose result it is; None takes the contract's own tolerances.
        """
        found: Mapping[str, Tolerance] = getattr(output, "tolerances", {}) or self.tolerances
        name = str(dtype).removeprefix("torch.")
        if name not in found:
            known = ", ".join(found)
            raise KeyError(f"{self.name} has no tolerance for results of {name}, only of {known}")
        return found[name]

    def outputs_of(self, results: int) -> tuple[Output, ...]:
        """How the results of a call with so many of them are compared, in order.

        Raises:
            ValueError: so many results end inside a pair, or are more than `outputs` names.
        """
        if not self.outputs:
            return (Within(),) * results
        ends = [0, *accumulate(output.results for output in self.outputs)]
        if results not in ends:
            raise ValueError(
                f"OpSpec({self.name}): a call with {results} results does not fit outputs, which "
                f"name {ends[-1]}: {', '.join(type(output).__name__ for output in self.outputs)}"
            )
        return self.outputs[: ends.index(results)]

    @cached_property
    def consumed_with(self) -> Mapping[str, frozenset[str]]:
        """Parameter -> the arguments without which it is not consumed; empty: it always may be.

        No variant without these has a result to put there.
        """

        def needed(parameter: str) -> frozenset[str]:
            places = [v for v in self.variants if parameter in v.overwrites]
            others = [p for v in self.variants if v not in places for p in v.parameters]
            if not places or not others:
                return frozenset()
            common = frozenset.intersection(*(frozenset(v.parameters) for v in places))
            return common.difference(others)

        return MappingProxyType({p: needed(p) for p in self.parameters})

    def consumed(self, declared: Iterable[str], arguments: Iterable[Any]) -> frozenset[str]:
        """Those of the parameters `declared` as consumed that one call's `arguments` give up."""
        present = {p for p, arg in zip(self.parameters, arguments, strict=False) if arg is not None}
        return frozenset(p for p in declared if p in present and self.consumed_with[p] <= present)

    def named(self, arguments: Iterable[Any]) -> dict[str, Any]:
        """One call's `arguments`, by name."""
        return dict(zip(self.parameters, arguments, strict=True))

    def unprovided(self, arguments: Iterable[Any]) -> tuple[Any, ...]:
        """Those of one call's `arguments` that no layer provides, in order."""
        if not self.from_layer:  # so it is where a contract has no parameters, and takes any
            return tuple(arguments)
        given = zip(self.parameters, arguments, strict=True)
        return tuple([arg for name, arg in given if name not in self.from_layer])

    @property
    def caches(self) -> frozenset[str]:
        """The consumable parameters without a row per token: caches and pools of states.

        The results in them have no row per token either. `call_op` copies the other consumable
        arguments of its caller, and overwrites caches.
        """
        return self.consumable - self.by_token

    def has_rows(self, name: str, argument: Any) -> bool:
        """Whether an argument has a row per token: it is not None, nor one number for all."""
        if name not in self.by_token or argument is None:
            return False
        return name not in self.arguments or not self.arguments[name].is_one(argument)

    def with_rows(self, arguments: Iterable[Any]) -> dict[str, Any]:
        """Those of one call's `arguments` that have a row per token, by name."""
        given = self.named(arguments).items()
        return {name: arg for name, arg in given if self.has_rows(name, arg)}

    def with_changed_rows(
        self, arguments: Iterable[Any], change: Callable[[Any], Any]
    ) -> tuple[Any, ...]:
        """One call's `arguments`, those that have a row per token as `change` gives them."""
        given = self.named(arguments)
        rows = self.with_rows(given.values()).items()
        return tuple((given | {name: change(arg) for name, arg in rows}).values())

    def tokens(self, arguments: Iterable[Any]) -> Any:
        """How many tokens one call has: the rows of the first of its `arguments` that has one for
        each token; in a graph that may be a symbol. 0 where none has."""
        return next((arg.shape[0] for arg in self.with_rows(arguments).values()), 0)
