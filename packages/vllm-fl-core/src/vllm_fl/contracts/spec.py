"""The contract of an op. Its checks, tests and wrappers are derived from it."""

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
"""Matches a parameter of a torch schema. Its default may be quoted and contain a comma."""


def differs(value: object, default: object) -> bool:
    """Whether an argument differs from its parameter's default. A tensor always differs."""
    if value is default:
        return False
    if not isinstance(value, (bool, int, float, complex, str, type(default))):
        return True  # tensors would be compared element by element, on their device
    try:
        return bool(value != default)
    except Exception:  # a default that cannot be compared
        return True


@dataclass(frozen=True)
class Sample:
    """One call that every implementation must compute correctly.

    Args:
        name: its special property (`1 token`, `strided qkv view`).
        args: one value per parameter of the contract, in order.
        scale: the magnitude of the values, without unit. The contract's `atol` is for values of
            magnitude 1 and is multiplied by `scale`.
        smaller: the dimension that was reduced, because the oracle is too slow at the size of the
            served model (`8 of 128 experts`); empty for full size. Startup and the kit report it.
        open_rows: the rows of every result that are not compared, such as the row of a token with
            NaN.
        kit_only: whether only the conformance kit makes the call, because vLLM never makes such a
            call and a kernel of vLLM returns incorrect results for it.
        relaid: whether an activation has a layout that vLLM's layers do not produce (`layouts.py`
            of vllm-fl-verify).
        repeats: (the arguments of a smaller call, columns: (n,), int64). Column j of every result
            equals column `columns[j]` of the smaller call. This saves time for large weights with
            repeated rows: the oracle computes only the smaller call. If it is None, the oracle
            computes `args`.
        enlarged: whether the rows are randomly repeated rows of another sample.
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
        name: the problem.
        args: the arguments, in order.
        argument: the parameter that the CallError must report.
    """

    name: str
    args: tuple[Any, ...]
    argument: str


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a served model on one rank, for samples with the model's shapes.

    A size is None if the model's configuration does not contain it. There are then no samples with
    that size.

    Args:
        hidden: features of the residual stream.
        intermediate: features of one half of the gated MLP.
        heads, kv_heads: query and key heads.
        head_size: features of one head.
        rotary: features of one head that are rotated.
        tokens: the batch sizes of the samples, in tokens; the last is the largest.
        max_position: the number of positions of the model or of the samples; the last position is
            max_position - 1.
        epsilon: the number that the model's norms add to the mean of squares.
        more: further sizes, by the `name` of the `SizeRule` in a binding.
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
        """The names of sizes that are None."""
        own = (f.name for f in fields(self) if getattr(self, f.name) is None)
        return (*own, *(name for name, value in self.more.items() if value is None))


@dataclass(frozen=True)
class Variant:
    """One torch.library signature of an op.

    An op has a variant for each form of its result, because a torch schema cannot express "Tensor
    or a pair of Tensors".

    Args:
        name: suffix of the operator's name; empty for the plain variant.
        schema: a signature such as `(Tensor x, float epsilon) -> Tensor`, with some or all
            parameters of the contract, in the same order and with the same names. The contract's
            other parameters are None.
        pads: whether this schema returns a Tensor and the contract returns (Tensor, None).
        overwrites: the arguments that a consuming implementation overwrites with the results, in
            the order of the results; empty for a result that overwrites no argument.
    """

    name: str
    schema: str
    pads: bool = False
    overwrites: tuple[str, ...] = ()

    @cached_property
    def types(self) -> Mapping[str, str]:
        """Parameter -> its type in the schema (`Tensor`, `Tensor?`, `SymInt?`)."""
        inside = self.schema.rpartition("->")[0].strip()[1:-1]
        return MappingProxyType({m["name"]: m["type"] for m in _PARAMETER.finditer(inside)})

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters, in order."""
        return tuple(self.types)

    @cached_property
    def mutating_schema(self) -> str:
        """The schema of the operator that writes its results into `overwrites`."""
        schema = self.schema.rpartition("->")[0]
        for mark, name in zip("abcdefgh", self.overwrites, strict=False):
            schema = re.sub(rf"\bTensor {name}\b", f"Tensor({mark}!) {name}", schema)
        return f"{schema}-> ()"

    @cached_property
    def returns(self) -> int:
        """The number of returned tensors."""
        return self.schema.rpartition("->")[2].count("Tensor")


def unserved(*_: Any) -> tuple[Sample, ...]:
    """Return no samples: the `served` of an op that models do not call."""
    return ()


@dataclass(frozen=True)
class OpSpec:
    """The contract of one op.

    Args:
        oracle: computes and returns the reference result in fp64, with plain torch. Its signature
            is the contract's signature, and its docstring documents the op.
        variants: the torch.library signatures; together they cover every valid call.
        fake: the parameters -> uninitialised tensors with the shapes and dtypes of the results.
        check: the parameters -> None, or (parameter, problem). It is called only after an exception
            and by the conformance kit, never on a call path.
        samples: (dtype, device) -> calls that every implementation must compute correctly.
        served: (ModelSizes, dtype, device, large) -> such calls with one model's sizes; if `large`,
            the values are as large as activations get. With and without `large` it must yield the
            same calls, in the same order and layout, with different values.
        by_token: the parameters with one row per token, in the first dimension. Unless
            `whole_batch` is set, each row of a result depends only on the same row of these
            parameters. A parameter declared with `or_one` may also be one number without rows.
        bad_inputs: (dtype, device) -> calls that `check` must refuse, in addition to the calls that
            the kit derives from `arguments`.
        tolerances: name of the result's dtype (`float32`, `float16`, `bfloat16`) -> its tolerance.
            They apply to outputs without tolerances.
        consumable: the parameters that an implementation may list in `consumes`. It may then
            overwrite them in calls of a variant that writes results to them (`overwrites`).
        from_layer: parameter -> a function that reads it from a vLLM layer. The method form of the
            op has all other parameters of the contract.
        second_form: a second implementation in fp64, written independently of the oracle with a
            different formula. The contract's tests compare the two on all samples.
        layer: the parameters of `from_layer`, by name -> a stand-in for a vLLM layer that provides
            them. It is used without a model, for implementations that need the layer.
        plain: the parameters -> True, or the reason why an implementation that needs the layer does
            not support the call. Older implementations support only plain layers. If layers start
            to provide a new parameter, `plain` must refuse calls that set it, because older
            implementations do not read it. If it is None, every layer is plain.
        dtypes: the names of the inputs' dtypes (`float32`, `float16`, `bfloat16`, or integer dtypes
            for a contract with only integers). Samples are made for each dtype. By default they are
            the keys of `tolerances`.
        outputs: how each result is compared, in order; the last results may be missing. If it is
            empty, each result must be within its tolerance.
        whole_batch: whether a result depends on more rows than its own, or has no row per token
            (one scale for a whole tensor, ids sorted by expert). Startup is then slow, because it
            computes the oracle for each batch.
        ignores_repeats: whether, with `whole_batch`, the results of each row and of the batch stay
            the same when rows are repeated or reordered. It is true for a maximum or a cache, and
            false if results depend on sums, order or positions. Large batches at startup repeat a
            few hundred rows. If True, the oracle computes only these rows.
        fixed_batch: whether rows cannot form other batches, because tokens belong to sequences or
            have states. Startup then runs the served calls unchanged, with a few numbers of tokens.
        part: the parameters -> the arguments of a call with the same results and smaller weights:
            only the parts that the call reads (the experts of its rows). It is used to compare
            calls with weights that are too large to copy. If there is no such call, it is None.
        read_whole: the parameters without a row per token that every call reads completely, such as
            the weight of a layer. `vllm-fl tune` counts their bytes, and alternates between copies
            so that they are not in a cache.
        arguments: parameter -> its declaration (`contracts/arguments.py`), if the contract has
            them. The conformance kit derives further bad inputs from it.
        group: the name of a group of ops, such as `norms`, which settings select by `group:NAME`;
            empty for none.

    Raises:
        ValueError: a parameter cannot be passed both by position and by name; the oracle lacks a
            parameter; there are no dtypes; an output has no tolerance; the number of results of a
            variant does not match `outputs`; `ignores_repeats` is set without `whole_batch` or with
            `fixed_batch`; or the group is not an identifier.
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
    fixed_batch: bool = False
    part: Callable[..., tuple[Any, ...]] | None = None
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    group: str = ""

    def __post_init__(self) -> None:
        who = f"OpSpec({self.name})"
        if not isinstance(self.group, str) or (self.group and not self.group.isidentifier()):
            raise ValueError(f"{who}: group must be a name such as norms, got {self.group!r}")
        plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for parameter in self.signature.parameters.values():
            if parameter.kind is not plain:
                raise ValueError(f"{who}: {parameter} must be passed by position and by name")
        object.__setattr__(self, "dtypes", tuple(self.dtypes or self.tolerances))
        if not self.dtypes:
            raise ValueError(f"{who}: dtypes is empty, and tolerances has none")
        if self.ignores_repeats and (self.fixed_batch or not self.whole_batch):
            raise ValueError(
                f"{who}: ignores_repeats requires whole_batch, and excludes fixed_batch"
            )
        for number, output in enumerate(self.outputs or (Within(),)):
            if not (getattr(output, "tolerances", True) or self.tolerances):
                raise ValueError(
                    f"{who}: neither output {number} ({type(output).__name__}) nor the contract "
                    "has tolerances"
                )
        for variant in self.variants:
            self.outputs_of(variant.returns)
        for part in ("by_token", "from_layer", "consumable", "read_whole", "arguments"):
            if unknown := sorted({*getattr(self, part)}.difference(self.parameters)):
                raise ValueError(
                    f"{who}: {part} contains {', '.join(unknown)}, which the oracle does not have; "
                    f"its parameters are {', '.join(self.parameters)}"
                )

    @property
    def name(self) -> str:
        """The op's name."""
        return self.oracle.__name__

    @cached_property
    def signature(self) -> inspect.Signature:
        """The contract's parameters. Annotations stay strings, so torch need not be imported."""
        return inspect.signature(self.oracle)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters, in order."""
        return tuple(self.signature.parameters)

    def tolerance(self, dtype: torch.dtype, output: Output | None = None) -> Tolerance:
        """Return the tolerance for results of `dtype`.

        Args:
            dtype: the dtype of the result.
            output: the output of the result; None for the contract's tolerances.

        Raises:
            KeyError: no tolerance is defined for `dtype`.
        """
        found: Mapping[str, Tolerance] = getattr(output, "tolerances", {}) or self.tolerances
        name = str(dtype).removeprefix("torch.")
        if name not in found:
            known = ", ".join(found)
            raise KeyError(f"{self.name} has no tolerance for results of {name}, only for {known}")
        return found[name]

    def outputs_of(self, results: int) -> tuple[Output, ...]:
        """Return the outputs of a call with this number of results, in order.

        Raises:
            ValueError: the number exceeds `outputs`, or is inside an output with several results.
        """
        if not self.outputs:
            return (Within(),) * results
        ends = [0, *accumulate(output.results for output in self.outputs)]
        if results not in ends:
            raise ValueError(
                f"OpSpec({self.name}): a call with {results} results does not match outputs, which "
                f"have {ends[-1]}: {', '.join(type(output).__name__ for output in self.outputs)}"
            )
        return self.outputs[: ends.index(results)]

    @cached_property
    def consumed_with(self) -> Mapping[str, frozenset[str]]:
        """Parameter -> the arguments that a call must pass before the parameter may be overwritten;
        empty for no condition. Variants without these arguments do not overwrite the parameter."""

        def needed(parameter: str) -> frozenset[str]:
            places = [v for v in self.variants if parameter in v.overwrites]
            others = [p for v in self.variants if v not in places for p in v.parameters]
            if not places or not others:
                return frozenset()
            common = frozenset.intersection(*(frozenset(v.parameters) for v in places))
            return common.difference(others)

        return MappingProxyType({p: needed(p) for p in self.parameters})

    def consumed(self, declared: Iterable[str], arguments: Iterable[Any]) -> frozenset[str]:
        """Return the parameters in `declared` that a call with `arguments` may overwrite."""
        present = {p for p, arg in zip(self.parameters, arguments, strict=False) if arg is not None}
        return frozenset(p for p in declared if p in present and self.consumed_with[p] <= present)

    def named(self, arguments: Iterable[Any]) -> dict[str, Any]:
        """Return the arguments of a call by parameter."""
        return dict(zip(self.parameters, arguments, strict=True))

    def unprovided(self, arguments: Iterable[Any]) -> tuple[Any, ...]:
        """Return the arguments of a call that are not provided by a layer, in order."""
        if not self.from_layer:  # a contract without parameters allows any number of arguments
            return tuple(arguments)
        given = zip(self.parameters, arguments, strict=True)
        return tuple([arg for name, arg in given if name not in self.from_layer])

    @property
    def caches(self) -> frozenset[str]:
        """The consumable parameters without a row per token: caches and pools of states. Results
        that are written to them have no row per token either. `call_op` copies the other consumable
        arguments, but overwrites the caller's caches."""
        return self.consumable - self.by_token

    def has_rows(self, name: str, argument: Any) -> bool:
        """Whether an argument has a row per token, which is not true for None and for a single
        number."""
        if name not in self.by_token or argument is None:
            return False
        return name not in self.arguments or not self.arguments[name].is_one(argument)

    def with_rows(self, arguments: Iterable[Any]) -> dict[str, Any]:
        """Return the arguments of a call that have a row per token, by name."""
        given = self.named(arguments).items()
        return {name: arg for name, arg in given if self.has_rows(name, arg)}

    def with_changed_rows(
        self, arguments: Iterable[Any], change: Callable[[Any], Any]
    ) -> tuple[Any, ...]:
        """Return the arguments of a call, with `change` applied to each with a row per token."""
        given = self.named(arguments)
        rows = self.with_rows(given.values()).items()
        return tuple((given | {name: change(arg) for name, arg in rows}).values())

    def tokens(self, arguments: Iterable[Any]) -> Any:
        """Return the number of tokens of a call, from the first argument with a row per token; 0
        without such an argument. In a graph the number may be symbolic."""
        return next((arg.shape[0] for arg in self.with_rows(arguments).values()), 0)
